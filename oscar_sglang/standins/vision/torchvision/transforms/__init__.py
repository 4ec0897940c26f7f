from .._absent import absent
from . import functional, v2
from .functional import InterpolationMode

__all__ = ["InterpolationMode", "functional", "v2"]
__getattr__ = absent(__name__)
