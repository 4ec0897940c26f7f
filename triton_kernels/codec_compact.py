"""Option ``compact`` of the affine codecs: step and lo of a row in one byte each.

    step = 2 ** (step_log2 + byte / 16)              1/16 octave: 4.4% apart, 16 octaves in all
    lo   = lo_first + byte * lo_step                 a calibrated range, saturating

The grid of a KV head is fitted by ``calibration.fit_options.fit_grid``. Codes are chosen after
the metadata is rounded, so its error is absorbed by the codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

PER_OCTAVE = 16
STEPS = 256


class MetaGrid(NamedTuple):
    """Grid of the metadata bytes per KV head, float32 [Hk] each."""

    step_log2: torch.Tensor
    lo_first: torch.Tensor
    lo_step: torch.Tensor


def encode_meta(meta: torch.Tensor, grid: MetaGrid) -> torch.Tensor:
    """meta [T, Hk, 2] (step, lo) -> bytes [T, Hk, 2] uint8."""
    step, lo = meta.float().unbind(-1)
    tiny = torch.finfo(torch.float32).tiny
    octaves = (step.clamp_min(tiny).log2() - grid.step_log2) * PER_OCTAVE
    offset = (lo - grid.lo_first) / grid.lo_step
    return torch.stack([octaves, offset], -1).round().clamp(0, STEPS - 1).to(torch.uint8)


def decode_meta(packed: torch.Tensor, grid: MetaGrid) -> torch.Tensor:
    """bytes [T, Hk, 2] uint8 -> (step, lo) [T, Hk, 2] float32."""
    octaves, offset = packed.float().unbind(-1)
    step = torch.exp2(grid.step_log2 + octaves / PER_OCTAVE)
    return torch.stack([step, grid.lo_first + offset * grid.lo_step], -1)
