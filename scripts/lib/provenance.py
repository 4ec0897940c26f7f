"""Where a result came from."""

from __future__ import annotations

import importlib.metadata
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def header(
    device: str, given: str | None, packages: Sequence[str] = ("torch", "triton", "sglang")
) -> dict:
    """What every results file says first; ``given`` is that of ``commit``."""
    return {
        "device": device,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": commit(given),
        "command": shlex.join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit(given: str | None = None) -> str:
    """``given`` (--commit: a copy may have no git, or an older one), else the checkout's commit,
    with "-dirty" where files differ from it, else "unknown"."""
    if given:
        return given
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.check_output(
            [*command, "--abbrev=40"], text=True, stderr=subprocess.DEVNULL
        )
        return found.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return "unknown"
