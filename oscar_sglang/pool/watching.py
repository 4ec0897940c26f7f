"""Who looks on while an attention backend works: in production nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .prefix_tiles import ExtendPlan
    from .sglang_types import ForwardBatch


class Watch:
    """A pool has one; its backend calls it outside CUDA graphs, and not while they are captured.
    This one does nothing."""

    def ready(self) -> None:
        """The server is ready: what comes now are requests."""

    def stats(self) -> dict[str, Any]:
        """Its part of ``oscar`` in /server_info."""
        return {}

    def before(self) -> None:
        """A step begins: what the last one wrote is in place, nothing of this one is."""

    def begins(
        self, fb: ForwardBatch, started: torch.Tensor | None, plan: ExtendPlan | None = None
    ) -> None:
        """The step is planned. ``started`` [B] bool: requests of an extend that have taken their
        row, and whose sinks are restored; None in a decode. ``plan``: that of kernels."""

    def attended(self, layer: int) -> None:
        """The reference path has attended in the pool's ``layer`` and stores next."""
