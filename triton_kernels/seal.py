"""seal: encode the blocks of a block codec whose last token is among the fresh ones, in Triton.

``reference.seal``: of a block that ends at fresh token t, the tokens of this step are rotated from
k and v, the earlier ones read from the ring, which ``store`` overwrites only afterwards; all are
rounded to the ring's dtype (``limit``: its largest number, in place of infinity). A program looks
at GROUP tokens of one head; nearly always none ends a block and it is done, so a captured decode
step can hold the launch.

Two passes over a block, 16 rows at a time as ``store`` takes them: the range of each channel, then
the codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .codec_omni import V_RANGE
from .rows import plain_codes, rotate_rows, write_history
from .tile import (
    CHANNEL,
    FP16_MAX,
    PAGE,
    channel_offset,
    interpreted,
    inverse_step,
    nearest_code,
    row_range,
    to_fp16,
)
from .views import LayerView, TokenBatch

_ROWS = tl.constexpr(16)
_HALF_RATIO = tl.constexpr(V_RANGE.half_ratio)
_FEW_TOKENS = 1024  # up to here blocks are sealed side by side, above fewer programs look for them


@triton.jit
def _block_rows(
    x, r, ring, rows, positions, t, row, back, stride, n_recent, limit, head,
    Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rotated rows of the tokens ``back`` [16] before token t, float32 [16, D], and their
    positions. They are fresh where the batch holds the request's token of that position."""
    pos = tl.load(positions + t).to(tl.int64) - back
    source = t - back
    fresh = source >= 0
    fresh = fresh & (tl.load(rows + source, fresh, 0) == row)
    fresh = fresh & (tl.load(positions + source, fresh, -1).to(tl.int64) == pos)
    cols = tl.arange(0, D)
    at = ((row * n_recent + pos % n_recent) * Hk + head) * D
    y = tl.load(ring + at[:, None] + cols[None, :], (fresh == 0)[:, None], 0.0).to(tl.float32)
    if tl.max(fresh.to(tl.int32), 0) > 0:
        new = rotate_rows(x, r, stride, source, fresh, head, 16, D)
        y = tl.where(fresh[:, None], new.to(ring.dtype.element_ty).to(tl.float32), y)
    return tl.minimum(tl.maximum(y, -limit), limit), pos


@triton.jit
def _unit(y, NORM: tl.constexpr, D: tl.constexpr):
    """(y / norm, norm) of rows y [16, D]; the norm is an FP16 value."""
    if NORM:
        norm = tl.minimum(tl.sqrt_rn(tl.sum(y * y, 1) / D), FP16_MAX)
        norm = norm.to(tl.float16).to(tl.float32)
    else:
        norm = tl.full([16], 1.0, tl.float32)
    safe = tl.where(norm > 0, norm, 1.0)[:, None] + tl.zeros_like(y)
    return tl.where((norm > 0)[:, None], tl.div_rn(y, safe), 0.0), norm


@triton.jit
def _seal_keys(
    k, r_k, ring, rows, positions, t, row, slot, stride, n_recent, limit, n_sink, blocks, channels,
    head,
    NORM: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    end = tl.load(positions + t)
    low = tl.full([D], float("inf"), tl.float32)
    high = tl.full([D], -float("inf"), tl.float32)
    for i in range(PAGE // _ROWS):
        back = PAGE - 1 - i * _ROWS - tl.arange(0, 16)
        y, pos = _block_rows(
            k, r_k, ring, rows, positions, t, row, back, stride, n_recent, limit, head, Hk, D
        )
        unit, _ = _unit(y, NORM, D)
        # Sink tokens do not widen the ranges, unless the block holds nothing else.
        counts = ((pos >= n_sink) | (end < n_sink))[:, None]
        low = tl.minimum(low, tl.min(tl.where(counts, unit, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(counts, unit, -float("inf")), 0))
    step, lo = to_fp16(tl.div_rn(high - low, 3.0)), to_fp16(low)
    at = channels + channel_offset(slot // PAGE, head, Hk, D) + 2 * tl.arange(0, D)
    tl.store(at, step.to(tl.float16))
    tl.store(at + 1, lo.to(tl.float16))
    inverse = inverse_step(step)
    for i in range(PAGE // _ROWS):
        back = PAGE - 1 - i * _ROWS - tl.arange(0, 16)
        y, _ = _block_rows(
            k, r_k, ring, rows, positions, t, row, back, stride, n_recent, limit, head, Hk, D
        )
        unit, norm = _unit(y, NORM, D)
        codes = nearest_code(unit, inverse[None, :], lo[None, :]).to(tl.int32)
        write_history(
            blocks, channels, CHANNEL, slot - back, back >= 0, head, codes, norm, norm, 0, 16, Hk, D
        )


@triton.jit
def _seal_values(
    v, r_v, ring, rows, positions, t, row, slot, stride, n_recent, limit, blocks, channels, head,
    Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    for i in range(PAGE // _ROWS):
        back = PAGE - 1 - i * _ROWS - tl.arange(0, 16)
        y, _ = _block_rows(
            v, r_v, ring, rows, positions, t, row, back, stride, n_recent, limit, head, Hk, D
        )
        step, lo = row_range(y, _HALF_RATIO, 0, False, D)
        codes = plain_codes(y, step, lo)
        write_history(
            blocks, channels, CHANNEL, slot - back, back >= 0, head, codes, step, lo, 1, 16, Hk, D
        )


@triton.jit
def _seal_kernel(
    k, v, r_k, r_v, rows, positions, slots, blocks, channels, ring_k, ring_v,
    T, stride_k, stride_v, n_sink, n_recent, limit,
    NORM: tl.constexpr, GROUP: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first = tl.program_id(0) * GROUP
    all_t = first + tl.arange(0, GROUP)
    last = tl.load(positions + all_t, all_t < T, 0) % PAGE == PAGE - 1
    if tl.max(last.to(tl.int32), 0) > 0:
        for t in range(first, tl.minimum(first + GROUP, T)):
            slot = tl.load(slots + t).to(tl.int64)
            row = tl.load(rows + t).to(tl.int64)
            # A skipped token ends nothing, and row 0 is padding.
            if (slot >= 0) & (row > 0) & (tl.load(positions + t) % PAGE == PAGE - 1):
                if tl.program_id(2) == 0:
                    _seal_keys(
                        k + head * D, r_k, ring_k, rows, positions, t, row, slot, stride_k,
                        n_recent, limit, n_sink, blocks, channels, head, NORM, Hk, D,
                    )  # fmt: skip
                else:
                    _seal_values(
                        v + head * D, r_v, ring_v, rows, positions, t, row, slot, stride_v,
                        n_recent, limit, blocks, channels, head, Hk, D,
                    )  # fmt: skip


def seal(view: LayerView, tokens: TokenBatch, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write the blocks that end among k, v [T, Hk, D] (not rotated) and their channels. A request's
    fresh tokens lie side by side in the batch, and before them in the ring."""
    assert view.spec.block == PAGE.value <= view.windows.n_recent
    group = 16 if len(k) > _FEW_TOKENS else 2
    grid = (triton.cdiv(len(k), group), view.kv_heads, 2)
    _seal_kernel[grid](
        k=k,
        v=v,
        r_k=view.params.r_k,
        r_v=view.params.r_v,
        rows=tokens.rows,
        positions=tokens.positions,
        slots=tokens.slots,
        blocks=view.blocks.view(torch.uint16),
        channels=view.channels,
        ring_k=view.ring_k,
        ring_v=view.ring_v,
        T=len(k),
        stride_k=k.stride(0),
        stride_v=v.stride(0),
        n_sink=view.windows.n_sink,
        n_recent=view.windows.n_recent,
        limit=torch.finfo(view.ring_k.dtype).max,
        NORM=view.spec.meta.token_norm,
        GROUP=group,
        Hk=view.kv_heads,
        D=view.head_dim,
        num_warps=4,
        **({} if interpreted() else {"enable_fp_fusion": False}),
    )
