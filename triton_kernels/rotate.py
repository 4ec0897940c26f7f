"""The two rotations of an extend step around attention over the materialised prefix.

Rows are 16-bit and enter exactly, the matrix as the sum of two 16-bit ones: the error, 2^-17 of an
element in BF16, is far below the rounding to 16 bits after. Float32 rows take three TF32 passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tile import interpreted

_ROWS = 64  # (token, head of the group) pairs of a program
_CHANNELS = 64  # multiplied at a time: a whole matrix does not fit in shared memory
_NO_BF16 = tl.constexpr(interpreted())  # the interpreter multiplies BF16 as integers


@triton.jit
def _rows(T, G: tl.constexpr, BT: tl.constexpr):
    """Token, query head and validity of this program's rows; program_id(1) is the KV head."""
    i = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    return i // G, tl.program_id(1) * G + i % G, i < T * G


@triton.jit
def _add_product(y, x, matrix):
    """y + x @ matrix: float32 [BT, D], any float dtype [BT, BC], float32 [BC, D]."""
    if x.dtype == tl.float32 or (x.dtype == tl.bfloat16 and _NO_BF16):
        return tl.dot(x.to(tl.float32), matrix, y, input_precision="tf32x3")
    high = matrix.to(x.dtype)
    low = (matrix - high.to(tl.float32)).to(x.dtype)
    return tl.dot(x, high, tl.dot(x, low, y))


@triton.jit
def _rotate_kernel(
    out, x, r, T, stride_t,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t, head, ok = _rows(T, G, BT)
    d = tl.arange(0, D)
    r += tl.program_id(1) * D * D
    y = tl.zeros([BT, D], tl.float32)
    for i in range(0, D, BC):
        c = i + tl.arange(0, BC)
        row = tl.load(x + (t * stride_t + head * D)[:, None] + c[None, :], ok[:, None], 0.0)
        matrix = tl.load(r + c[:, None] * D + d[None, :])
        y = _add_product(y, row, matrix)
    to = out + ((t * H + head) * D)[:, None] + d[None, :]
    tl.store(to, y.to(out.dtype.element_ty), ok[:, None])


@triton.jit
def _join_kernel(
    out, part, part_lse, fresh, fresh_lse, r, T,
    stride_part_t, stride_part_h, stride_fresh_t, stride_fresh_h,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t, head, ok = _rows(T, G, BT)
    d = tl.arange(0, D)
    none = -float("inf")
    lse = tl.load(part_lse + t * stride_part_t + head * stride_part_h, ok, none)
    other = tl.load(fresh_lse + t * stride_fresh_t + head * stride_fresh_h, ok, none)
    top = tl.maximum(lse, other)
    top = tl.where(top == none, 0.0, top)
    weight, other_weight = tl.exp(lse - top), tl.exp(other - top)
    total = weight + other_weight
    scale = 1 / tl.where(total > 0, total, 1.0)
    at = ((t * H + head) * D)[:, None] + d[None, :]
    # An empty side may hold anything: weight 0 must not meet an infinity or NaN.
    r += tl.program_id(1) * D * D
    x = tl.zeros([BT, D], tl.float32)
    for i in range(0, D, BC):
        c = i + tl.arange(0, BC)
        row = tl.load(part + ((t * H + head) * D)[:, None] + c[None, :], ok[:, None], 0.0)
        row = tl.where((weight > 0)[:, None], row, tl.zeros_like(row))
        inverse = tl.load(r + d[None, :] * D + c[:, None])
        x = _add_product(x, row, inverse)
    y = tl.load(fresh + at, ok[:, None], 0.0).to(tl.float32)
    y = tl.where((other_weight > 0)[:, None], y, 0.0)
    y = x * (weight * scale)[:, None] + y * (other_weight * scale)[:, None]
    tl.store(out + at, y.to(out.dtype.element_ty), ok[:, None])


def _grid(tokens: int, heads: int, kv_heads: int) -> tuple[int, int]:
    return triton.cdiv(tokens * (heads // kv_heads), _ROWS), kv_heads


def rotate_queries(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """``codec.rotate`` rounded to x's dtype: x [T, H, D], any token stride; r [Hk, D, D] f32."""
    tokens, heads, dim = x.shape
    assert x.stride()[1:] == (dim, 1)
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    _rotate_kernel[_grid(tokens, heads, len(r))](
        out=out,
        x=x,
        r=r,
        T=tokens,
        stride_t=x.stride(0),
        G=heads // len(r),
        H=heads,
        D=dim,
        BT=_ROWS,
        BC=min(dim, _CHANNELS),
        num_warps=8,
        num_stages=2,
    )
    return out


def join_prefix(
    part: torch.Tensor,
    part_lse: torch.Tensor,
    fresh: torch.Tensor,
    fresh_lse: torch.Tensor,
    r: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Rotate attention over the prefix back and merge that over the fresh tokens into ``out``.

    part            [T, H, D] any float dtype, rotated by r; contiguous, as fresh and out
    fresh, out      [T, H, D] model basis
    part_lse, fresh_lse  [T, H] float32, natural log, any strides; -inf: that side is empty
    r               [Hk, D, D] float32 orthogonal
    """
    tokens, heads, dim = part.shape
    assert part.is_contiguous() and fresh.is_contiguous() and out.is_contiguous()
    _join_kernel[_grid(tokens, heads, len(r))](
        out=out,
        part=part,
        part_lse=part_lse,
        fresh=fresh,
        fresh_lse=fresh_lse,
        r=r,
        T=tokens,
        stride_part_t=part_lse.stride(0),
        stride_part_h=part_lse.stride(1),
        stride_fresh_t=fresh_lse.stride(0),
        stride_fresh_h=fresh_lse.stride(1),
        G=heads // len(r),
        H=heads,
        D=dim,
        BT=_ROWS,
        BC=min(dim, _CHANNELS),
        num_warps=8,
        num_stages=2,
    )
