"""Codes of any width, packed plane by plane."""

from __future__ import annotations

import torch


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [..., n] in [0, 2**bits), n a multiple of 8 -> uint8 [..., bits, n/8]."""
    weight = 2 ** torch.arange(8, device=codes.device, dtype=torch.int32)
    codes = codes.to(torch.int32)
    planes = torch.stack([(codes >> b) & 1 for b in range(bits)], -2)
    return (planes.unflatten(-1, (-1, 8)) * weight).sum(-1).to(torch.uint8)


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., bits, n/8] -> codes int32 [..., n]."""
    shift = torch.arange(8, device=packed.device, dtype=torch.int32)
    planes = ((packed.to(torch.int32)[..., None] >> shift) & 1).flatten(-2)  # [..., bits, n]
    weight = 2 ** torch.arange(packed.shape[-2], device=packed.device, dtype=torch.int32)
    return (planes * weight[:, None]).sum(-2, dtype=torch.int32)


def affine(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Step and lo of a min-max quantiser, float16 [..., 2]."""
    limit = torch.finfo(torch.float16).max
    step_lo = torch.stack([(high - low) / (2**bits - 1), low], -1)
    return step_lo.clamp(-limit, limit).half()


def affine_codes(x: torch.Tensor, meta: torch.Tensor, bits: int) -> torch.Tensor:
    """Nearest codes; ``meta`` [..., 2] broadcasts against x [...]."""
    step, lo = meta.float().unbind(-1)
    inverse = torch.where(step > 0, 1 / step, 0.0)
    return ((x - lo) * inverse).round().clamp(0, 2**bits - 1)


def affine_values(codes: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    step, lo = meta.float().unbind(-1)
    return codes.float() * step + lo
