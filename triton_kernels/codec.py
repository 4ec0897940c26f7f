"""The 2-bit codecs in plain PyTorch, any device: the specification of every kernel.

A codec turns a K or V row into codes in {0, 1, 2, 3} and two 16-bit numbers ``step`` and ``lo``,
so that ``row @ R ~= codes * step + lo``. Here:

    y = x @ R                                   (rotate; float64 inside, so that a row's codes do
                                                 not depend on which batch it came in)
    range of y -> step, lo                      (rounded to FP16 *before* codes are chosen)
    codes = clip(rint((y - lo) / step), 0, 3)   or, for K with error feedback (GPTQ, arXiv
                                                 2210.17323, with the factor of calibration.fit):
    for j in 0..D-1:  code_j as above from w_j;  w[j+1:] -= (w_j - decoded_j) * F[j, j+1:]

Range rules: ``shrink`` centres [min, max] and multiplies its half width by ``ratio``; ``rank``
clips |y| at its element of rank ``int(ratio * D)`` first (OSCAR, arXiv 2605.17757).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .layout import BITS

LEVELS = 2**BITS - 1
_FP16_MAX = 65504.0


@dataclass(frozen=True)
class RangeRule:
    """How a rotated row's representable interval is chosen; ``kind`` is shrink or rank."""

    kind: str
    ratio: float


@dataclass(frozen=True)
class CodecSpec:
    """A served codec: basis names are resolved by ``calibration.fit``."""

    name: str
    k_range: RangeRule
    v_range: RangeRule
    k_feedback: bool
    summary: str

    @property
    def params(self) -> int:
        """Matrices [Hk, D, D] a layer keeps: R_K, R_V and the feedback factor."""
        return 3 if self.k_feedback else 2


CODECS = {
    c.name: c
    for c in (
        CodecSpec(
            "feedback",
            RangeRule("shrink", 0.80),
            RangeRule("shrink", 0.75),
            True,
            "best of several bases per head, K codes chosen by error feedback in the query metric",
        ),
        CodecSpec(
            "aligned",
            RangeRule("shrink", 0.75),
            RangeRule("shrink", 0.75),
            False,
            "K mean aligned with the all-ones direction, plain rounding",
        ),
        CodecSpec(
            "oscar",
            RangeRule("rank", 0.96),
            RangeRule("rank", 0.92),
            False,
            "OSCAR as published: attention-aware rotations, quantile clipping",
        ),
    )
}


class LayerParams(NamedTuple):
    """Device tensors of one layer's codec.

    r_k, r_v  [Hk, D, D] float32  orthogonal, applied on the right of row vectors
    factor    [Hk, D, D] float32  strictly upper triangular, row j = U[j, j+1:] / U[j, j] for
                                  G^-1 = U^T U (None without feedback)
    """

    r_k: torch.Tensor
    r_v: torch.Tensor
    factor: torch.Tensor | None


class Rows(NamedTuple):
    """Encoded K or V rows: packed [..., D/4] uint8, meta [..., 2] float16 (step, lo)."""

    packed: torch.Tensor
    meta: torch.Tensor


def rotate(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """``x @ r`` per KV head: x [T, n, D] with n a multiple of Hk, r [Hk, D, D] -> [T, n, D] f32."""
    t, n, d = x.shape
    grouped = x.double().view(t, r.shape[0], -1, d)
    return torch.einsum("tkgd,kde->tkge", grouped, r.double()).reshape(t, n, d).float()


def rotate_fast(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """``rotate`` in float32, for rows that are not quantised afterwards."""
    t, n, d = x.shape
    grouped = x.float().reshape(t, r.shape[0], -1, d)
    return torch.einsum("tkgd,kde->tkge", grouped, r).reshape(t, n, d)


def value_range(y: torch.Tensor, rule: RangeRule) -> torch.Tensor:
    """Range of each row: y [..., D] float32 -> meta [..., 2] float16 (step, lo)."""
    if rule.kind == "shrink":
        low, high = y.aminmax(dim=-1)
        half = (high - low) * (0.5 * rule.ratio)
        mid = low + (high - low) * 0.5
        low, high = mid - half, mid + half
    elif rule.kind == "rank":
        tau = y.abs().kthvalue(int(rule.ratio * y.shape[-1]) + 1, dim=-1, keepdim=True).values
        low, high = y.clamp(-tau, tau).aminmax(dim=-1)
    else:
        raise ValueError(f"unknown range rule {rule.kind!r}")
    step_lo = torch.stack([(high - low) / LEVELS, low], dim=-1)
    return step_lo.clamp(-_FP16_MAX, _FP16_MAX).half()


def _round(w: torch.Tensor, inv_step: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    return ((w - lo) * inv_step).round().clamp(0, LEVELS)


def _affine(meta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step, lo = meta.float().unbind(-1)
    inv = torch.where(step > 0, 1 / step, torch.zeros_like(step))
    return step, lo, inv


def round_codes(y: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """Nearest codes: y [..., D] f32, meta [..., 2] f16 -> uint8 [..., D]."""
    _, lo, inv = _affine(meta)
    return _round(y, inv[..., None], lo[..., None]).to(torch.uint8)


def feedback_codes(y: torch.Tensor, meta: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Codes by error feedback along D: y [T, Hk, D] f32, factor [Hk, D, D] -> uint8 [T, Hk, D]."""
    step, lo, inv = _affine(meta)
    w = y.clone()
    codes = torch.empty_like(y, dtype=torch.uint8)
    for j in range(y.shape[-1]):
        code = _round(w[..., j], inv, lo)
        codes[..., j] = code.to(torch.uint8)
        error = w[..., j] - (code * step + lo)
        w[..., j + 1 :] -= error[..., None] * factor[:, j, j + 1 :]
    return codes


def decode(codes: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """codes [..., D], meta [..., 2] -> float32 [..., D], still rotated."""
    step, lo = meta.float().unbind(-1)
    return codes.float().mul_(step[..., None]).add_(lo[..., None])


def _plane_shifts(device) -> torch.Tensor:
    return torch.arange(0, 16, BITS, device=device, dtype=torch.int32).view(8, 1)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes [..., D] in 0..3 -> uint8 [..., D/4], order as in ``layout``."""
    planes = codes.unflatten(-1, (8, -1)).to(torch.int32)  # [..., 8, D/8]
    halves = (planes << _plane_shifts(codes.device)).sum(-2, dtype=torch.int32)
    return halves.to(torch.int16).view(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., D/4] -> codes int16 [..., D]."""
    halves = packed.view(torch.int16).unsqueeze(-2)  # [..., 1, D/8]
    return ((halves >> _plane_shifts(packed.device).to(torch.int16)) & LEVELS).flatten(-2)


def encode_k(spec: CodecSpec, params: LayerParams, k_rot: torch.Tensor) -> Rows:
    """Encode rotated keys [T, Hk, D] float32."""
    meta = value_range(k_rot, spec.k_range)
    if spec.k_feedback:
        return Rows(pack(feedback_codes(k_rot, meta, params.factor)), meta)
    return Rows(pack(round_codes(k_rot, meta)), meta)


def encode_v(spec: CodecSpec, v_rot: torch.Tensor) -> Rows:
    """Encode rotated values [T, Hk, D] float32."""
    meta = value_range(v_rot, spec.v_range)
    return Rows(pack(round_codes(v_rot, meta)), meta)


def decode_rows(rows: Rows) -> torch.Tensor:
    return decode(unpack(rows.packed), rows.meta)
