"""``--oscar-debug-tags``: a backend's pool gets its watch."""

from __future__ import annotations

import logging
from typing import Any

from .tags import DEFAULT_EVERY, Tags

logger = logging.getLogger(__name__)


def watch_reads(backend: Any) -> None:
    """Of the reference path (``OscarAttnBackend``)."""
    from .read_tags import ReadTags

    table = backend.req_to_token_pool.req_to_token
    backend.pool.watch = tags = ReadTags(backend.pool.segments, table)
    tags.parking = backend.pool.parking
    logger.warning("oscar: debug tags are on: every read is checked, which is slow")


def watch_steps(backend: Any, every: int | None = None) -> None:
    """Of the kernels (``OscarGpuBackend``), every ``every``-th step."""
    from .probe import Probe  # imports Triton

    pool, every = backend.pool, every or DEFAULT_EVERY
    pool.watch = tags = Tags(pool.segments, backend.req_to_token, every)
    tags.parking = pool.parking
    tags.probe = Probe(tags, backend.views, backend.decode_attention, pool.scratch)
    logger.warning(
        "oscar: debug tags are on: every write is recorded and every %d. step checked, which is "
        "slow",
        every,
    )
