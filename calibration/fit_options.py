"""Moments -> what error feedback needs, and the codecs ``accurate`` and ``compact`` beside it."""

from __future__ import annotations

import torch

from ..kernels.codec import CodecSpec, LayerParams, rotate, value_range
from ..kernels.codec_compact import PER_OCTAVE, STEPS
from .stats import Moments

K_SIGMAS, V_SIGMAS = 6.0, 8.0
_LEAST_RANGE = 2**-10  # of lo, relative to its mean: below that FP16 values do not differ


def feedback_metric(r_k: torch.Tensor, m: torch.Tensor, damping: float) -> torch.Tensor:
    """G [Hk, D, D] float64 = r_k^T m r_k + damping tr(.)/D I; I where m is zero."""
    r_k = r_k.double()
    g = r_k.mT @ m.double() @ r_k
    eye = torch.eye(g.shape[-1], dtype=g.dtype)
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    return torch.where(trace > 0, g + damping * trace / g.shape[-1] * eye, eye)


def feedback_factor(metric: torch.Tensor) -> torch.Tensor:
    """Strictly upper triangular F [Hk, D, D] float64 with row j = U[j, j+1:] / U[j, j], where
    ``U^T U = metric^-1``; metric [Hk, D, D] float64, positive definite."""
    inverse = torch.linalg.inv(metric)
    u = torch.linalg.cholesky((inverse + inverse.mT) / 2, upper=True)
    return (u / u.diagonal(dim1=-2, dim2=-1)[..., None]).triu(1)


def fit_grids(spec: CodecSpec, params: LayerParams, moments: Moments) -> torch.Tensor:
    """``LayerParams.grid`` [Hk, 2, 3] from held-back rows."""
    k_meta = value_range(rotate(moments.held_k, params.r_k), spec.k_range)
    v_meta = value_range(rotate(moments.held_v, params.r_v), spec.v_range)
    return torch.stack([fit_grid(k_meta, K_SIGMAS), fit_grid(v_meta, V_SIGMAS)], 1)


def fit_grid(meta: torch.Tensor, sigmas: float, per_octave: int = PER_OCTAVE) -> torch.Tensor:
    """``lo`` over mean +- sigmas * sigma, step's mean in the middle of its octaves.

    meta [n, Hk, 2] (step, lo) -> [Hk, 3] float32, as in ``codec_compact``
    """
    step, lo = meta.double().unbind(-1)
    log2 = step.clamp_min(torch.finfo(torch.float32).tiny).log2().mean(0)
    mean = lo.mean(0)
    half = torch.maximum(sigmas * lo.std(0), _LEAST_RANGE * mean.abs()).clamp_min(1e-6)
    first = log2 - STEPS / 2 / per_octave
    return torch.stack([first, mean - half, 2 * half / (STEPS - 1)], -1).float()
