"""Structured orthogonal matrices, float64. Row-vector convention: ``y = x @ R``."""

from __future__ import annotations

import torch


def hadamard(d: int) -> torch.Tensor:
    """Orthonormal Sylvester Hadamard matrix [d, d]; column 0 is constant. ``d`` a power of two."""
    if d < 1 or d & (d - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two, got {d}")
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / d**0.5


def householder_to_e0(x: torch.Tensor) -> torch.Tensor:
    """Orthogonal matrices [..., d, d] with ``x @ Q = |x| e0`` for x [..., d].

    Reflects x to the one of +-e0 that is farther away, where no digits cancel, and then corrects
    the sign. A zero row is treated as e0.
    """
    x = x.double()
    e0 = torch.zeros_like(x)
    e0[..., 0] = 1
    norm = x.norm(dim=-1, keepdim=True)
    x = torch.where(norm > 0, x / norm.clamp_min(torch.finfo(x.dtype).tiny), e0)
    sign = torch.where(x[..., :1] < 0, -1.0, 1.0)
    v = x + sign * e0
    outer = v[..., :, None] * v[..., None, :]
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return -sign[..., None] * (eye - 2 * outer / v.square().sum(-1)[..., None, None])


def bit_reversal(d: int) -> torch.Tensor:
    """Index [d] int64: i with its log2(d) bits reversed."""
    bits = d.bit_length() - 1
    return torch.tensor([int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(d)])


def eigenbasis(m: torch.Tensor, descending: bool) -> torch.Tensor:
    """Eigenvectors of symmetric m [..., d, d] as columns, by eigenvalue; the largest entry of each
    is positive, so that the result does not depend on the LAPACK at hand."""
    u = torch.linalg.eigh(m.double()).eigenvectors
    u = u.flip(-1) if descending else u
    largest = u.gather(-2, u.abs().argmax(-2, keepdim=True))
    return u * largest.sign()
