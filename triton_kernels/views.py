"""What the kernels take instead of stores: one layer's tensors, and one step's token metadata."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .codec import CodecSpec, LayerParams
from .layout import WindowLayout
from .tile import FORMS


class LayerView(NamedTuple):
    """One layer's cache and codec (letters as in ``layout``).

    blocks            [N, Hk, block_bytes] uint8
    sink_k, sink_v    [R, n_sink, Hk, D]    model dtype, rotated
    ring_k, ring_v    [R, n_recent, Hk, D]  model dtype, rotated
    cache_k, cache_v  [C, Hk, D]            model dtype, rotated (sink cache)
    channels          [pages, Hk, D, 2]     float16 step and lo of K's channels; None unless the
                                            codec has blocks
    """

    spec: CodecSpec
    params: LayerParams
    blocks: torch.Tensor
    sink_k: torch.Tensor
    sink_v: torch.Tensor
    ring_k: torch.Tensor
    ring_v: torch.Tensor
    cache_k: torch.Tensor
    cache_v: torch.Tensor
    channels: torch.Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.sink_k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.sink_k.shape[3]

    @property
    def form(self) -> int:
        """Which metadata the kernels read (``tile.FORMS``)."""
        return FORMS[self.spec.meta]

    @property
    def grid(self) -> torch.Tensor:
        """``tile``'s grid; any tensor where the codec has none and nobody reads it."""
        if self.channels is not None:
            return self.channels
        return self.params.r_k if self.params.grid is None else self.params.grid

    @property
    def windows(self) -> WindowLayout:
        return WindowLayout(self.sink_k.shape[1], self.ring_k.shape[1])


def layer_view(seg, layer: int) -> LayerView:
    """The tensors of ``layer`` of a ``reference.Segments``."""
    w = seg.windows
    view = LayerView(
        seg.spec,
        seg.params[layer],
        seg.history.blocks[layer],
        w.sink_k[layer],
        w.sink_v[layer],
        w.recent_k[layer],
        w.recent_v[layer],
        seg.sinks.k[layer],
        seg.sinks.v[layer],
        seg.history.channels[layer] if seg.spec.block > 1 else None,
    )
    if seg.history.layout != seg.spec.layout(view.kv_heads, view.head_dim):
        raise ValueError(f"codec {seg.spec.name} does not fill blocks of {seg.history.layout}")
    tensors = [t for t in (*view.params, *view[2:]) if t is not None]
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError("the kernels address contiguous caches and codec matrices")
    return view


class TokenBatch(NamedTuple):
    """Fresh tokens of one step, all [T]; int32 or int64.

    rows         request row (0: padding)
    positions    position in the request
    ends         context length of the token's request once the whole batch is stored
    slots        history slot; a negative slot skips the token altogether
    cache_index  row of the sink cache to write, or -1 (``plan.claim_sinks``)
    """

    rows: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    cache_index: torch.Tensor
