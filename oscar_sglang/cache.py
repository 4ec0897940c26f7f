"""Where files are kept between starts. Kernels need it too, so it imports nothing of ours."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where artifacts and compiled kernels live: $OSCAR_SGLANG_CACHE, else the XDG cache
    directory."""
    if explicit := os.environ.get("OSCAR_SGLANG_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "oscar_sglang"
