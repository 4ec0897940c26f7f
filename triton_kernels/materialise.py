"""materialise: exact or decoded rows of any position range, contiguous and still rotated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tile import POSITION, TURN, load_row, mean_rows
from .views import LayerView


@triton.jit
def decode_rows(
    blocks, slot, ok, head, KV: tl.constexpr, grid, mean, FORM: tl.constexpr,
    TB: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``CodecSpec.decode_k`` / ``decode_v`` of ``slot`` [TB] -> float32 [TB, D]. ``mean``: w A
    [TB, D] of POSITION's keys, else not read."""
    values, step, lo = load_row(blocks, grid, slot, ok, head, KV, FORM, TB, Hk, D)
    if KV == 0 and FORM % 8 == POSITION:
        y = values * step[:, None] + lo[:, None] * mean
    else:
        y = values * step[:, None] + lo[:, None]
    return y


@triton.jit
def _mean_kernel(
    out, turns, lift, units, starts, indptr, B, tiles,
    BB: tl.constexpr, TN: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """w A [tiles, Hk, D] of the tiles of positions that some request asks for."""
    first = tl.program_id(0) * TN
    head = tl.program_id(1)
    b = tl.arange(0, BB)
    start = tl.load(starts + b, b < B, 0).to(tl.int64)
    n = (tl.load(indptr + b + 1, b < B, 0) - tl.load(indptr + b, b < B, 0)).to(tl.int64)
    asked = (n > 0) & (start < (first + TN) * TURN) & (start + n > first * TURN)
    if tl.max(asked.to(tl.int32), 0) > 0:
        tile = first + tl.arange(0, TN)
        ok = tile < tiles
        y = mean_rows(turns, lift, units, tile, ok, head, TN, D)
        at = (tile.to(tl.int64) * Hk + head)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(out + at, y, ok[:, None])


@triton.jit
def _copy_tile(src, src_at, dst, dst_at, ok, Hk: tl.constexpr, D: tl.constexpr, head):
    cols = tl.arange(0, D)[None, :]
    x = tl.load(src + ((src_at * Hk + head) * D)[:, None] + cols, ok[:, None], 0.0)
    tl.store(dst + dst_at[:, None] + cols, x.to(dst.dtype.element_ty), ok[:, None])


@triton.jit
def _materialise_kernel(
    out_k, out_v, rows, starts, indptr, hist_end, req_to_token, stride_req,
    blocks, grids, means, sink_k, sink_v, ring_k, ring_v, n_sink, n_recent,
    FORM: tl.constexpr, TB: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1)
    head = tl.program_id(2)
    first = tl.load(indptr + request).to(tl.int64)
    n = tl.load(indptr + request + 1).to(tl.int64) - first
    i = tl.program_id(0) * TB + tl.arange(0, TB)
    if tl.program_id(0) * TB < n:
        row = tl.load(rows + request).to(tl.int64)
        boundary = tl.load(hist_end + request).to(tl.int64)
        pos = tl.load(starts + request).to(tl.int64) + i
        ok = i < n
        sink = ok & (pos < n_sink)
        history = ok & (pos >= n_sink) & (pos < boundary)
        ring = ok & (pos >= n_sink) & (pos >= boundary)
        dst = ((first + i) * Hk + head) * D
        if tl.max(history.to(tl.int32), 0) > 0:
            slot = tl.load(req_to_token + row * stride_req + pos, history, 0).to(tl.int64)
            cols = tl.arange(0, D)[None, :]
            mean = 0.0
            if FORM % 8 == POSITION:
                at = ((pos // TURN * Hk + head) * D)[:, None] + cols
                mean = tl.load(means + at, history[:, None], 0.0)
            k = decode_rows(blocks, slot, history, head, 0, grids, mean, FORM, TB, Hk, D)
            tl.store(out_k + dst[:, None] + cols, k.to(out_k.dtype.element_ty), history[:, None])
            v = decode_rows(blocks, slot, history, head, 1, grids, mean, FORM, TB, Hk, D)
            tl.store(out_v + dst[:, None] + cols, v.to(out_v.dtype.element_ty), history[:, None])
        if tl.max((ok & (history == 0)).to(tl.int32), 0) > 0:
            sink_at = row * n_sink + pos
            ring_at = row * n_recent + pos % n_recent
            _copy_tile(sink_k, sink_at, out_k, dst, sink, Hk, D, head)
            _copy_tile(sink_v, sink_at, out_v, dst, sink, Hk, D, head)
            _copy_tile(ring_k, ring_at, out_k, dst, ring, Hk, D, head)
            _copy_tile(ring_v, ring_at, out_v, dst, ring, Hk, D, head)


def materialise(
    view: LayerView,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    indptr: torch.Tensor,
    hist_end: torch.Tensor,
    max_len: int,
    out_k: torch.Tensor,
    out_v: torch.Tensor,
) -> None:
    """Rows of positions ``[starts[b], starts[b] + n_b)`` of each request, back to back.

    req_to_token      [R, max_context] int32
    rows, starts      [B]    request row and first position
    indptr            [B+1]  where each request's rows start in the output; n_b = difference
    hist_end          [B]    end of the history segment (``reference.history_end``)
    max_len           host bound on n_b (sizes the grid)
    out_k, out_v      [sum n_b, Hk, D]  any float dtype, contiguous
    """
    if max_len <= 0 or len(rows) == 0:
        return
    tile, kv_heads, dim = 32, view.kv_heads, view.head_dim
    means = view.blocks if view.means is None else _means(view, starts, indptr)
    grid = (triton.cdiv(max_len, tile), len(rows), kv_heads)
    _materialise_kernel[grid](
        out_k=out_k,
        out_v=out_v,
        rows=rows,
        starts=starts,
        indptr=indptr,
        hist_end=hist_end,
        req_to_token=req_to_token,
        stride_req=req_to_token.stride(0),
        blocks=view.blocks.view(torch.uint16),
        grids=view.grid,
        means=means,
        sink_k=view.sink_k,
        sink_v=view.sink_v,
        ring_k=view.ring_k,
        ring_v=view.ring_v,
        n_sink=view.windows.n_sink,
        n_recent=view.windows.n_recent,
        FORM=view.form,
        TB=tile,
        Hk=kv_heads,
        D=dim,
        num_warps=4,
    )


def _means(view: LayerView, starts: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """w A [tiles, Hk, D] float32 of what is about to be materialised (``_mean_kernel``)."""
    m, block = view.means, 64
    tiles, dim = m.turns.shape
    out = torch.empty((tiles, view.kv_heads, dim), dtype=torch.float32, device=starts.device)
    grid = (triton.cdiv(tiles, block), view.kv_heads)
    _mean_kernel[grid](
        out=out,
        turns=m.turns,
        lift=m.lift,
        units=m.units,
        starts=starts,
        indptr=indptr,
        B=len(starts),
        tiles=tiles,
        BB=triton.next_power_of_2(len(starts)),
        TN=block,
        Hk=view.kv_heads,
        D=dim,
        num_warps=4,
    )
    return out
