"""What the kernels take instead of stores: one layer's tensors, and one step's token metadata."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .codec import CodecSpec, LayerParams, rotate
from .codec_affine import to_half
from .layout import HistoryLayout, WindowLayout
from .means import LayerMeans
from .tile import form_of


class LayerView(NamedTuple):
    """One layer's cache and codec (letters as in ``layout``).

    layout            of ``blocks``
    blocks            [N, Hk, block_bytes] uint8
    sink_k, sink_v    [R, n_sink, Hk, D]    model dtype, rotated
    ring_k, ring_v    [R, n_recent, Hk, D]  model dtype, rotated
    cache_k, cache_v  [C, Hk, D]            model dtype, rotated (sink cache)
    channels          [pages, Hk, D, 2]     float16 step and lo of K's channels; None unless the
                                            codec has blocks
    means             None unless the codec is ``position``
    """

    spec: CodecSpec
    layout: HistoryLayout
    params: LayerParams
    blocks: torch.Tensor
    sink_k: torch.Tensor
    sink_v: torch.Tensor
    ring_k: torch.Tensor
    ring_v: torch.Tensor
    cache_k: torch.Tensor
    cache_v: torch.Tensor
    channels: torch.Tensor | None = None
    means: LayerMeans | None = None

    @property
    def kv_heads(self) -> int:
        return self.sink_k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.sink_k.shape[3]

    @property
    def form(self) -> int:
        """Which metadata and codes the kernels read (``tile.form_of``)."""
        return form_of(self.spec)

    @property
    def grid(self) -> torch.Tensor:
        """``tile``'s grid; any tensor where the codec has none and nobody reads it."""
        if self.channels is not None:
            return self.channels
        return self.params.r_k if self.params.grid is None else self.params.grid

    @property
    def q_matrix(self) -> torch.Tensor:
        """[Hk, D, D] that rotates queries."""
        return self.params.queries

    @property
    def query_width(self) -> int:
        """Floats of a query row that ``attend`` reads: D rotated channels; with means also C(q),
        D numbers in FP16 (``means``)."""
        return self.head_dim if self.means is None else self.head_dim * 3 // 2

    @property
    def windows(self) -> WindowLayout:
        return WindowLayout(self.sink_k.shape[1], self.ring_k.shape[1])


def layer_view(seg, layer: int) -> LayerView:
    """The tensors of ``layer`` of a ``reference.Segments``."""
    w = seg.windows
    view = LayerView(
        spec=seg.specs[layer],
        layout=seg.history.layouts[layer],
        params=seg.params[layer],
        blocks=seg.history.blocks[layer],
        sink_k=w.sink_k[layer],
        sink_v=w.sink_v[layer],
        ring_k=w.recent_k[layer],
        ring_v=w.recent_v[layer],
        cache_k=seg.sinks.k[layer],
        cache_v=seg.sinks.v[layer],
        channels=seg.history.channels[layer] if seg.spec.block > 1 else None,
        means=None if seg.means is None else seg.means.layer(layer),
    )
    if view.layout != view.spec.layout(view.kv_heads, view.head_dim):
        raise ValueError(f"codec {seg.spec.name} does not fill blocks of {view.layout}")
    tensors = (t for t in (*view, *view.params, *(view.means or ())) if torch.is_tensor(t))
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


def query_buffer(view: LayerView, tokens: int, heads: int) -> torch.Tensor:
    """Where ``store`` puts what ``attend`` reads of queries: [T, H, query_width] float32."""
    shape = (tokens, heads, view.query_width)
    return torch.empty(shape, dtype=torch.float32, device=view.blocks.device)


def prepare_queries(view: LayerView, q: torch.Tensor) -> torch.Tensor:
    """What ``store`` leaves in a ``query_buffer`` of q [T, H, D], in PyTorch."""
    rotated, m = rotate(q, view.q_matrix), view.means
    if m is None:
        return rotated
    grouped = q.float().unflatten(1, (view.kv_heads, -1))
    own, other = m.mix[None, :, None].unbind(3)
    mixed = own * grouped + other * grouped[..., m.partner.long()]
    return torch.cat([rotated, to_half(mixed).flatten(1, 2).view(torch.float32)], -1)
