"""Who looks on while an attention backend works: in production nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from .prefix_tiles import ExtendPlan


class Watch(Protocol):
    """A pool has one; its backend calls it outside CUDA graphs, and not while they are captured."""

    def ready(self) -> None:
        """The server is ready: what comes now are requests."""

    def stats(self) -> dict[str, Any]:
        """Its part of ``oscar`` in /server_info."""

    def before(self) -> None:
        """A step begins: what the last one wrote is in place, nothing of this one is."""

    def begins(
        self, fb: ForwardBatch, started: torch.Tensor | None, plan: ExtendPlan | None = None
    ) -> None:
        """The step is planned. ``started`` [B] bool: requests of an extend that have taken their
        row, and whose sinks are restored; None in a decode. ``plan``: that of kernels."""

    def attended(self, layer: int) -> None:
        """The reference path has attended in the pool's ``layer`` and stores next."""


class NoWatch:
    def ready(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}

    def before(self) -> None: ...

    def begins(self, fb: ForwardBatch, started: Any, plan: Any = None) -> None: ...

    def attended(self, layer: int) -> None: ...
