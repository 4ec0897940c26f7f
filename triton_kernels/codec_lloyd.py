"""Codec ``lloyd``: OSCAR's rotations, the Lloyd-Max codebook of a unit Gaussian, one scale a row.

    y = x @ R      scale = |y| / sqrt(D), FP16      codes = nearest level of y / scale
    decoded = LEVELS[codes] * scale

A row costs 2 D bits and one 16-bit number; there is no zero-point. The levels are those of
Max (1960), table I, four output levels; thresholds are the midpoints.
"""

from __future__ import annotations

import torch

from .codec import Rows, pack, unpack

LEVEL_VALUES = (-1.5104, -0.4528, 0.4528, 1.5104)
_FP16_MAX = 65504.0


def encode(y: torch.Tensor) -> Rows:
    """Rotated rows [..., D] float32 -> packed codes and meta [..., 1] float16 (scale)."""
    scale = y.square().mean(-1, keepdim=True).sqrt().clamp_max(_FP16_MAX).half()
    unit = torch.where(scale > 0, y / scale.float(), 0.0)
    levels = torch.tensor(LEVEL_VALUES, device=y.device)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)
    return Rows(pack(codes.to(torch.uint8)), scale)


def decode(rows: Rows) -> torch.Tensor:
    """float32 [..., D], still rotated."""
    levels = torch.tensor(LEVEL_VALUES, device=rows.packed.device)
    return levels[unpack(rows.packed).long()] * rows.meta.float()
