"""Once per step, shared by all layers: how attention work is split, and who fills the sink cache.

Work of a step is one line of *cost units*, request after request; of a request its exact window
chunks come first (16 tokens, ``WINDOW_COST`` units each, whose rows are 7 times as many
bytes as packed ones), then its history tiles (32 tokens, 1 unit). Split ``i`` of ``n`` owns
``[i * total // n, (i + 1) * total // n)`` of the line, so splits are equal in work whatever the
lengths are, and a fixed grid serves every step of a CUDA graph. Split ``i`` of request ``b``
leaves its partial result at row ``i + b``, unique because one of the two grows along the line.

plan int32: ``HEADER`` fields (total, n, requests), ``FIELDS`` per request, ``SPLIT`` per split: the
request its line starts in, the line's begin and end, and from the 5th on that request's fields, so
that a split finds its work with one load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .layout import WindowLayout
from .tile import BLOCK

WINDOW_TOKENS = tl.constexpr(16)
WINDOW_COST = tl.constexpr(4)
TILE_TOKENS = tl.constexpr(32)
MIN_UNITS = 8  # of a split: more splits than that only lengthen the merge
HEADER = tl.constexpr(8)
FIELDS = tl.constexpr(8)
SPLIT = tl.constexpr(16)
# Fields of a request; SPLITS holds its first and last split, 16 bits each.
ROW, SEQ_LEN, HIST_END, Q_START, Q_LEN, COST_BEGIN, COST_END, SPLITS = map(tl.constexpr, range(8))


def plan_size(batch: int, splits: int) -> int:
    """int32 elements of a plan."""
    return HEADER.value + FIELDS.value * batch + SPLIT.value * splits


@triton.jit
def request_chunks(seq_len, hist_end, n_sink):
    """(sink chunks, recent chunks, history tiles) of a request; scalars or vectors."""
    sink = tl.minimum(seq_len, n_sink)
    recent = tl.maximum(seq_len - tl.maximum(n_sink, hist_end), 0)
    tiles = (hist_end - n_sink // BLOCK * BLOCK + TILE_TOKENS - 1) // TILE_TOKENS
    tiles = tl.where(hist_end > n_sink, tiles, 0)
    pad = WINDOW_TOKENS - 1
    return (sink + pad) // WINDOW_TOKENS, (recent + pad) // WINDOW_TOKENS, tiles


@triton.jit
def _plan_kernel(
    plan, rows, seq_lens, recent_start, q_indptr, B, splits, min_units, n_sink, n_recent, block,
    RAGGED: tl.constexpr, BB: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BB)
    ok = b < B
    row = tl.load(rows + b, ok, 0).to(tl.int32)
    seq_len = tl.load(seq_lens + b, ok, 0).to(tl.int32)
    if RAGGED:
        q_start = tl.load(q_indptr + b, ok, 0).to(tl.int32)
        q_len = tl.load(q_indptr + b + 1, ok, 0).to(tl.int32) - q_start
    else:
        q_start = b
        q_len = ok.to(tl.int32)
    fresh_from = tl.load(recent_start + row, ok, 0).to(tl.int32)  # below: ``first_exact``
    low = tl.maximum(tl.maximum(fresh_from, seq_len - n_recent), 0)
    hist_end = tl.maximum((low + block - 1) // block * block, n_sink)
    hist_end = tl.maximum(tl.minimum(seq_len - q_len, hist_end), 0)
    sink, recent, tiles = request_chunks(seq_len, hist_end, n_sink)
    cost = tl.where(ok & (q_len > 0), (sink + recent) * WINDOW_COST + tiles, 0)
    end = tl.cumsum(cost, 0)
    total = tl.sum(cost, 0)
    n = tl.minimum(splits, (total + min_units - 1) // min_units)
    tl.store(plan, total)
    tl.store(plan + 1, n)
    tl.store(plan + 2, B)
    at = plan + HEADER + b * FIELDS
    tl.store(at + ROW, row, ok)
    tl.store(at + SEQ_LEN, seq_len, ok)
    tl.store(at + HIST_END, hist_end, ok)
    tl.store(at + Q_START, q_start, ok)
    tl.store(at + Q_LEN, q_len, ok)
    tl.store(at + COST_BEGIN, end - cost, ok)
    tl.store(at + COST_END, end, ok)
    # Largest i with i * total // n <= line, for a request's first and last unit.
    per_unit = tl.maximum(total, 1).to(tl.int64)
    first = ((end - cost + 1).to(tl.int64) * n - 1) // per_unit
    last = (end.to(tl.int64) * n - 1) // per_unit
    tl.store(at + SPLITS, tl.where(cost > 0, first | (last << 16), 0).to(tl.int32), ok)
    tl.debug_barrier()  # splits below read the fields of requests
    for i0 in range(0, splits, BS):
        i = i0 + tl.arange(0, BS)
        used = i < n
        line = tl.where(used, i.to(tl.int64) * total // tl.maximum(n, 1), 0).to(tl.int32)
        line_end = tl.where(used, (i + 1).to(tl.int64) * total // tl.maximum(n, 1), 0).to(tl.int32)
        owner = tl.sum((ok[None, :] & (end[None, :] <= line[:, None])).to(tl.int32), 1)
        to = plan + HEADER + B * FIELDS + i * SPLIT
        tl.store(to, owner, i < splits)
        tl.store(to + 1, line, i < splits)
        tl.store(to + 2, line_end, i < splits)
        source = plan + HEADER + tl.minimum(owner, B - 1) * FIELDS
        for field in tl.static_range(FIELDS):
            tl.store(to + 4 + field, tl.load(source + field, i < splits), i < splits)


def plan_attend(
    plan: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    recent_start: torch.Tensor,
    windows: WindowLayout,
    splits: int,
    q_indptr: torch.Tensor | None = None,
    min_units: int = MIN_UNITS,
    block: int = 1,
) -> torch.Tensor:
    """Fill ``plan`` [plan_size(B, splits)] int32 for one step; no host synchronisation.

    rows, seq_lens  [B]    request rows, context lengths with the fresh tokens (0: inert)
    recent_start    [R]    ``WindowStore.recent_start``
    q_indptr        [B+1]  first query row of each request; None: one query each
    min_units              least work of a split, at least WINDOW_COST
    block                  ``CodecSpec.block``: history ends at a multiple of it

    The CUDA attend reads the plan before the kernel launched just before it has finished: at
    least one other kernel (``store``) must lie between the two.
    """
    batch = len(rows)
    padded = triton.next_power_of_2(batch)
    _plan_kernel[(1,)](
        plan=plan,
        rows=rows,
        seq_lens=seq_lens,
        recent_start=recent_start,
        q_indptr=rows if q_indptr is None else q_indptr,
        B=batch,
        splits=splits,
        min_units=min_units,
        n_sink=windows.n_sink,
        n_recent=windows.n_recent,
        block=block,
        RAGGED=q_indptr is not None,
        BB=padded,
        BS=max(16, min(256, 8192 // padded)),
        num_warps=8,
    )
    return plan


@triton.jit
def _wants_cache(positions, slots, t, T, n_sink):
    slot = tl.load(slots + t, t < T, 0).to(tl.int64)
    pos = tl.load(positions + t, t < T, 0).to(tl.int64)
    return slot, (slot > 0) & (pos < n_sink)


@triton.jit
def _bid_kernel(claim, positions, slots, T, n_sink, rows, BT: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    slot, wants = _wants_cache(positions, slots, t, T, n_sink)
    tl.atomic_max(claim + slot % rows, t, mask=wants)


@triton.jit
def _settle_kernel(claim, tag, cache_index, positions, slots, T, n_sink, rows, BT: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    slot, wants = _wants_cache(positions, slots, t, T, n_sink)
    row = slot % rows
    won = wants & (tl.load(claim + row, wants, -1) == t)
    tl.store(tag + row, slot, won)
    tl.store(claim + row, tl.full([BT], -1, tl.int32), won)
    tl.store(cache_index + t, tl.where(won, row, -1).to(cache_index.dtype.element_ty), t < T)


def claim_sinks(
    tag: torch.Tensor,
    claim: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    n_sink: int,
    cache_index: torch.Tensor,
) -> torch.Tensor:
    """Tag the sink-cache rows of this step's sink tokens; of tokens that share a row the last wins
    (``SinkCache.winners``), so that all layers agree with the tag. Two launches per step.

    tag          [C] int64  ``SinkCache.tag``
    claim        [C] int32  scratch, all -1 before and after
    cache_index  [T] int    receives the row each token writes, or -1
    """
    n, block = len(slots), 128
    grid = (triton.cdiv(n, block),)
    step = dict(claim=claim, positions=positions, slots=slots, T=n, n_sink=n_sink, rows=len(tag))
    _bid_kernel[grid](**step, BT=block, num_warps=4)
    _settle_kernel[grid](**step, tag=tag, cache_index=cache_index, BT=block, num_warps=4)
    return cache_index
