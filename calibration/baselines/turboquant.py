"""TurboQuant (arXiv 2504.19874): random rotation, stored norm, Lloyd-Max codebook of a Gaussian."""

from __future__ import annotations

import torch

from ..method import Side
from .bits import pack_bits, unpack_bits

# Positive output levels for a unit Gaussian (Max, 1960, table I).
_LEVELS = {2: (0.4528, 1.5104), 3: (0.2451, 0.7560, 1.3439, 2.1520)}
_SEED = 0


class TurboQuant(Side):
    """``bits`` for every channel; 2.5 gives half of them 3 bits. One FP16 norm a row and head."""

    def __init__(self, bits: float) -> None:
        self.bits = bits

    def encode(self, params, x, first):
        d = x.shape[-1]
        scale = (x.norm(dim=-1, keepdim=True) / d**0.5).clamp_max(65504).half()
        y = torch.where(scale > 0, x @ _rotation(d, x.device) / scale.float(), 0.0)
        return scale, *(pack_bits(_nearest(y[..., s], bits), bits) for bits, s in self._parts(d))

    def decode(self, params, parts):
        scale, *packed = parts
        y = torch.cat([_levels(p.shape[-2], p.device)[unpack_bits(p)] for p in packed], -1)
        return (y * scale.float()) @ _rotation(y.shape[-1], y.device).T

    def _parts(self, d: int) -> list[tuple[int, slice]]:
        """(bits, channels), without empty parts."""
        wide = {2: 0, 2.5: d // 2, 3: d}[self.bits]
        return [(b, s) for b, s in ((3, slice(0, wide)), (2, slice(wide, d))) if s.start < s.stop]


def _rotation(d: int, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    gaussian = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(gaussian).Q.float().to(device)


def _levels(bits: int, device) -> torch.Tensor:
    positive = torch.tensor(_LEVELS[bits], device=device)
    return torch.cat([-positive.flip(0), positive])


def _nearest(y: torch.Tensor, bits: int) -> torch.Tensor:
    levels = _levels(bits, y.device)
    return torch.bucketize(y.contiguous(), (levels[1:] + levels[:-1]) / 2)
