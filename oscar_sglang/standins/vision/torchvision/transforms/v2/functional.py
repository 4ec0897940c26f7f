from ..._absent import absent
from ..functional import InterpolationMode

__all__ = ["InterpolationMode"]
__getattr__ = absent(__name__)
