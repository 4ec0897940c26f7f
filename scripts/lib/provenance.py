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
    """What every results file says first; ``given`` is that of ``commit``. The version of a package
    that is not installed is "none"."""
    return {
        "device": device,
        "versions": {name: _version(name) for name in packages},
        "commit": commit(given),
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def command() -> str:
    """What was typed: a module's name where Python has put the path of its file."""
    spec = sys.modules["__main__"].__spec__
    return shlex.join([*(["python", "-m", spec.name] if spec else sys.argv[:1]), *sys.argv[1:]])


def commit(given: str | None = None) -> str:
    """``given`` (--commit: a copy may have no git, or an older one), else the checkout's commit,
    with "-dirty" where files differ from it, else "unknown"."""
    if given:
        return given
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.check_output([*git, "--abbrev=40"], text=True, stderr=subprocess.DEVNULL)
        return found.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return "unknown"
