"""Artifacts that a start makes for itself alone: one file each, however often it starts."""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..cache import cache_dir
from .header import ArtifactError, read_header

logger = logging.getLogger(__name__)

_PREFIX = "oscar_sglang_artifact_"
_LOCK = "owner.lock"
_held: list[Any] = []  # open lock files; the system releases them with this process


def keep(artifact: Any) -> Path:
    """Save under its id in the cache directory, where the next start finds the same file."""
    path = cache_dir() / f"data-free-{artifact.id}.safetensors"
    try:
        read_header(path)  # a sound file of that length
    except ArtifactError:
        try:
            artifact.save(path)
        except (ArtifactError, OSError) as error:
            logger.warning("oscar: %s: using a temporary file", error)
            return save_temporary(artifact)
    return path


def save_temporary(artifact: Any) -> Path:
    """Save for as long as this process lives, and remove what dead ones have left: a server that is
    killed, which is how SGLang ends its own, has no time to tidy up."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix="." + _PREFIX))
    lock = (folder / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append(lock)
    folder = folder.rename(folder.with_name(folder.name[1:]))  # locked before anyone can sweep it
    path = folder / "artifact.safetensors"
    artifact.save(path)
    return path


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is in use, or another user's
            continue
