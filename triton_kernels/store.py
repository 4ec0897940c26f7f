"""store: rotate fresh q, k, v; write windows, sink cache and 2-bit history.

The CUDA form (``cuda_store``) takes over where it can; this is the portable one.
Each program rotates TB tokens of one head with one [D, D] matrix. Program ``part`` 0 owns K, 1
owns V, 2.. the query heads of the KV head. The tile height is the same for a decode step of one
token and a prefill of thousands, so a row's codes do not depend on the batch it came in. History of
a block codec is written by ``seal``, launched just before.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl

from . import cuda_store
from .codec_accurate import MAX_GAIN, RATIOS, Accurate
from .codec_parts import Feedback, Round
from .codec_position import SPREADS
from .rows import plain_codes, rotate_rows, write_history, write_row
from .seal import seal
from .tile import (
    CHANNEL,
    POSITION,
    SCALE,
    TURN,
    interpreted,
    inverse_step,
    mean_rows,
    nearest_code,
    nearest_level,
    row_range,
    row_scale,
    storable,
    to_fp16,
)
from .views import LayerView, TokenBatch

logger = logging.getLogger(__name__)

_TOKENS = 16  # of a program: the least a tensor-core tile takes
_ROUND, _FEEDBACK, _ACCURATE = (tl.constexpr(s.number) for s in (Round, Feedback, Accurate))
_LOW_RATIO, _HIGH_RATIO = map(tl.constexpr, RATIOS)
_MAX_GAIN = tl.constexpr(MAX_GAIN)
_SPREAD, _SPREAD_OF_4_BITS = map(tl.constexpr, (SPREADS[2], SPREADS[4]))


@triton.jit
def _feedback_codes(
    y, step, lo, factor, TB: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr = 3
):
    """Codes [TB, D] int32 chosen one channel after the other; each error is spread over the
    channels still to come (``codec.feedback_codes``, in the same order of operations)."""
    inv = inverse_step(step)
    cols = tl.arange(0, D)
    codes = tl.zeros([TB, D], tl.int32)
    w = y
    for j in range(D):
        here = cols[None, :] == j
        w_j = tl.sum(tl.where(here, w, 0.0), 1)
        code = nearest_code(w_j, inv, lo, LEVELS)
        codes = tl.where(here, code.to(tl.int32)[:, None], codes)
        error = w_j - (code * step + lo)
        w = w - error[:, None] * tl.load(factor + j * D + cols)[None, :]
    return codes


@triton.jit
def _times_metric(x, metric, ROWS: tl.constexpr, D: tl.constexpr):
    """x @ G, float32 [ROWS, D]."""
    BK: tl.constexpr = 64 if D > 64 else D  # as in rotate_rows
    cols = tl.arange(0, D)
    parts = tl.reshape(x, [ROWS, D // BK, BK])
    which = tl.arange(0, D // BK)[None, :, None]
    y = tl.zeros([ROWS, D], tl.float32)
    for k in tl.static_range(0, D // BK):
        part = tl.sum(tl.where(which == k, parts, 0.0), 1)
        some = k * BK + tl.arange(0, BK)
        matrix = tl.load(metric + some[:, None] * D + cols[None, :])
        y = tl.dot(part, matrix, y, input_precision="tf32x3")
    return y


@triton.jit
def _sweep(y, codes, step, lo, metric, ROWS: tl.constexpr, D: tl.constexpr):
    """``codec_accurate.sweep``: better codes [ROWS, D] int32, and what is left of y. Every channel
    says where it would move; one after the other, only the channel whose turn it is does."""
    cols = tl.arange(0, D)
    c = codes.to(tl.float32)
    gradient = _times_metric(y - (c * step[:, None] + lo[:, None]), metric, ROWS, D)
    curvature = tl.load(metric + cols * (D + 1))[None, :] * step[:, None]
    inverse = tl.where(curvature > 0, 1.0 / tl.where(curvature > 0, curvature, 1.0), 0.0)
    for j in range(D):
        moved = nearest_code(c + gradient * inverse, 1.0, 0.0)
        change = tl.where(cols[None, :] == j, moved - c, 0.0)
        c += change
        gradient -= (tl.sum(change, 1) * step)[:, None] * tl.load(metric + j * D + cols)[None, :]
    return c.to(tl.int32), y - (c * step[:, None] + lo[:, None])


@triton.jit
def _metric_energy(x, metric, ROWS: tl.constexpr, D: tl.constexpr):
    """x G x^T per row: x [ROWS, D] -> [ROWS] float32."""
    return tl.sum(_times_metric(x, metric, ROWS, D) * x, 1)


@triton.jit
def _accurate(y, factor, metric, grid, head, FORM: tl.constexpr, TB: tl.constexpr, D: tl.constexpr):
    """``codec_accurate.encode``: y [TB, D] -> codes int32, storable step and lo [TB]. Both ratios
    go through the chains together, as rows 2 t and 2 t + 1."""
    both = tl.reshape(tl.broadcast_to(y[:, None, :], [TB, 2, D]), [2 * TB, D])
    odd = tl.arange(0, 2 * TB) % 2 == 1
    half_ratio = tl.where(odd, 0.5 * _HIGH_RATIO, 0.5 * _LOW_RATIO)
    step, lo = row_range(both, half_ratio, 0, False, D)
    step, lo = storable(step, lo, grid, head, 0, FORM)
    codes = _feedback_codes(both, step, lo, factor, 2 * TB, D)
    codes, error = _sweep(both, codes, step, lo, metric, 2 * TB, D)
    energy = tl.reshape(_metric_energy(error, metric, 2 * TB, D), [TB, 2])
    second = tl.arange(0, 2)[None, :] == 1
    first_energy = tl.sum(tl.where(second, 0.0, energy), 1)
    take = second == (tl.sum(tl.where(second, energy, 0.0), 1) < first_energy)[:, None]
    step = tl.sum(tl.where(take, tl.reshape(step, [TB, 2]), 0.0), 1)
    lo = tl.sum(tl.where(take, tl.reshape(lo, [TB, 2]), 0.0), 1)
    codes = tl.sum(tl.where(take[:, :, None], tl.reshape(codes, [TB, 2, D]), 0), 1)
    bottom = tl.min(y, 1)
    centre = bottom + (tl.max(y, 1) - bottom) * 0.5
    decoded = codes.to(tl.float32) * step[:, None] + lo[:, None]
    true = _metric_energy(y - centre[:, None], metric, TB, D)
    found = _metric_energy(decoded - centre[:, None], metric, TB, D)
    gain = tl.sqrt_rn(tl.div_rn(tl.where(found > 0, true, 1.0), tl.where(found > 0, found, 1.0)))
    gain = tl.where(gain == gain, gain, 1.0)  # inf / inf
    gain = tl.minimum(tl.maximum(gain, 1.0 / _MAX_GAIN), _MAX_GAIN)
    step, lo = storable(step * gain, centre + (lo - centre) * gain, grid, head, 0, FORM)
    return codes, step, lo


@triton.jit
def _mixed(x, stride_x, t, ok, row, mix, partner, head, D: tl.constexpr):
    """C(x) [TB, D] float32 of ``means``: x[t] from ``row`` channels on, of KV head ``head``."""
    cols = tl.arange(0, D)
    at = x + (t.to(tl.int64) * stride_x + row)[:, None]
    own = tl.load(at + cols[None, :], ok[:, None], 0.0).to(tl.float32)
    other = tl.load(at + tl.load(partner + cols)[None, :], ok[:, None], 0.0).to(tl.float32)
    mix += head * (2 * D) + cols
    return own * tl.load(mix)[None, :] + other * tl.load(mix + D)[None, :]


@triton.jit
def _encode_key(
    y, share, pos, ok, factor, metric, grid, turns, lift, units, head,
    FORM: tl.constexpr, TB: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``codec_position.encode_k``: y [TB, D] rotated keys, share [TB] of the mean they hold ->
    codes int32, step and share [TB] as they can be stored."""
    LEVELS: tl.constexpr = 3 if FORM // 8 % 2 == 0 else 15
    SPREAD: tl.constexpr = _SPREAD if FORM // 8 % 2 == 0 else _SPREAD_OF_4_BITS
    _, share = storable(share, share, grid, head, 0, FORM)
    y -= share[:, None] * mean_rows(turns, lift, units, pos // TURN, ok, head, TB, D)
    step = tl.sqrt_rn(tl.sum(y * y, 1) / D) * (2 * SPREAD / LEVELS)
    step, _ = storable(step, share, grid, head, 0, FORM)
    lo = -0.5 * LEVELS * step
    codes = _feedback_codes(y, step, lo, factor, TB, D, LEVELS)
    g = _times_metric(y, metric, TB, D)
    true = tl.sum(y * g, 1)
    found = tl.sum((codes.to(tl.float32) * step[:, None] + lo[:, None]) * g, 1)
    sound = (found > 0) & (tl.abs(true) < float("inf"))
    gain = tl.where(sound, tl.div_rn(true, tl.where(sound, found, 1.0)), 1.0)
    step, share = storable(
        step * tl.minimum(tl.maximum(gain, 1.0 / _MAX_GAIN), _MAX_GAIN), share, grid, head, 0, FORM
    )
    return codes, step, share


@triton.jit
def _encode(
    y, ratio, rank, factor, metric, grid, head, KV: tl.constexpr, SEARCH: tl.constexpr,
    RANK_RULE: tl.constexpr, FORM: tl.constexpr, TB: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """``CodecSpec.encode_k`` / ``encode_v``: y [TB, D] -> codes int32, storable step, lo [TB]."""
    if FORM == SCALE:
        step = row_scale(y, D)
        lo = tl.zeros_like(step)
        codes = nearest_level(y, step)
    elif SEARCH == _ACCURATE:
        codes, step, lo = _accurate(y, factor, metric, grid, head, FORM, TB, D)
    else:
        LEVELS: tl.constexpr = 3 if FORM // (8 << KV) % 2 == 0 else 15
        step, lo = row_range(y, ratio, rank, RANK_RULE, D, LEVELS)
        step, lo = storable(step, lo, grid, head, KV, FORM)
        if SEARCH == _FEEDBACK:
            codes = _feedback_codes(y, step, lo, factor, TB, D)
        else:
            codes = plain_codes(y, step, lo, LEVELS)
    return codes, step, lo


@triton.jit
def _store_kernel(
    q, k, v, q_rot, q_half, r_q, r_k, r_v, factor, metric, grids,
    turns, lift, mix, partner, units, rows, positions, ends, slots, cache_index,
    blocks, sink_k, sink_v, ring_k, ring_v, cache_k, cache_v,
    T, stride_q, stride_k, stride_v, n_sink, n_recent,
    k_ratio, v_ratio, k_rank, v_rank,
    K_RANK: tl.constexpr, V_RANK: tl.constexpr, SEARCH: tl.constexpr, FORM: tl.constexpr,
    TB: tl.constexpr, Hk: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TB + tl.arange(0, TB)
    head = tl.program_id(1)
    part = tl.program_id(2)
    slot = tl.load(slots + t, t < T, -1).to(tl.int64)
    if part >= 2:
        q_head = head * G + part - 2
        y = rotate_rows(q + q_head * D, r_q, stride_q, t, t < T, head, TB, D)
        if FORM % 8 == POSITION:  # C(q) beside it, in halves of ``views.query_buffer``
            write_row(q_rot, t, t < T, q_head, y, Hk * G, D, 3 * D // 2)
            y = _mixed(q, stride_q, t, t < T, q_head * D, mix, partner, head, D)
            write_row(q_half + 2 * D, t, t < T, q_head, to_fp16(y), Hk * G, D, 3 * D)
        else:
            write_row(q_rot, t, t < T, q_head, y, Hk * G, D)
    else:
        ok = slot >= 0
        row = tl.load(rows + t, ok, 0).to(tl.int64)
        pos = tl.load(positions + t, ok, 0).to(tl.int64)
        end = tl.load(ends + t, ok, 0).to(tl.int64)
        cached = tl.load(cache_index + t, ok, -1).to(tl.int64)
        in_sink = ok & (pos < n_sink)
        in_ring = ok & (pos >= end - n_recent)
        sink_at = row * n_sink + pos
        ring_at = row * n_recent + pos % n_recent
        if part == 0:
            y = rotate_rows(k + head * D, r_k, stride_k, t, ok, head, TB, D)
            write_row(sink_k, sink_at, in_sink, head, y, Hk, D)
            write_row(ring_k, ring_at, in_ring, head, y, Hk, D)
            write_row(cache_k, cached, ok & (cached >= 0), head, y, Hk, D)
            if FORM % 8 == POSITION:
                mixed = _mixed(k, stride_k, t, ok, head * D, mix, partner, head, D)
                at = (pos // TURN)[:, None] * D + tl.arange(0, D)[None, :]
                turn = tl.load(turns + at, ok[:, None], 0.0).to(tl.float32)
                share = tl.sum(mixed * turn, 1)
                share *= tl.load(units + head * 2)
                codes, step, lo = _encode_key(
                    y, share, pos, ok, factor + head * D * D, metric + head * D * D, grids, turns,
                    lift, units, head, FORM, TB, D,
                )  # fmt: skip
                write_history(blocks, grids, FORM, slot, ok, head, codes, step, lo, 0, TB, Hk, D)
            elif FORM != CHANNEL:  # ``seal`` writes the history of a block codec
                codes, step, lo = _encode(
                    y, k_ratio, k_rank, factor + head * D * D, metric + head * D * D, grids, head,
                    0, SEARCH, K_RANK, FORM, TB, D,
                )  # fmt: skip
                write_history(blocks, grids, FORM, slot, ok, head, codes, step, lo, 0, TB, Hk, D)
        else:
            y = rotate_rows(v + head * D, r_v, stride_v, t, ok, head, TB, D)
            write_row(sink_v, sink_at, in_sink, head, y, Hk, D)
            write_row(ring_v, ring_at, in_ring, head, y, Hk, D)
            write_row(cache_v, cached, ok & (cached >= 0), head, y, Hk, D)
            if FORM != CHANNEL:
                codes, step, lo = _encode(
                    y, v_ratio, v_rank, factor, metric, grids, head, 1, _ROUND, V_RANK, FORM, TB, D
                )
                write_history(blocks, grids, FORM, slot, ok, head, codes, step, lo, 1, TB, Hk, D)


@functools.cache  # once each
def _say_portable(codec: str, dtype: torch.dtype, head_dim: int) -> None:
    logger.warning(
        "store of codec %s, %s, head_dim %d: not what the CUDA kernel takes (16-bit rows of 64 or "
        "128, 16-byte aligned, int64 metadata, NVRTC), so by the slower Triton one",
        codec,
        dtype,
        head_dim,
    )


def check_rows(name: str, x: torch.Tensor, head_dim: int) -> None:
    if x.dim() != 3 or x.shape[-1] != head_dim or x.stride(2) != 1 or x.stride(1) != head_dim:
        raise ValueError(f"{name}: heads must be packed rows of {head_dim}, got {x.shape}")


def store(
    view: LayerView,
    tokens: TokenBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_rot: torch.Tensor | None,
    triton_only: bool = False,
) -> torch.Tensor | None:
    """Write one layer's fresh rows everywhere they belong; returns q_rot.

    q        [T, H, D]   any float dtype, not rotated; only the token stride is free, so views
    k, v     [T, Hk, D]  into a fused qkv output are read in place
    q_rot    [T, H, D]   contiguous, receives q @ R_K: float32 for ``attend``, as in a
                         ``views.query_buffer``; None skips it
    """
    tokens_n, heads, dim = q.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x, dim)
    if tokens_n == 0:
        return q_rot
    if not triton_only and cuda_store.supported(view, tokens, q, k, v, q_rot):
        cuda_store.store(view, tokens, q, k, v, q_rot)
        return q_rot
    if not triton_only and q.is_cuda and cuda_store.has_codec(view.spec):
        _say_portable(view.spec.name, q.dtype, view.head_dim)
    if view.spec.block > 1:
        seal(view, tokens, k, v)  # before the chunk overwrites the ring
    params, kv_heads = view.params, view.kv_heads
    k_range, v_range = view.spec.k_range, view.spec.v_range
    factor, metric = (params.r_k if x is None else x for x in (params.factor, params.metric))
    group = heads // kv_heads
    means = view.means
    assert q_rot is None or q_rot.shape[2] == view.query_width
    names = ("turns", "lift", "mix", "partner", "units")
    tables = {name: params.r_k if means is None else getattr(means, name) for name in names}
    queries = q if q_rot is None else q_rot
    halves = queries.view(torch.float16) if means is not None and q_rot is not None else queries
    grid = (triton.cdiv(tokens_n, _TOKENS), kv_heads, 2 + (group if q_rot is not None else 0))
    _store_kernel[grid](
        q=q,
        k=k,
        v=v,
        q_rot=queries,
        q_half=halves,
        r_q=view.q_matrix,
        r_k=params.r_k,
        r_v=params.r_v,
        factor=factor,
        metric=metric,
        grids=view.grid,
        **tables,
        **tokens._asdict(),
        blocks=view.blocks.view(torch.uint16),
        sink_k=view.sink_k,
        sink_v=view.sink_v,
        ring_k=view.ring_k,
        ring_v=view.ring_v,
        cache_k=view.cache_k,
        cache_v=view.cache_v,
        T=tokens_n,
        stride_q=q.stride(0),
        stride_k=k.stride(0),
        stride_v=v.stride(0),
        n_sink=view.windows.n_sink,
        n_recent=view.windows.n_recent,
        k_ratio=k_range.half_ratio,
        v_ratio=v_range.half_ratio,
        k_rank=k_range.rank(dim),
        v_rank=v_range.rank(dim),
        K_RANK=k_range.kind == "rank",
        V_RANK=v_range.kind == "rank",
        SEARCH=view.spec.search.number,
        FORM=view.form,
        TB=_TOKENS,
        Hk=kv_heads,
        G=group,
        D=dim,
        num_warps=4,
        **({} if interpreted() else {"enable_fp_fusion": False}),
    )
    return q_rot
