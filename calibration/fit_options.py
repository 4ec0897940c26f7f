"""Moments -> what the options ``accurate`` and ``compact`` of codec ``feedback`` add to it."""

from __future__ import annotations

import torch

from ..kernels.codec import CodecSpec, LayerParams, rotate, value_range
from ..kernels.codec_compact import PER_OCTAVE, STEPS, MetaGrid
from .stats import Moments

K_SIGMAS, V_SIGMAS = 6.0, 8.0


def feedback_metric(r_k: torch.Tensor, m: torch.Tensor, damping: float) -> torch.Tensor:
    """G [Hk, D, D] float64 = r_k^T m r_k + damping tr(.)/D I."""
    r_k = r_k.double()
    g = r_k.mT @ m.double() @ r_k
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    return g + damping * trace / g.shape[-1] * torch.eye(g.shape[-1], dtype=g.dtype)


def fit_grids(spec: CodecSpec, params: LayerParams, moments: Moments) -> tuple[MetaGrid, MetaGrid]:
    """Metadata grids of K and V from held-back rows."""
    k_meta = value_range(rotate(moments.held_k, params.r_k), spec.k_range)
    v_meta = value_range(rotate(moments.held_v, params.r_v), spec.v_range)
    return fit_grid(k_meta, K_SIGMAS), fit_grid(v_meta, V_SIGMAS)


def fit_grid(meta: torch.Tensor, sigmas: float) -> MetaGrid:
    """``lo`` over mean +- sigmas * sigma, step's mean in the middle of its 16 octaves.

    meta [n, Hk, 2] (step, lo)
    """
    step, lo = meta.double().unbind(-1)
    log2 = step.clamp_min(torch.finfo(torch.float32).tiny).log2().mean(0)
    half = (sigmas * lo.std(0)).clamp_min(1e-6)
    return MetaGrid(
        (log2 - STEPS / 2 / PER_OCTAVE).float(),
        (lo.mean(0) - half).float(),
        (2 * half / (STEPS - 1)).float(),
    )
