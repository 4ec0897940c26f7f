"""store: rotate fresh q, k, v; write windows, sink cache and 2-bit history. One launch a layer.

The CUDA form (``cuda_store``) takes over where it can; this is the portable one.
Each program rotates TB tokens of one head with one [D, D] matrix. Program ``part`` 0 owns K, 1
owns V, 2.. the query heads of the KV head. The tile height is the same for a decode step of one
token and a prefill of thousands, so a row's codes do not depend on the batch it came in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import cuda_store
from .codec import RangeRule
from .tile import (
    half_offsets,
    interpreted,
    inverse_step,
    meta_offset,
    nearest_code,
    pack_codes,
    row_range,
)
from .views import LayerView, TokenBatch

_TOKENS = 16  # of a program: the least a tensor-core tile takes


@triton.jit
def _rotate(x, r, stride_x, t, ok, head, TB: tl.constexpr, D: tl.constexpr):
    """x[t] @ r[head], float32 [TB, D]; tf32x3 keeps float32 accuracy on tensor cores."""
    BK: tl.constexpr = 64 if D > 64 else D  # a whole [256, 256] does not fit in shared memory
    cols = tl.arange(0, D)
    y = tl.zeros([TB, D], tl.float32)
    for k in tl.static_range(0, D, BK):
        some = k + tl.arange(0, BK)
        at = t.to(tl.int64)[:, None] * stride_x + some[None, :]
        tile = tl.load(x + at, ok[:, None], 0.0).to(tl.float32)
        matrix = tl.load(r + head * D * D + some[:, None] * D + cols[None, :])
        y = tl.dot(tile, matrix, y, input_precision="tf32x3")
    return y


@triton.jit
def _plain(y, step, lo):
    inv = inverse_step(step)
    return nearest_code(y, inv[:, None], lo[:, None]).to(tl.int32)


@triton.jit
def _feedback(y, step, lo, factor, TB: tl.constexpr, D: tl.constexpr):
    """Codes [TB, D] int32 chosen one channel after the other; each error is spread over the
    channels still to come (``codec.feedback_codes``, in the same order of operations)."""
    inv = inverse_step(step)
    cols = tl.arange(0, D)
    codes = tl.zeros([TB, D], tl.int32)
    w = y
    for j in range(D):
        here = cols[None, :] == j
        w_j = tl.sum(tl.where(here, w, 0.0), 1)
        code = nearest_code(w_j, inv, lo)
        codes = tl.where(here, code.to(tl.int32)[:, None], codes)
        error = w_j - (code * step + lo)
        w = w - error[:, None] * tl.load(factor + j * D + cols)[None, :]
    return codes


@triton.jit
def _write_row(dst, index, ok, head, y, Hk: tl.constexpr, D: tl.constexpr):
    """dst[index, head] = y where ok; dst [., Hk, D]."""
    cols = tl.arange(0, D)
    at = (index.to(tl.int64) * Hk + head) * D
    tl.store(dst + at[:, None] + cols[None, :], y.to(dst.dtype.element_ty), ok[:, None])


@triton.jit
def _write_history(
    blocks, slot, ok, head, codes, step, lo,
    KV: tl.constexpr, TB: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    halves = pack_codes(codes, TB, D)
    tl.store(blocks + half_offsets(slot, head, KV, Hk, D), halves, ok[:, None])
    at = meta_offset(slot, head, KV, Hk, D)
    tl.store(blocks + at, step.to(tl.float16).to(tl.uint16, bitcast=True), ok)
    tl.store(blocks + at + 1, lo.to(tl.float16).to(tl.uint16, bitcast=True), ok)


@triton.jit
def _store_kernel(
    q, k, v, q_rot, r_k, r_v, factor,
    rows, positions, ends, slots, cache_index,
    blocks, sink_k, sink_v, ring_k, ring_v, cache_k, cache_v,
    T, stride_q, stride_k, stride_v, n_sink, n_recent,
    k_ratio, v_ratio, k_rank, v_rank,
    K_RANK: tl.constexpr, V_RANK: tl.constexpr, FEEDBACK: tl.constexpr,
    TB: tl.constexpr, Hk: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TB + tl.arange(0, TB)
    head = tl.program_id(1)
    part = tl.program_id(2)
    slot = tl.load(slots + t, t < T, -1).to(tl.int64)
    if part >= 2:
        q_head = head * G + part - 2
        y = _rotate(q + q_head * D, r_k, stride_q, t, t < T, head, TB, D)
        _write_row(q_rot, t, t < T, q_head, y, Hk * G, D)
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
            y = _rotate(k + head * D, r_k, stride_k, t, ok, head, TB, D)
            _write_row(sink_k, sink_at, in_sink, head, y, Hk, D)
            _write_row(ring_k, ring_at, in_ring, head, y, Hk, D)
            _write_row(cache_k, cached, ok & (cached >= 0), head, y, Hk, D)
            step, lo = row_range(y, k_ratio, k_rank, K_RANK, D)
            if FEEDBACK:
                codes = _feedback(y, step, lo, factor + head * D * D, TB, D)
            else:
                codes = _plain(y, step, lo)
            _write_history(blocks, slot, ok, head, codes, step, lo, 0, TB, Hk, D)
        else:
            y = _rotate(v + head * D, r_v, stride_v, t, ok, head, TB, D)
            _write_row(sink_v, sink_at, in_sink, head, y, Hk, D)
            _write_row(ring_v, ring_at, in_ring, head, y, Hk, D)
            _write_row(cache_v, cached, ok & (cached >= 0), head, y, Hk, D)
            step, lo = row_range(y, v_ratio, v_rank, V_RANK, D)
            codes = _plain(y, step, lo)
            _write_history(blocks, slot, ok, head, codes, step, lo, 1, TB, Hk, D)


def _rule_args(rule: RangeRule, head_dim: int) -> tuple[float, int, bool]:
    """(half ratio, rank, whether the rank rule applies)."""
    return 0.5 * rule.ratio, min(int(rule.ratio * head_dim), head_dim - 1), rule.kind == "rank"


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
    q_rot    [T, H, D]   contiguous, receives q @ R_K: float32 for ``attend``; None skips it
    """
    tokens_n, heads, dim = q.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x, dim)
    if tokens_n == 0:
        return q_rot
    k_rule, v_rule = _rule_args(view.spec.k_range, dim), _rule_args(view.spec.v_range, dim)
    if not triton_only and cuda_store.supported(view, tokens, q, k, v, q_rot):
        cuda_store.store(view, tokens, q, k, v, q_rot, k_rule, v_rule)
        return q_rot
    params, kv_heads = view.params, view.kv_heads
    (k_ratio, k_rank, k_is_rank), (v_ratio, v_rank, v_is_rank) = k_rule, v_rule
    feedback = view.spec.k_feedback
    group = heads // kv_heads
    grid = (triton.cdiv(tokens_n, _TOKENS), kv_heads, 2 + (group if q_rot is not None else 0))
    _store_kernel[grid](
        q, k, v, q if q_rot is None else q_rot,
        params.r_k, params.r_v, params.factor if feedback else params.r_k,
        *tokens, view.blocks.view(torch.uint16), *view[3:],
        tokens_n, q.stride(0), k.stride(0), v.stride(0),
        view.windows.n_sink, view.windows.n_recent,
        k_ratio, v_ratio, k_rank, v_rank, k_is_rank, v_is_rank, feedback,
        _TOKENS, kv_heads, group, dim,
        num_warps=4, **({} if interpreted() else {"enable_fp_fusion": False}),
    )  # fmt: skip
    return q_rot
