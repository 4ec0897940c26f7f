"""Device helpers shared by the Triton kernels: code packing, block addresses, range rules.

Everything is row-major ``[rows, D]`` in natural channel order; a packed row is ``D/8`` 16-bit
halves (``layout``). Block addresses count 16-bit units.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND_MAGIC = tl.constexpr(12582912.0)  # adding 1.5 * 2^23 rounds |x| < 2^22 to even, as rint does
FP16_MAX = tl.constexpr(65504.0)


def interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter (chosen at import)."""
    return not isinstance(pack_codes, triton.runtime.jit.JITFunction)


@triton.jit
def pack_codes(codes, ROWS: tl.constexpr, D: tl.constexpr):
    """codes [ROWS, D] int32 in 0..3 -> halves [ROWS, D/8] uint16."""
    planes = tl.reshape(codes, [ROWS, 8, D // 8])
    shift = 2 * tl.arange(0, 8)
    return tl.sum(planes << shift[None, :, None], 1).to(tl.uint16)


@triton.jit
def unpack_codes(halves, ROWS: tl.constexpr, D: tl.constexpr):
    """halves [ROWS, D/8] uint16 -> codes [ROWS, D] int32."""
    shift = 2 * tl.arange(0, 8)
    planes = (halves.to(tl.int32)[:, None, :] >> shift[None, :, None]) & 3
    return tl.reshape(planes, [ROWS, D])


@triton.jit
def head_base(slot, head, Hk: tl.constexpr, D: tl.constexpr):
    """Offset of one head's block of ``slot`` [n] int64, 16-bit units -> [n] int64."""
    return ((slot // 16) * Hk + head) * (4 * D + 64)


@triton.jit
def half_offsets(slot, head, KV: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr):
    """Offsets of the D/8 halves of K (KV=0) or V (KV=1) rows of ``slot`` [n] -> [n, D/8] int64."""
    CH: tl.constexpr = 8 if D >= 64 else D // 8  # halves of a chunk
    i = tl.arange(0, D // 8)
    chunk = KV * (D // 8 // CH) + i // CH
    token = (slot % 16).to(tl.int32)
    inner = (chunk[None, :] * 16 + token[:, None]) * CH + (i % CH)[None, :]
    return head_base(slot, head, Hk, D)[:, None] + inner


@triton.jit
def meta_offset(slot, head, KV: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr):
    """Offset of a K or V row's ``step``; ``lo`` follows it -> [n] int64."""
    return head_base(slot, head, Hk, D) + 4 * D + (slot % 16) * 4 + 2 * KV


@triton.jit
def load_meta(blocks, offset, mask):
    """(step, lo) of rows as float32 [n]; masked rows read as 0, so stale bytes never matter."""
    step = tl.load(blocks + offset, mask=mask, other=0).to(tl.float16, bitcast=True)
    lo = tl.load(blocks + offset + 1, mask=mask, other=0).to(tl.float16, bitcast=True)
    return step.to(tl.float32), lo.to(tl.float32)


@triton.jit
def nearest_code(w, inv, lo):
    """clip(rint((w - lo) * inv), 0, 3) as float32."""
    x = tl.minimum(tl.maximum((w - lo) * inv, 0.0), 3.0)
    return (x + ROUND_MAGIC) - ROUND_MAGIC


@triton.jit
def _rank_limit(y, rank, D: tl.constexpr):
    """|y| of ascending rank ``rank`` in each row: y [n, D] -> [n, 1]."""
    left = tl.abs(y)
    cols = tl.arange(0, D)[None, :]
    for _ in range(D - 1 - rank):
        left = tl.where(cols == tl.argmax(left, 1)[:, None], -1.0, left)
    return tl.max(left, 1)[:, None]


@triton.jit
def row_range(y, ratio, rank, RANK_RULE: tl.constexpr, D: tl.constexpr):
    """``codec.value_range``: y [n, D] float32 -> step, lo [n] float32, already FP16 values.

    ratio: half the shrink ratio (shrink rule); rank: int(ratio * D) (rank rule).
    """
    if RANK_RULE:
        tau = _rank_limit(y, rank, D)
        clipped = tl.minimum(tl.maximum(y, -tau), tau)
        low = tl.min(clipped, 1)
        high = tl.max(clipped, 1)
    else:
        bottom = tl.min(y, 1)
        span = tl.max(y, 1) - bottom
        half = span * ratio
        mid = bottom + span * 0.5
        low = mid - half
        high = mid + half
    step = tl.div_rn(high - low, 3.0)
    step = tl.minimum(tl.maximum(step, -FP16_MAX), FP16_MAX).to(tl.float16).to(tl.float32)
    lo = tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX).to(tl.float16).to(tl.float32)
    return step, lo


@triton.jit
def inverse_step(step):
    """1 / step, 0 for a constant row."""
    safe = tl.where(step > 0, step, 1.0)
    return tl.where(step > 0, tl.div_rn(safe * 0.0 + 1.0, safe), 0.0)
