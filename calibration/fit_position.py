"""Moments before RoPE -> parameters of codec ``position`` for any context length. float64 inside.

    m       tile mean of the un-rotated keys (``codec_position.tile_mean``)
    C       covariance of what is left of a key: with u_j = RoPE_-j(m) / |m| at the offset j of its
            tile, r = k (I - u_j^T u_j); averaged over j, and over the positions of the context
    M       E[q^T q], averaged over the positions of the context
    A       C^-1/2 U diag(lambda^BETA) H  with  C^1/2 M C^1/2 = U diag(lambda) U^T, lambda's mean 1:
            BETA 0 makes what is left white, 1/4 balances it with the queries. C and M are drawn a
            little to their mean eigenvalue. Scaled to |A|^2 = D, so that 16-bit rows of the
            windows neither overflow nor vanish. The alternative is A = H
    G       A^-1 M A^-T

Each head keeps the A whose held-back keys, moved to positions all over the context, have the
smaller error.
"""

from __future__ import annotations

import torch

from ..kernels.codec import CodecSpec, LayerParams, rotate, value_range
from ..kernels.codec_position import (
    PER_OCTAVE,
    SPREADS,
    TILE,
    Rope,
    mean_rot,
    mean_share,
    tile_mean,
    with_rope,
)
from ..kernels.hadamard import hadamard
from .fit_options import feedback_factor, feedback_metric, fit_grid
from .stats import BeforeRope, Moments

BETA = 0.1
SHRINK = 0.02  # of C and M towards their mean eigenvalue
K_SIGMAS, V_SIGMAS = 6.0, 8.0
_LEAST_EIGENVALUE = 1e-6  # of their mean


def turned_moment(rope: Rope, moment: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Mean of E[RoPE_t(x)^T RoPE_t(x)] over positions t in [first, last), from ``moment`` =
    E[x^T x] [Hk, D, D] float64.

    With pairs of channels as complex numbers z, E[z_i conj z_j] turns by theta_i - theta_j a
    position and E[z_i z_j] by theta_i + theta_j: both means are geometric sums.
    """
    index = torch.tensor(rope.pairs)
    theta = torch.tensor(rope.theta, dtype=torch.float64)
    canonical = moment[:, index][:, :, index]
    (a, b), (c, d) = (row.chunk(2, -1) for row in canonical.chunk(2, -2))
    hermitian = torch.complex(a + d, c - b) * _mean_phase(theta[:, None] - theta, first, last)
    symmetric = torch.complex(a - d, c + b) * _mean_phase(theta[:, None] + theta, first, last)
    plus, minus = hermitian + symmetric, hermitian - symmetric
    rows = (
        torch.cat([plus.real, -minus.imag], -1) / 2,
        torch.cat([plus.imag, minus.real], -1) / 2,
    )
    back = index.argsort()
    turned = torch.cat(rows, -2)[:, back][:, :, back]
    return (turned + turned.mT) / 2


def _mean_phase(angle: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Mean of exp(i angle t) over t in [first, last)."""
    n, half = last - first, angle / 2
    small = half.sin().abs() < 1e-12
    size = torch.where(small, 1.0, (n * half).sin() / (n * torch.where(small, 1.0, half.sin())))
    middle = (first + last - 1) / 2
    return torch.polar(torch.ones_like(angle), angle * middle) * size


def residual_moment(rope: Rope, ktk: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Second moment [Hk, D, D] before RoPE of what is left of keys without their share of ``mean``
    [Hk, D] (a tile's); ``ktk`` that of the keys."""
    offsets = torch.arange(TILE)
    u = rope.turn(mean[None].expand(TILE, *mean.shape), offsets, back=True)
    norm = mean.double().square().sum(-1)[:, None, None]
    eye = torch.eye(mean.shape[-1], dtype=torch.float64)
    total = torch.zeros_like(ktk)
    for row in u:
        outer = row[:, :, None] * row[:, None, :]
        p = eye - torch.where(norm > 0, outer / norm.clamp_min(1e-300), 0.0)
        total += p @ ktk @ p
    return total / TILE


def bases(c: torch.Tensor, m: torch.Tensor) -> dict[str, torch.Tensor]:
    """Candidates for A, [Hk, D, D] float64 each."""
    h = hadamard(c.shape[-1])
    c, m = _shrunk(c), _shrunk(m)
    lam, u = torch.linalg.eigh(_power(c, 0.5) @ m @ _power(c, 0.5))
    largest = u.gather(-2, u.abs().argmax(-2, keepdim=True))
    u = u * largest.sign()  # does not depend on the LAPACK at hand
    lam = (lam / lam.mean(-1, keepdim=True).clamp_min(1e-300)).clamp_min(_LEAST_EIGENVALUE)
    a = _power(c, -0.5) @ (u * lam[..., None, :] ** BETA) @ h
    size = a.square().sum((1, 2), keepdim=True)
    return {"balanced": a * (len(h) / size).sqrt(), "hadamard": h.expand_as(c)}


def parameters(
    moments: Moments, a: torch.Tensor, r_v: torch.Tensor, m: torch.Tensor, damping: float
) -> LayerParams:
    """Everything but the grid; a, m [Hk, D, D] float64."""
    before, inverse = moments.before, torch.linalg.inv(a)
    g = inverse @ m @ inverse.mT
    return LayerParams(
        r_k=a.float().contiguous(),
        r_v=r_v,
        factor=feedback_factor(feedback_metric(inverse.mT, m, damping)).float(),
        metric=((g + g.mT) / 2).float(),
        q_k=inverse.mT.float().contiguous(),
        mean=tile_mean(before.rope, before.k_mean).float(),
    )


def fit(
    spec: CodecSpec,
    moments: Moments,
    r_v: torch.Tensor,
    damping: float,
    context: int,
    n_sink: int,
) -> tuple[CodecSpec, dict[str, LayerParams], dict[str, torch.Tensor], torch.Tensor]:
    """The layer's spec; of each basis the parameters, and the errors of held-back keys and at last
    those keys' own energy, [Hk] both (``error``)."""
    before = moments.before
    if before is None:
        raise ValueError("codec position needs moments before RoPE")
    spec = with_rope(spec, before.rope)
    mean = tile_mean(before.rope, before.k_mean)
    c, m = (
        turned_moment(before.rope, x, n_sink, context)
        for x in (residual_moment(before.rope, before.ktk, mean), before.qtq)
    )
    keys, positions = moved(before, moments.held_k, n_sink, context)
    found, errors = {}, {}
    for name, a in bases(c, m).items():
        params = parameters(moments, a, r_v, m, damping)
        params = params._replace(grid=fit_grids(spec, params, keys, positions, moments.held_v))
        found[name] = params
        errors[name] = error(spec, params, keys, positions, m)
    return spec, found, errors, energy(keys, m)


def moved(
    before: BeforeRope, held_k: torch.Tensor, first: int, last: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Held-back keys [n, Hk, D] float32 as they would be at other positions, random in
    [first, last), and those positions [n]."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(first, last, (len(held_k),), generator=generator)
    keys = before.rope.turn(held_k, before.held_positions, back=True)
    return before.rope.turn(keys, positions).float(), positions


def error(
    spec: CodecSpec,
    params: LayerParams,
    keys: torch.Tensor,
    positions: torch.Tensor,
    m: torch.Tensor,
) -> torch.Tensor:
    """Mean of e m e^T over keys [n, Hk, D]: mean squared error of a logit before its scale,
    [Hk] float64."""
    k_rot = rotate(keys, params.r_k)
    k_hat = spec.decode_k(params, spec.encode_k(params, k_rot, positions), positions)
    return energy(rotate(k_hat - k_rot, params.k_back), m)


def fit_grids(
    spec: CodecSpec,
    params: LayerParams,
    keys: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """``LayerParams.grid`` [Hk, 2, 3] from held-back rows."""
    k_rot = rotate(keys, params.r_k)
    share = mean_share(k_rot, positions, spec.meta.rope, params)
    left = k_rot - share[..., None] * mean_rot(positions, spec.meta.rope, params)
    step = left.square().mean(-1).sqrt() * (2 * SPREADS[spec.k_bits] / (2**spec.k_bits - 1))
    k_meta = torch.stack([step, share], -1)
    v_meta = value_range(rotate(values, params.r_v), spec.v_range, 2**spec.v_bits - 1)
    pair = ((k_meta, K_SIGMAS), (v_meta, V_SIGMAS))
    return torch.stack([fit_grid(meta, sigmas, PER_OCTAVE) for meta, sigmas in pair], 1)


def energy(rows: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Mean of x m x^T over rows x [n, Hk, D] -> [Hk] float64."""
    rows = rows.double()
    return torch.einsum("nhd,hde,nhe->h", rows, m, rows) / len(rows)


def _shrunk(c: torch.Tensor) -> torch.Tensor:
    d = c.shape[-1]
    trace = c.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    trace = torch.where(trace > 0, trace, 1.0)  # a head that is all zero
    return (1 - SHRINK) * c + SHRINK * trace * torch.eye(d, dtype=c.dtype)


def _power(c: torch.Tensor, p: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(c)
    values = values.clamp_min(1e-300)
    return (vectors * values[..., None, :] ** p) @ vectors.mT
