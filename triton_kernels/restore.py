"""restore: exact sink rows of requests that start on a cached prefix, in one launch for all layers
whose codes have the same bits."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .materialise import decode_rows
from .tile import POSITION, TURN, form_of, mean_rows

HITS, MISSES, REQUESTS = range(3)
_TILE = 16


@triton.jit
def _restore_kernel(
    sink_k, sink_v, cache_k, cache_v, blocks, grids, tables, which, lift, units, tag,
    req_to_token, rows, prefix_lens, started, counters, layers, block_offsets,
    stride_req, sink_layer, cache_layer, grid_layer, table_stride, n_sink, cache_rows, COUNTS,
    FORM: tl.constexpr, TB: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    layer = tl.load(layers + tl.program_id(2) // Hk)
    head = tl.program_id(2) % Hk
    pos = tl.program_id(1) * TB + tl.arange(0, TB)
    row = tl.load(rows + request).to(tl.int64)
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    ok = (pos < n_sink) & (pos < prefix) & (tl.load(started + request) != 0)
    slot = tl.load(req_to_token + row * stride_req + pos, ok, 0).to(tl.int64)
    at = slot % cache_rows
    hit = ok & (tl.load(tag + at, ok, -1) == slot)
    miss = ok & (hit == 0)
    cols = tl.arange(0, D)[None, :]
    src = layer.to(tl.int64) * cache_layer + ((at * Hk + head) * D)[:, None] + cols
    sink_row = ((row * n_sink + pos) * Hk + head) * D
    dst = layer.to(tl.int64) * sink_layer + sink_row[:, None] + cols
    mine = blocks + tl.load(block_offsets + layer) // 2
    grid = grids + layer.to(tl.int64) * grid_layer
    turns = tables
    if FORM % 8 == POSITION:
        turns += tl.load(which + layer) * table_stride
        lift += layer.to(tl.int64) * (Hk * D * D)
        units += layer * (Hk * 2)
    mean = 0.0
    if FORM % 8 == POSITION:  # the program's positions are one tile of them
        tile = tl.program_id(1) * (TB // TURN) + tl.arange(0, 16)
        rows_of_means = mean_rows(turns, lift, units, tile, tile * TURN < n_sink, head, 16, D)
        mean = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, rows_of_means, 0.0), 0)[None, :]
    k = tl.load(cache_k + src, hit[:, None], 0.0).to(tl.float32)
    decoded = decode_rows(mine, slot, miss, head, 0, grid, mean, FORM, TB, Hk, D)
    k = tl.where(miss[:, None], decoded, k)
    tl.store(sink_k + dst, k.to(sink_k.dtype.element_ty), ok[:, None])
    v = tl.load(cache_v + src, hit[:, None], 0.0).to(tl.float32)
    decoded = decode_rows(mine, slot, miss, head, 1, grid, mean, FORM, TB, Hk, D)
    v = tl.where(miss[:, None], decoded, v)
    tl.store(sink_v + dst, v.to(sink_v.dtype.element_ty), ok[:, None])
    if (tl.program_id(2) == 0) & (COUNTS != 0):
        tl.atomic_add(counters, tl.sum(hit.to(tl.int64), 0))
        tl.atomic_add(counters + 1, tl.sum(miss.to(tl.int64), 0))
        first = (tl.program_id(1) == 0) & (tl.sum(ok.to(tl.int32), 0) > 0)
        tl.atomic_add(counters + 2, first.to(tl.int64))


@functools.lru_cache(maxsize=8)
def _by_form(forms: tuple[int, ...], device: torch.device) -> list[tuple[int, torch.Tensor]]:
    """Each form with the layers that have it, [n] int32."""
    return [
        (
            form,
            torch.tensor([i for i, f in enumerate(forms) if f == form], dtype=torch.int32).to(
                device
            ),
        )
        for form in dict.fromkeys(forms)
    ]


def restore_sinks(
    seg,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    started: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """``reference.restore_sinks`` for every request of a batch, without a host synchronisation.

    seg                the pool's ``reference.Segments`` (stores allocated as one stack per kind)
    req_to_token       [R, max_context] int32
    rows, prefix_lens  [B] int64
    started            [B] bool   requests that have just taken their row; others are left alone
    counters           [3] int64  += sink-cache hits, misses, requests started on a prefix
    """
    windows, sinks, history = seg.windows, seg.sinks, seg.history
    _, _, n_sink, kv_heads, dim = windows.sink_k.stack.shape
    blocks = history.base.view(torch.uint16)
    if seg.spec.block > 1:
        grids = history.channels.stack
    else:
        grids = blocks if seg.grids is None else seg.grids
    m, names = seg.means, ("tables", "which", "lift", "units")
    means = {name: blocks if m is None else getattr(m, name) for name in names}
    forms = tuple(form_of(spec) for spec in seg.specs)
    for i, (form, layers) in enumerate(_by_form(forms, blocks.device)):
        grid = (len(rows), triton.cdiv(n_sink, _TILE), len(layers) * kv_heads)
        _restore_kernel[grid](
            sink_k=windows.sink_k.stack,
            sink_v=windows.sink_v.stack,
            cache_k=sinks.k.stack,
            cache_v=sinks.v.stack,
            blocks=blocks,
            grids=grids,
            **means,
            tag=sinks.tag,
            req_to_token=req_to_token,
            rows=rows,
            prefix_lens=prefix_lens,
            started=started,
            counters=counters,
            layers=layers,
            block_offsets=history.offsets,
            stride_req=req_to_token.stride(0),
            sink_layer=windows.sink_k.stack.stride(0),
            cache_layer=sinks.k.stack.stride(0),
            grid_layer=grids.stride(0),
            table_stride=means["tables"].stride(0),
            n_sink=n_sink,
            cache_rows=len(sinks.tag),
            COUNTS=int(i == 0),
            FORM=form,
            TB=_TILE,
            Hk=kv_heads,
            D=dim,
            num_warps=4,
        )
