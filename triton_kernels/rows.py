"""Device helpers of the Triton kernels that write rows: rotate, choose codes, put them in place."""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import half_offsets, inverse_step, nearest_code, pack_codes, store_meta


@triton.jit
def rotate_rows(x, r, stride_x, t, ok, head, TB: tl.constexpr, D: tl.constexpr):
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
def plain_codes(y, step, lo, LEVELS: tl.constexpr = 3):
    inv = inverse_step(step)
    return nearest_code(y, inv[:, None], lo[:, None], LEVELS).to(tl.int32)


@triton.jit
def write_row(dst, index, ok, head, y, Hk: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr = 0):
    """dst[index, head] = y where ok; dst [., Hk, WIDTH or D]."""
    cols = tl.arange(0, D)
    at = (index.to(tl.int64) * Hk + head) * (WIDTH if WIDTH else D)
    tl.store(dst + at[:, None] + cols[None, :], y.to(dst.dtype.element_ty), ok[:, None])


@triton.jit
def write_history(
    blocks, grid, FORM: tl.constexpr, slot, ok, head, codes, step, lo,
    KV: tl.constexpr, TB: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    BITS: tl.constexpr = 2 + 2 * (FORM // (8 << KV) % 2)
    halves = pack_codes(codes, TB, BITS, D)
    tl.store(blocks + half_offsets(slot, head, KV, FORM, Hk, D), halves, ok[:, None])
    store_meta(blocks, grid, slot, ok, head, step, lo, KV, FORM, Hk, D)
