"""Stand-in for torchvision, which SGLang imports for images; text models never call it."""

from . import io, transforms

__all__ = ["io", "transforms"]
# transformers compares versions; 0.0 keeps it on its PIL code paths.
__version__ = "0.0"
