from enum import Enum

from .._absent import absent
from . import functional, v2

__all__ = ["InterpolationMode", "functional", "v2"]
__getattr__ = absent(__name__)


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
