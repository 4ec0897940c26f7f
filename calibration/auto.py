"""Calibrate once per model, user and codec; later starts read the file. Used by the server."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from ..artifact.file import Artifact, ArtifactError, Fingerprint, check, load
from ..cache import cache_dir
from ..kernels.codec import CODECS
from .plan import Plan

logger = logging.getLogger(__name__)

_LOCK_NOTICE_SECONDS = 5


def artifact_path(
    fingerprint: Fingerprint,
    codec: str,
    codec_options: Mapping[str, str] | None = None,
    bits: float | None = None,
) -> Path:
    """Where the artifact of a model, codec and choice of its options is cached."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", fingerprint.architecture)
    chosen = "".join(f"-{k}-{v}" for k, v in sorted((codec_options or {}).items()))
    chosen += "" if bits is None else f"-{bits:g}-bits"
    return cache_dir() / f"{name}-{fingerprint.key}-{codec}{chosen}.safetensors"


def ensure_artifact(plan: Plan, codec: str = "feedback") -> tuple[Artifact, Path | None, bool]:
    """The cached artifact of the plan's model, calibrated as planned if there is none yet.

    Returns the artifact, its file (None if the cache directory cannot be written) and whether it
    was made now. A file lock makes other processes wait instead of calibrating the same model
    twice. The file is found by model, codec and the codec's options; what it was calibrated on
    does not matter.
    """
    fingerprint = Fingerprint.of(plan.model_dir)
    path = artifact_path(fingerprint, codec, plan.codec_options, plan.bits)
    found = _valid(path, fingerprint, codec)
    if found:
        return found, path, False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
    except OSError as error:
        logger.warning(
            "oscar: cannot write the cache directory %s (%s): calibrating for this process only; "
            "set OSCAR_SGLANG_CACHE to a writable directory to do it once",
            path.parent,
            error.strerror or error,
        )
        return _calibrate(plan, codec), None, True
    try:
        found = _valid(path, fingerprint, codec)  # another process may have made it meanwhile
        if found:
            return found, path, False
        artifact = _calibrate(plan, codec)
        return artifact, _save(artifact, path), True
    finally:
        lock.release()


def _lock(path: Path) -> FileLock:
    """An acquired lock beside ``path``; says so if it has to wait."""
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=_LOCK_NOTICE_SECONDS)
    except Timeout:
        logger.info("oscar: waiting for another process to calibrate %s", path.name)
        lock.acquire()
    return lock


def _valid(path: Path, fingerprint: Fingerprint, codec: str) -> Artifact | None:
    if not path.exists():
        return None
    try:
        artifact = load(path)
        check(artifact, fingerprint, codec)
    except ArtifactError as error:
        logger.warning("oscar: ignoring a cached artifact: %s", error)
        return None
    return artifact


def _calibrate(plan: Plan, codec: str) -> Artifact:
    from .pipeline import calibrate  # imports transformers, which a cache hit does not need

    if CODECS[codec].needs_data:
        logger.info(
            "oscar: calibrating codec %s for %s on self-sampled tokens, once",
            codec,
            plan.model_dir,
        )
    artifact = calibrate(plan, codec)
    if CODECS[codec].needs_data:
        logger.info("oscar: calibrated in %s s", artifact.provenance["seconds"])
    for warning in artifact.provenance["warnings"]:
        logger.warning("oscar: calibration: %s", warning)
    return artifact


def _save(artifact: Artifact, path: Path) -> Path | None:
    try:
        artifact.save(path)
    except ArtifactError as error:
        logger.warning("oscar: using the new artifact without keeping it: %s", error)
        return None
    return path
