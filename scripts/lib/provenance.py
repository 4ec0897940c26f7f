"""Which code a result came from."""

from __future__ import annotations

import subprocess
from pathlib import Path


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
