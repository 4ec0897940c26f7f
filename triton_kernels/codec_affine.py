"""What the 2-bit codecs share: rotation, ranges of a row, codes by rounding or feedback, packing.

A row's codes in {0, 1, 2, 3} stand for ``codes * step + lo``:

    y = x @ R                                   (rotate; float64 inside, so that a row's codes do
                                                 not depend on which batch it came in)
    range of y -> step, lo                      (rounded to FP16 *before* codes are chosen)
    codes = clip(rint((y - lo) / step), 0, 3)   or, for K with error feedback (GPTQ, arXiv
                                                 2210.17323, with the factor of calibration.fit):
    for j in 0..D-1:  code_j as above from w_j;  w[j+1:] -= (w_j - decoded_j) * F[j, j+1:]

Range rules: ``shrink`` centres [min, max] and multiplies its half width by ``ratio``; ``rank``
clips |y| at its element of rank ``int(ratio * D)`` first (OSCAR, arXiv 2605.17757); ``rms`` gives
one number only, the row's root mean square times ``ratio``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .layout import BITS

LEVELS = 2**BITS - 1
FP16_MAX = 65504.0


@dataclass(frozen=True)
class RangeRule:
    """How a rotated row's representable interval is chosen; ``kind`` is shrink, rank or rms."""

    kind: str
    ratio: float

    @property
    def half_ratio(self) -> float:
        return 0.5 * self.ratio

    def rank(self, head_dim: int) -> int:
        """Ascending rank of the |y| that bounds a row of ``head_dim`` elements."""
        return min(int(self.ratio * head_dim), head_dim - 1)


class Rows(NamedTuple):
    """Encoded K or V rows: packed [..., D bits / 8] uint8 and the codec's metadata, [..., 2]
    float16 (step, lo), [..., 2] uint8 (bytes for these) or [..., 1] float16 (scale)."""

    packed: torch.Tensor
    meta: torch.Tensor


def rotate(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """``x @ r`` per KV head: x [T, n, D] with n a multiple of Hk, r [Hk, D, D] -> [T, n, D] f32."""
    t, n, d = x.shape
    grouped = x.double().view(t, r.shape[0], -1, d)
    return torch.einsum("tkgd,kde->tkge", grouped, r.double()).reshape(t, n, d).float()


def value_range(y: torch.Tensor, rule: RangeRule, levels: int = LEVELS) -> torch.Tensor:
    """Range of each row: y [..., D] float32 -> meta [..., 2] float16 (step, lo), or [..., 1].
    ``levels``: the largest code."""
    if rule.kind == "rms":
        return to_half(y.square().mean(-1, keepdim=True).sqrt() * rule.ratio)
    if rule.kind == "shrink":
        low, high = y.aminmax(dim=-1)
        half = (high - low) * (0.5 * rule.ratio)
        mid = low + (high - low) * 0.5
        low, high = mid - half, mid + half
    elif rule.kind == "rank":
        tau = y.abs().kthvalue(rule.rank(y.shape[-1]) + 1, dim=-1, keepdim=True).values
        low, high = y.clamp(-tau, tau).aminmax(dim=-1)
    else:
        raise ValueError(f"unknown range rule {rule.kind!r}")
    return to_half(torch.stack([(high - low) / levels, low], dim=-1))


def to_half(meta: torch.Tensor) -> torch.Tensor:
    """Nearest finite float16."""
    return meta.clamp(-FP16_MAX, FP16_MAX).half()


def _round(w: torch.Tensor, inv_step: torch.Tensor, lo: torch.Tensor, levels: int) -> torch.Tensor:
    return ((w - lo) * inv_step).round().clamp(0, levels)


def _affine(meta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step, lo = meta.float().unbind(-1)
    inv = torch.where(step > 0, 1 / step, torch.zeros_like(step))
    return step, lo, inv


def round_codes(y: torch.Tensor, meta: torch.Tensor, levels: int = LEVELS) -> torch.Tensor:
    """Nearest codes: y [..., D] f32, meta [..., 2] any float -> uint8 [..., D]."""
    _, lo, inv = _affine(meta)
    return _round(y, inv[..., None], lo[..., None], levels).to(torch.uint8)


def feedback_codes(
    y: torch.Tensor, meta: torch.Tensor, factor: torch.Tensor, levels: int = LEVELS
) -> torch.Tensor:
    """Codes by error feedback along D: y [T, Hk, D] f32, factor [Hk, D, D] -> uint8 [T, Hk, D]."""
    step, lo, inv = _affine(meta)
    w = y.clone()
    codes = torch.empty_like(y, dtype=torch.uint8)
    for j in range(y.shape[-1]):
        code = _round(w[..., j], inv, lo, levels)
        codes[..., j] = code.to(torch.uint8)
        error = w[..., j] - (code * step + lo)
        w[..., j + 1 :] -= error[..., None] * factor[:, j, j + 1 :]
    return codes


def decode(codes: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """codes [..., D], meta [..., 2] -> float32 [..., D], still rotated."""
    step, lo = meta.float().unbind(-1)
    return codes.float().mul_(step[..., None]).add_(lo[..., None])


def _plane_shifts(bits: int, device) -> torch.Tensor:
    return torch.arange(0, 16, bits, device=device, dtype=torch.int32).unsqueeze(-1)


def pack(codes: torch.Tensor, bits: int = BITS) -> torch.Tensor:
    """codes [..., D] below 2^bits -> uint8 [..., D bits / 8], order as in ``layout``."""
    planes = codes.unflatten(-1, (16 // bits, -1)).to(torch.int32)
    halves = (planes << _plane_shifts(bits, codes.device)).sum(-2, dtype=torch.int32)
    return halves.to(torch.int16).view(torch.uint8)


def unpack(packed: torch.Tensor, bits: int = BITS) -> torch.Tensor:
    """uint8 [..., D bits / 8] -> codes int16 [..., D]."""
    halves = packed.view(torch.int16).unsqueeze(-2)
    shifts = _plane_shifts(bits, packed.device).to(torch.int16)
    return ((halves >> shifts) & (2**bits - 1)).flatten(-2)
