"""Metadata ``compact``: step and lo of a row in one byte each.

    step = 2 ** (step_log2 + byte / 16)              1/16 octave: 4.4% apart, 16 octaves in all
    lo   = lo_first + byte * lo_step                 a calibrated range, saturating

``grid`` [Hk, 3] float32 holds (step_log2, lo_first, lo_step) of each KV head, fitted by
``calibration.fit_options``. Codes are chosen after the metadata is rounded, so its error is
absorbed by the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .codec_parts import Affine

PER_OCTAVE = 16
STEPS = 256
GRID_SHAPE = (2, 3)  # of a KV head: K and V


def encode_meta(
    meta: torch.Tensor, grid: torch.Tensor, per_octave: int = PER_OCTAVE
) -> torch.Tensor:
    """meta [T, Hk, 2] (step, lo) -> bytes [T, Hk, 2] uint8."""
    step, lo = meta.float().unbind(-1)
    step_log2, lo_first, lo_step = grid.unbind(-1)
    tiny = torch.finfo(torch.float32).tiny
    octaves = (step.clamp_min(tiny).log2() - step_log2) * per_octave
    offset = (lo - lo_first) / lo_step
    return torch.stack([octaves, offset], -1).round().clamp(0, STEPS - 1).to(torch.uint8)


def decode_meta(
    packed: torch.Tensor, grid: torch.Tensor, per_octave: int = PER_OCTAVE
) -> torch.Tensor:
    """bytes [T, Hk, 2] uint8 -> (step, lo) [T, Hk, 2] float32."""
    octaves, offset = packed.float().unbind(-1)
    step_log2, lo_first, lo_step = grid.unbind(-1)
    step = torch.exp2(step_log2 + octaves / per_octave)
    return torch.stack([step, lo_first + offset * lo_step], -1)


@dataclass(frozen=True)
class Compact(Affine):
    """See the module docstring; ``per_octave``: bytes that an octave of step has."""

    name = "compact"
    form = 1
    number_bytes = 1
    per_octave: ClassVar[int] = PER_OCTAVE

    def tensors(self, head_dim):
        return {"grid": GRID_SHAPE}

    def storable(self, meta, grid):
        return self.read(self.written(meta, grid), grid)

    def written(self, meta, grid):
        return encode_meta(meta, grid, self.per_octave)

    def read(self, written, grid):
        return decode_meta(written, grid, self.per_octave)
