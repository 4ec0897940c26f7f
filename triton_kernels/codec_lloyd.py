"""Codec ``lloyd``: OSCAR's rotations, the Lloyd-Max codebook of a unit Gaussian, one scale a row.

    y = x @ R      scale = |y| / sqrt(D), FP16      codes = nearest level of y / scale
    decoded = LEVEL_VALUES[codes] * scale

A row costs 2 D bits and one 16-bit number; there is no zero-point. The levels are those of
Max (1960), table I, four output levels (0.4528, 1.510), as the nearest FP16 numbers, which tensor
cores take as they are; thresholds are the midpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .codec_affine import RangeRule, Rows, pack, unpack, value_range
from .codec_parts import Metadata

INNER, OUTER = 1855 / 4096, 1547 / 1024
LEVEL_VALUES = (-OUTER, -INNER, INNER, OUTER)
THRESHOLD = (INNER + OUTER) / 2


def encode(y: torch.Tensor) -> Rows:
    """Rotated rows [..., D] float32 -> packed codes and meta [..., 1] float16 (scale)."""
    scale = value_range(y, RangeRule("rms", 1.0))
    unit = torch.where(scale > 0, y / scale.float(), 0.0)
    codes = torch.bucketize(unit, torch.tensor([-THRESHOLD, 0, THRESHOLD], device=y.device))
    return Rows(pack(codes.to(torch.uint8)), scale)


def decode(rows: Rows) -> torch.Tensor:
    """float32 [..., D], still rotated."""
    levels = torch.tensor(LEVEL_VALUES, device=rows.packed.device)
    return levels[unpack(rows.packed).long()] * rows.meta.float()


@dataclass(frozen=True)
class Scale(Metadata):
    """See the module docstring."""

    name = "scale"
    form = 2
    numbers = (1, 1)
    proven = True

    def encode_k(self, codec, params, y, positions):
        return encode(y)

    def encode_v(self, codec, params, y):
        return encode(y)

    def decode_k(self, codec, params, rows, positions, channels):
        return decode(rows)

    def decode_v(self, codec, params, rows):
        return decode(rows)
