"""Search ``accurate``: more work per written key than ``feedback``, the same bytes.

For each ratio of ``RATIOS`` the key's codes are chosen by error feedback and improved by one sweep
of coordinate descent on ``e G e^T`` (G: the feedback metric in the rotated basis, e = y - decoded):

    for j in 0..D-1:  code_j <- clip(rint(code_j + (e G)_j / (G_jj step)), 0, 3)

The ratio with the smaller ``e G e^T`` is kept. Last, the row's decoded values are scaled about its
centre c by ``sqrt((y-c) G (y-c)^T / (d-c) G (d-c)^T)``, so that logits do not shrink; only the
metadata changes. Products with G run in float64, so that codes do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .codec_affine import LEVELS, RangeRule, decode, feedback_codes, value_range
from .codec_parts import Feedback, RoundMeta

RATIOS = (0.75, 0.85)
MAX_GAIN = 1.25


@dataclass(frozen=True)
class Accurate(Feedback):
    """See the module docstring."""

    number = 2
    tensors = ("factor", "metric")

    def encode(self, y, rule, params, storable):
        return encode(y, params.factor, params.metric, storable)


def encode(
    y: torch.Tensor, factor: torch.Tensor, metric: torch.Tensor, round_meta: RoundMeta
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [T, Hk, D] f32, factor and metric [Hk, D, D] -> codes [T, Hk, D] uint8, meta [T, Hk, 2]."""
    best = None
    for ratio in RATIOS:
        meta = round_meta(value_range(y, RangeRule("shrink", ratio)))
        codes = sweep(y, feedback_codes(y, meta, factor), meta, metric)
        error = metric_energy(y - decode(codes, meta), metric)
        if best is None:
            best = codes, meta, error
            continue
        better = error < best[2]
        best = (
            torch.where(better[..., None], codes, best[0]),
            torch.where(better[..., None], meta, best[1]),
            torch.minimum(error, best[2]),
        )
    codes, meta, _ = best
    return codes, round_meta(match_energy(y, codes, meta, metric))


def sweep(
    y: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, metric: torch.Tensor
) -> torch.Tensor:
    """One pass of coordinate descent over the channels; shapes as in ``encode``."""
    step = meta[..., 0].float()
    gradient = _times(y - decode(codes, meta), metric).float()
    codes = codes.float()
    for j in range(y.shape[-1]):
        curvature = metric[:, j, j] * step
        move = torch.where(curvature > 0, gradient[..., j] / curvature, 0.0)
        new = (codes[..., j] + move).round().clamp(0, LEVELS)
        change = (new - codes[..., j]) * step
        gradient -= change[..., None] * metric[:, j]
        codes[..., j] = new
    return codes.to(torch.uint8)


def match_energy(
    y: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, metric: torch.Tensor
) -> torch.Tensor:
    """Metadata scaled about the row's centre so that decoded and true energy agree."""
    low, high = y.aminmax(dim=-1, keepdim=True)
    centre = low + (high - low) * 0.5
    true = metric_energy(y - centre, metric)
    found = metric_energy(decode(codes, meta) - centre, metric)
    gain = torch.where(found > 0, (true / found).sqrt(), 1.0).nan_to_num(1.0)  # inf / inf
    gain = gain.clamp(1 / MAX_GAIN, MAX_GAIN)
    step, lo = meta.float().unbind(-1)
    centre = centre[..., 0]
    return torch.stack([step * gain, centre + (lo - centre) * gain], -1)


def metric_energy(x: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """x G x^T per row: x [T, Hk, D], metric [Hk, D, D] -> [T, Hk] float32."""
    return (_times(x, metric) * x).sum(-1).float()


def _times(x: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    return torch.einsum("thd,hde->the", x.double(), metric.double())
