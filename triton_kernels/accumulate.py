"""accumulate: online-softmax union of partial attention results, kept in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _accumulate_kernel(
    acc, acc_lse, out, lse, stride_lse_t, stride_lse_h,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    ok = h < H
    at = (t * H + h)[:, None] * D + tl.arange(0, D)[None, :]
    old = tl.load(acc_lse + t * H + h, ok, -float("inf"))
    new = tl.load(lse + t * stride_lse_t + h * stride_lse_h, ok, -float("inf"))
    top = tl.maximum(old, new)
    safe = tl.where(top == -float("inf"), 0.0, top)
    keep, add = tl.exp(old - safe), tl.exp(new - safe)
    total = keep + add
    # An empty side may hold anything: weight 0 must not meet an infinity or NaN.
    x = tl.load(acc + at, ok[:, None], 0.0)
    y = tl.load(out + at, ok[:, None], 0.0).to(tl.float32)
    x = tl.where((keep > 0)[:, None], x * keep[:, None], 0.0)
    y = tl.where((add > 0)[:, None], y * add[:, None], 0.0)
    norm = tl.where(total > 0, total, 1.0)
    tl.store(acc + at, (x + y) / norm[:, None], ok[:, None])
    tl.store(acc_lse + t * H + h, tl.where(total > 0, safe + tl.log(norm), top), ok)


def accumulate(
    acc: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """``reference.merge`` of (out, lse) into (acc, acc_lse), in place.

    acc [T, H, D] and acc_lse [T, H] float32, contiguous; out [T, H, D] contiguous; lse [T, H], any
    strides. An empty side has lse -inf.
    """
    if len(acc):
        _accumulate_kernel[(len(acc),)](
            acc=acc,
            acc_lse=acc_lse,
            out=out,
            lse=lse,
            stride_lse_t=lse.stride(0),
            stride_lse_h=lse.stride(1),
            H=acc.shape[1],
            HP=triton.next_power_of_2(acc.shape[1]),
            D=acc.shape[2],
            num_warps=4,
        )
