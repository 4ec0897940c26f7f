"""Three-segment attention in plain PyTorch: the specification the GPU kernels are tested against.

A request whose context is ``S`` tokens long, of which ``P = prefix`` were cached before this
batch, reads

    [0, n_sink)            sink     exact, ``WindowStore.sink[row, pos]``
    [n_sink, hist_end)     history  2-bit, ``HistoryStore`` at slot ``req_to_token[row, pos]``
    [max(n_sink, hist_end), P)      recent   exact, ring
    [P, S)                 fresh    this batch's own rows, causal

    hist_end = min(P, max(n_sink, recent_start[row], P + 1 - n_recent))

i.e. the boundary that the first fresh token sees; a decode step is a chunk of one token, so one
path serves decode, chunked prefill, new turns on a cached prefix and mixed batches alike.

A block codec (``CodecSpec.block`` > 1, which must be the page size) encodes whole blocks only: a
block is sealed by the store of its last token, which finds the earlier ones in the ring, and
hist_end is rounded up to a block. So of the ring's n_recent tokens up to block - 1 may be read as
codes, and it must hold at least a block.
Clear before fast: one Python loop over the requests of a batch, none over tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .codec import (
    CodecSpec,
    LayerParams,
    rotate,
)
from .layout import WindowLayout
from .means import Means
from .stores import HistoryStore, SinkCache, WindowStore

_QUERY_TILE = 256


@dataclass
class Segments:
    """The stores of one pool and the codec that fills them.

    specs    of each layer; None where they are all ``spec``, which says what they share
    context  tokens a request may have; only ``means`` asks for it
    """

    spec: CodecSpec
    params: list[LayerParams]
    history: HistoryStore
    windows: WindowStore
    sinks: SinkCache
    specs: list[CodecSpec] | None = None
    context: int = 0

    def __post_init__(self) -> None:
        if self.specs is None:
            self.specs = [self.spec] * len(self.params)

    @functools.cached_property
    def grids(self) -> torch.Tensor | None:
        """Metadata grids of all layers [L, Hk, 2, 3] float32, if the codec has any."""
        has = self.params[0].grid is not None
        return torch.stack([p.grid for p in self.params]) if has else None

    @functools.cached_property
    def means(self) -> Means | None:
        """What the kernels of codec ``position`` read besides ``params``."""
        if self.params[0].mean is None:
            return None
        return Means.of(self.specs, self.params, self.context)


@dataclass
class Batch:
    """One forward pass. All int64; T = sum of fresh lengths.

    rows, prefix_lens, seq_lens, hist_end  [B]
    starts                                 [B] offset of each request's first token in T
    token_rows, positions, slots, ends     [T] (ends: seq_len of the token's request)
    sink_index                             [n] tokens written to the sink cache
    """

    rows: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    hist_end: torch.Tensor
    starts: torch.Tensor
    token_rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    sink_index: torch.Tensor


def first_exact(
    seq_lens: torch.Tensor, recent_start: torch.Tensor, n_sink: int, n_recent: int, block: int = 1
) -> torch.Tensor:
    """First position after the sink, [B] int64, whose row is exact for the last token of contexts
    of ``seq_lens`` [B] tokens: the ring holds ``n_recent``, from ``recent_start`` [B] on. The
    kernels' copy of it is in ``plan``."""
    low = torch.maximum(recent_start, seq_lens - n_recent)
    return (low + (-low) % block).clamp_min(n_sink)


def history_end(
    prefix_lens: torch.Tensor, recent_start: torch.Tensor, windows: WindowLayout, block: int = 1
) -> torch.Tensor:
    """End of the history segment, [B] int64 (see the module docstring)."""
    exact = first_exact(prefix_lens + 1, recent_start, windows.n_sink, windows.n_recent, block)
    return torch.minimum(prefix_lens, exact)


def plan_batch(
    seg: Segments,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
) -> Batch:
    """Metadata of one forward. Claims the sink-cache rows of the sink tokens it writes, and moves
    the rings of its rows on."""
    rows, prefix_lens, seq_lens, slots = (
        x.to(torch.int64) for x in (rows, prefix_lens, seq_lens, slots)
    )
    fresh = seq_lens - prefix_lens
    starts = fresh.cumsum(0) - fresh
    request = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), fresh)
    positions = torch.arange(len(request), device=rows.device) - (starts - prefix_lens)[request]
    token_rows = rows[request]
    # Row 0 and slot 0 are padding: they are written like any other, and never tagged.
    sink = ((positions < seg.windows.windows.n_sink) & (slots > 0)).nonzero().squeeze(-1)
    sink = sink[seg.sinks.winners(slots[sink])]
    seg.sinks.claim(slots[sink])
    seg.windows.go_on(rows, prefix_lens)
    seg.windows.written[rows] = seq_lens
    return Batch(
        rows=rows,
        prefix_lens=prefix_lens,
        seq_lens=seq_lens,
        hist_end=history_end(
            prefix_lens, seg.windows.recent_start[rows], seg.windows.windows, seg.spec.block
        ),
        starts=starts,
        token_rows=token_rows,
        positions=positions,
        slots=slots,
        ends=seq_lens[request],
        sink_index=sink,
    )


def restore_sinks(seg: Segments, row: int, slots: torch.Tensor) -> int:
    """Fill the sink rows of request ``row`` from a cached prefix; returns the sink-cache hits.

    ``slots`` [n] int64: slots of positions 0..n-1, n <= n_sink. A miss is read from history.
    Must run before ``plan_batch`` of the same forward, which may claim rows of other slots.
    """
    hit = seg.sinks.hits(slots)
    positions = torch.arange(len(slots), device=slots.device)
    for layer in range(len(seg.params)):
        k, v = seg.sinks.read(layer, slots)
        if not bool(hit.all()):
            k_hat, v_hat = read_history(seg, layer, slots, positions)
            miss = ~hit[:, None, None]
            k = torch.where(miss, k_hat.to(k.dtype), k)
            v = torch.where(miss, v_hat.to(v.dtype), v)
        seg.windows.sink_k[layer][row, positions] = k
        seg.windows.sink_v[layer][row, positions] = v
    return int(hit.sum())


def store(seg: Segments, layer: int, batch: Batch, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write k, v [T, Hk, D] (any float dtype, not rotated) to every store of ``layer``."""
    params = seg.params[layer]
    k_rot, v_rot = rotate(k, params.r_k), rotate(v, params.r_v)
    if seg.spec.block > 1:
        seal(seg, layer, batch, k_rot, v_rot)  # before the chunk overwrites the ring
    seg.windows.write(layer, batch.token_rows, batch.positions, batch.ends, k_rot, v_rot)
    sink = batch.sink_index
    seg.sinks.write(layer, batch.slots[sink], k_rot[sink], v_rot[sink])
    if seg.spec.block == 1:
        spec = seg.specs[layer]
        seg.history.write(
            layer,
            batch.slots,
            spec.encode_k(params, k_rot, batch.positions),
            spec.encode_v(params, v_rot),
        )


def seal(seg: Segments, layer: int, batch: Batch, k_rot: torch.Tensor, v_rot: torch.Tensor) -> None:
    """Encode the blocks whose last token is among the fresh rows k_rot, v_rot [T, Hk, D] float32.

    All rows of a block are rounded to the ring's dtype first, so that its codes do not depend on
    which of its tokens came in which chunk.
    """
    block, windows = seg.spec.block, seg.windows
    n_sink = windows.windows.n_sink
    requests = (batch.rows, batch.starts, batch.prefix_lens, batch.seq_lens)
    for row, start, prefix, seq_len in zip(*(x.tolist() for x in requests), strict=True):
        if row == 0:  # padding
            continue
        for first in range(prefix - prefix % block, seq_len - block + 1, block):
            fresh_from = max(first, prefix)
            fresh = slice(start + fresh_from - prefix, start + first + block - prefix)
            old = torch.arange(first, fresh_from, device=k_rot.device)
            k_old, v_old = windows.read_recent(layer, row, old)
            limit = torch.finfo(k_old.dtype).max  # an infinity would spoil the channel's range
            k = torch.cat([k_old, k_rot[fresh].to(k_old.dtype)]).float().clamp(-limit, limit)
            v = torch.cat([v_old, v_rot[fresh].to(v_old.dtype)]).float().clamp(-limit, limit)
            k_rows, v_rows, channels = seg.spec.meta.encode_block(k, v, max(0, n_sink - first))
            # A block is a page, so its slots are consecutive.
            slots = batch.slots[fresh.stop - 1] + torch.arange(1 - block, 1, device=k.device)
            seg.history.channels[layer][slots[-1] // block] = channels
            seg.history.write(layer, slots, k_rows, v_rows)


def read_history(
    seg: Segments, layer: int, slots: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Decoded K and V rows [T, Hk, D] float32 of ``slots`` [T] int64, still rotated, which hold the
    tokens at ``positions`` [T] int64 of their requests (``CodecSpec.decode_k``)."""
    spec, params = seg.specs[layer], seg.params[layer]
    k, v = seg.history.read(layer, slots)
    channels = seg.history.channels[layer][slots // spec.block] if spec.block > 1 else None
    return spec.decode_k(params, k, positions, channels), spec.decode_v(params, v)


def materialise(
    seg: Segments,
    layer: int,
    row: int,
    slots: torch.Tensor,
    start: int,
    hist_end: int,
    out_k: torch.Tensor,
    out_v: torch.Tensor,
) -> None:
    """Rotated rows of positions [start, start + n) of a request, from whichever segment holds
    them, into out_k, out_v [n, Hk, D]. ``slots`` [n] int64: the slots of those positions."""
    n_sink = seg.windows.windows.n_sink
    stop = start + len(slots)
    exact_from = max(n_sink, hist_end)
    for low, high, read in (
        (0, n_sink, seg.windows.read_sink),
        (exact_from, stop, seg.windows.read_recent),
    ):
        low, high = max(low, start), min(high, stop)
        if low < high:
            part = slice(low - start, high - start)
            out_k[part], out_v[part] = read(
                layer, row, torch.arange(low, high, device=slots.device)
            )
    low, high = max(n_sink, start), min(hist_end, stop)
    if low < high:
        part = slice(low - start, high - start)
        positions = torch.arange(low, high, device=slots.device)
        out_k[part], out_v[part] = read_history(seg, layer, slots[part], positions)


@dataclass
class Partial:
    """Attention over some of the keys: out [n, H, D] normalised, lse [n, H], both float32."""

    out: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def empty(n: int, heads: int, dim: int, device) -> Partial:
        lse = torch.full((n, heads), -torch.inf, device=device)
        return Partial(torch.zeros(n, heads, dim, device=device), lse)


def merge(a: Partial, b: Partial) -> Partial:
    """Online-softmax union of two disjoint sets of keys; an empty side contributes nothing."""
    top = torch.maximum(a.lse, b.lse)
    safe = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    wa, wb = (a.lse - safe).exp(), (b.lse - safe).exp()
    total = wa + wb
    inv = torch.where(total > 0, 1 / total, torch.zeros_like(total))
    out = a.out * (wa * inv)[..., None] + b.out * (wb * inv)[..., None]
    return Partial(out, safe + total.log())


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    causal: bool = False,
) -> Partial:
    """softmax(q k^T * scale) v with LSE, float32 inside.

    q [n, H, D], k and v [m, Hk, D]; causal: query i sees keys 0..i (n == m).
    """
    n, heads, dim = q.shape
    if len(k) == 0:
        return Partial.empty(n, heads, v.shape[-1], q.device)
    kf, vf = k.float().movedim(0, 1)[:, None], v.float().movedim(0, 1)[:, None]  # [Hk, 1, m, D]
    outs, lses = [], []
    for first in range(0, n, _QUERY_TILE):
        tile = q[first : first + _QUERY_TILE].float() * scale
        t = len(tile)
        m = first + t if causal else len(k)
        grouped = tile.view(t, kf.shape[0], -1, dim).permute(1, 2, 0, 3)  # [Hk, G, t, D]
        logits = grouped @ kf[..., :m, :].transpose(-1, -2)
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        if causal:
            future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
            logits[..., first:].masked_fill_(future, -torch.inf)
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        out = (weights @ vf[..., :m, :]) / total
        outs.append(out.permute(2, 0, 1, 3).reshape(t, heads, -1))
        lses.append((top + total.log()).permute(2, 0, 1, 3).reshape(t, heads))
    return Partial(torch.cat(outs), torch.cat(lses))


def attention(
    seg: Segments,
    layer: int,
    batch: Batch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    req_to_token: torch.Tensor,
    scratch: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of fresh tokens over their cached prefix and themselves. Call before ``store``:
    storing a long chunk overwrites ring rows that the prefix still needs.

    q             [T, H, D]          not rotated, as are k, v [T, Hk, D]
    req_to_token  [R, max_context]   int32 slots
    scratch       [2, tile, Hk, D]   float32, holds one tile of the prefix
    returns       [T, H, D] float32  in the model's basis
    """
    params = seg.params[layer]
    q_rot = rotate(q, params.queries)
    inverse_v = params.r_v.transpose(-1, -2)
    out = torch.empty(*q.shape[:2], v.shape[-1], device=q.device)
    tile = scratch.shape[1]
    spans = zip(
        *(x.tolist() for x in (batch.rows, batch.starts, batch.prefix_lens, batch.seq_lens)),
        batch.hist_end.tolist(),
        strict=True,
    )
    for row, start, prefix, seq_len, hist_end in spans:
        mine = slice(start, start + seq_len - prefix)
        cached = Partial.empty(seq_len - prefix, q.shape[1], v.shape[-1], q.device)
        for first in range(0, prefix, tile):
            n = min(tile, prefix - first)
            slots = req_to_token[row, first : first + n].long()
            tile_k, tile_v = scratch[0, :n], scratch[1, :n]
            materialise(seg, layer, row, slots, first, hist_end, tile_k, tile_v)
            cached = merge(cached, attend(q_rot[mine], tile_k, tile_v, scale, logit_cap))
        cached.out = rotate(cached.out, inverse_v)
        fresh = attend(q[mine], k[mine], v[mine], scale, logit_cap, causal=True)
        out[mine] = merge(cached, fresh).out
    return out
