"""2-bit KV cache for stock SGLang. Importing this package imports neither torch nor sglang."""

__version__ = "0.1.0"  # the only place; pyproject.toml reads it
