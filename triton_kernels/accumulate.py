"""accumulate: online-softmax union of partial attention results, kept in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _accumulate_kernel(
    acc, acc_lse, out, lse, first, step, parts, stride_lse_t, stride_lse_h,
    INDEXED: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    ok = h < H
    d = tl.arange(0, D)[None, :]
    row, jump = t, 0
    if INDEXED:
        row = tl.load(first + t).to(tl.int64)
        jump = tl.load(step + t).to(tl.int64)
    at = (t * H + h)[:, None] * D + d
    top = tl.load(acc_lse + t * H + h, ok, -float("inf"))
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    # An empty side may hold anything: weight 0 must not meet an infinity or NaN.
    result = tl.where((total > 0)[:, None], tl.load(acc + at, ok[:, None], 0.0), 0.0)
    for part in range(0, parts):
        source = row + part * jump
        new = tl.load(lse + source * stride_lse_t + h * stride_lse_h, ok, -float("inf"))
        higher = tl.maximum(top, new)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        keep, add = tl.exp(top - safe), tl.exp(new - safe)
        x = tl.load(out + (source * H + h)[:, None] * D + d, ok[:, None], 0.0).to(tl.float32)
        x = tl.where((add > 0)[:, None], x * add[:, None], 0.0)
        result = result * keep[:, None] + x
        total = total * keep + add
        top = higher
    safe = tl.where(total > 0, total, 1.0)
    tl.store(acc + at, result / safe[:, None], ok[:, None])
    tl.store(acc_lse + t * H + h, tl.where(total > 0, top + tl.log(safe), top), ok)


def accumulate(
    acc: torch.Tensor,
    acc_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    first: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
    parts: int = 1,
) -> None:
    """``reference.merge`` of ``parts`` partial results into (acc, acc_lse), in place.

    acc [T, H, D] and acc_lse [T, H] float32, contiguous; out [n, H, D] contiguous; lse [n, H], any
    strides. Part ``i`` of token ``t`` is row ``first[t] + i * step[t]`` (both [T] int32; None: row
    ``t``, one part). An empty side has lse -inf.
    """
    if len(acc):
        dummy = acc_lse if first is None else first
        _accumulate_kernel[(len(acc),)](
            acc, acc_lse, out, lse, dummy, dummy if step is None else step, parts,
            lse.stride(0), lse.stride(1), first is not None,
            acc.shape[1], triton.next_power_of_2(acc.shape[1]), acc.shape[2], num_warps=4,
        )  # fmt: skip
