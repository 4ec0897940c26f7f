"""Moments -> codec parameters. Pure, deterministic, float64 inside.

Notation: ``M = E[q^T q]``, so that the expected squared error of a logit is ``e M e^T`` for an
error e of k. Errors reported are relative: ``E[e M e^T] / E[k M k^T]`` over held-back rows for K,
``E[|e|^2] / E[|v|^2]`` for V.

K bases tried (H: Hadamard; an asymmetric range codes the direction of H's column 0 for free):

    mean      Householder(k_mean -> e0) H        the mean costs nothing
    ktk       eigenvectors of E[k^T k], descending, H
    qtq       eigenvectors of M, ascending, H    (OSCAR, arXiv 2605.17757)
    hadamard  H

Feedback (GPTQ, arXiv 2210.17323) rounds in the metric ``G = R^T M R + damping tr(.)/D I``
(``fit_options.feedback_metric``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kernels.codec import (
    CODECS,
    CodecSpec,
    LayerCodec,
    LayerParams,
    Round,
    rotate,
    with_bits,
)
from ..kernels.hadamard import bit_reversal, eigenbasis, hadamard, householder_to_e0
from . import fit_position
from .fit_options import feedback_factor, feedback_metric, fit_grids
from .stats import BeforeRope, Moments

DAMPING = 0.05
N_SINK = 64  # first tokens that are kept exactly and are in no statistic
CONTEXT = 8192  # tokens that ``position`` is fitted for unless more is known
# ``CodecSpec.fit`` -> the K bases that each head is given the best of.
K_BASES = {"best": ("mean", "ktk", "qtq", "hadamard"), "mean": ("mean",), "oscar": ("qtq",)}


@dataclass(frozen=True)
class LayerFit:
    """One layer's codec and the report kept in the artifact (JSON values)."""

    spec: CodecSpec
    params: LayerParams
    report: dict[str, Any]

    @property
    def codec(self) -> LayerCodec:
        return LayerCodec(self.spec, self.params)


def fit_layer(
    moments: Moments,
    codec: str,
    damping: float = DAMPING,
    proxy: bool = False,
    context: int = CONTEXT,
    n_sink: int = N_SINK,
) -> LayerFit:
    """Fit one layer; with several K bases, each head keeps the one with the smallest error. Not for
    codecs that need no data.

    proxy            gives OSCAR the V statistic of its published code instead of its paper's
    context, n_sink  positions that ``position`` is fitted for
    """
    spec = CODECS[codec]
    published = spec.fit == "oscar"
    statistic = _published_v_statistic(moments) if proxy else moments.oto
    r_v = _v_basis(moments, statistic, published).float()
    if spec.fit == "before_rope":
        return _fit_position(spec, moments, r_v, damping, context, n_sink)
    candidates = {}
    errors = {}
    for name in K_BASES[spec.fit]:
        r_k = _k_basis(moments, name, published)
        candidates[name] = _parameters(spec, r_k, r_v, moments, damping)
        errors[name] = k_error(spec, candidates[name], moments)
    names = list(candidates)
    chosen = torch.stack([errors[n] for n in names]).argmin(0).tolist()
    params = _mix([candidates[n] for n in names], chosen)
    report = {
        "k_basis": [names[i] for i in chosen],
        "k_error": {n: _rounded(errors[n]) for n in names},
        "k_error_plain": _rounded(k_error(replace(spec, search=Round()), params, moments)),
        "logit_error": _rounded(logit_error(spec, params, moments)),
        "v_error": _rounded(v_error(spec, params, moments)),
        "k_mean_energy": _rounded(mean_energy(moments)),
    }
    return LayerFit(spec, params, report)


def _fit_position(
    spec: CodecSpec,
    moments: Moments,
    r_v: torch.Tensor,
    damping: float,
    context: int,
    n_sink: int,
) -> LayerFit:
    fitted = fit_position.fit(spec, moments, r_v, damping, context, n_sink)
    spec, candidates, errors, energy = fitted
    names, d = list(candidates), moments.k_mean.shape[-1]
    chosen = torch.stack([errors[n] for n in names]).argmin(0).tolist()
    params = _mix([candidates[n] for n in names], chosen)
    report = {
        "k_basis": [names[i] for i in chosen],
        "k_error": {n: _rounded(_ratio(e, energy)) for n, e in errors.items()},
        "logit_error": _rounded((torch.stack(list(errors.values())).amin(0) / d).sqrt()),
        "v_error": _rounded(v_error(spec, params, moments)),
        "k_mean_energy": _rounded(mean_energy(moments.before)),
    }
    return LayerFit(spec, params, report)


def widened(
    fitted: LayerFit, moments: Moments, bits: tuple[int, int], context: int, n_sink: int
) -> LayerFit:
    """A layer of ``position`` with K and V of other ``bits``: everything but the metadata's grid
    stays as it is. The report says what the errors were before."""
    spec = with_bits(fitted.spec, *bits)
    if spec == fitted.spec:
        return fitted
    keys, positions = fit_position.moved(moments.before, moments.held_k, n_sink, context)
    grid = fit_position.fit_grids(spec, fitted.params, keys, positions, moments.held_v)
    params, old = fitted.params._replace(grid=grid), fitted.report
    m = fit_position.turned_moment(moments.before.rope, moments.before.qtq, n_sink, context)
    error = fit_position.error(spec, params, keys, positions, m)
    k_error = _rounded(_ratio(error, fit_position.energy(keys, m)))
    chosen = {basis: list(errors) for basis, errors in old["k_error"].items()}
    for head, basis in enumerate(old["k_basis"]):
        chosen[basis][head] = k_error[head]
    report = old | {
        "k_error": chosen,
        "logit_error": _rounded((error / keys.shape[-1]).sqrt()),
        "v_error": _rounded(v_error(spec, params, moments)),
        "at_2_bits": {n: old[n] for n in ("logit_error", "v_error")},
    }
    return LayerFit(spec, params, report)


def _parameters(
    spec: CodecSpec, r_k: torch.Tensor, r_v: torch.Tensor, moments: Moments, damping: float
) -> LayerParams:
    """Everything ``spec.tensors`` names, for the bases r_k float64 and r_v float32."""
    params = LayerParams(r_k.float(), r_v)
    if spec.k_feedback:
        metric = feedback_metric(r_k, moments.qtq, damping)
        params = params._replace(factor=feedback_factor(metric).float())
        if "metric" in spec.search.tensors:
            params = params._replace(metric=((metric + metric.mT) / 2).float())
    if "grid" in spec.meta.tensors(len(r_k[0])):
        params = params._replace(grid=fit_grids(spec, params, moments))
    return params


def k_error(spec: CodecSpec, params: LayerParams, moments: Moments) -> torch.Tensor:
    """Relative metric error of held-back keys [Hk] float64."""
    error = _energy(_k_errors(spec, params, moments), moments.qtq)
    return _ratio(error, _energy(moments.held_k.double(), moments.qtq))


def logit_error(spec: CodecSpec, params: LayerParams, moments: Moments) -> torch.Tensor:
    """Root mean square error of a logit in nats [Hk] float64, over held-back keys and the queries
    that were seen: what a softmax weight is off by, whatever K's energy. Logits are taken to be
    scaled by 1 / sqrt(D)."""
    count, _, d = moments.held_k.shape
    return (_energy(_k_errors(spec, params, moments), moments.qtq) / count / d).sqrt()


def _k_errors(spec: CodecSpec, params: LayerParams, moments: Moments) -> torch.Tensor:
    """Of held-back keys [n, Hk, D] float64, in the model's basis."""
    before, keys = moments.before, moments.held_k
    positions = None if before is None else before.held_positions
    k_rot = rotate(keys, params.r_k)
    k_hat = spec.decode_k(params, spec.encode_k(params, k_rot, positions), positions)
    return rotate(k_hat - k_rot, params.k_back).double()


def v_error(spec: CodecSpec, params: LayerParams, moments: Moments) -> torch.Tensor:
    """Relative squared error of the held-back values [Hk] float64."""
    v_rot = rotate(moments.held_v, params.r_v)
    error = v_rot.double() - spec.decode_v(params, spec.encode_v(params, v_rot)).double()
    return _ratio(error.square().sum((0, 2)), v_rot.double().square().sum((0, 2)))


def mean_energy(moments: Moments | BeforeRope) -> torch.Tensor:
    """Part of K's energy held by its mean, [Hk] in [0, 1]."""
    total = moments.ktk.diagonal(dim1=-2, dim2=-1).sum(-1)
    return _ratio(moments.k_mean.square().sum(-1), total)


def _k_basis(moments: Moments, name: str, permute: bool) -> torch.Tensor:
    """[Hk, D, D] float64; ``permute`` applies OSCAR's bit reversal to the columns."""
    heads, d = moments.k_mean.shape
    h = hadamard(d)
    if name == "mean":
        r = householder_to_e0(moments.k_mean) @ h
    elif name == "ktk":
        r = eigenbasis(moments.ktk, descending=True) @ h
    elif name == "qtq":
        r = eigenbasis(moments.qtq, descending=False) @ h
    else:
        r = h.expand(heads, d, d)
    return r[..., d - 1 - bit_reversal(d)] if permute else r


def _v_basis(moments: Moments, statistic: torch.Tensor, oscar: bool) -> torch.Tensor:
    """Eigenvectors of ``statistic`` times H; OSCAR takes them ascending, and permuted."""
    d = moments.k_mean.shape[-1]
    r = eigenbasis(statistic, descending=not oscar) @ hadamard(d)
    return r[..., d - 1 - bit_reversal(d)] if oscar else r


def _published_v_statistic(moments: Moments) -> torch.Tensor:
    """E[w v^T v] with w = k M k^T, over held-back rows: what OSCAR's repository computes in place
    of its paper's (SV)^T (SV). No softmax, so a strongly rejected key weighs as much as a match."""
    k, v = moments.held_k.double(), moments.held_v.double()
    w = torch.einsum("nhd,hde,nhe->nh", k, moments.qtq, k)
    return torch.einsum("nh,nhd,nhe->hde", w / w.mean(0).clamp_min(1e-30), v, v) / len(k)


def _mix(candidates: list[LayerParams], chosen: list[int]) -> LayerParams:
    """Take head h from candidate ``chosen[h]``."""
    columns = zip(*candidates, strict=True)
    return LayerParams(
        *(
            None if c[0] is None else torch.stack([c[i][h] for h, i in enumerate(chosen)])
            for c in columns
        )
    )


def _energy(rows: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Sum over rows of x m x^T: rows [n, Hk, D], m [Hk, D, D] -> [Hk]."""
    return torch.einsum("nhd,hde,nhe->h", rows, m, rows)


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b > 0, a / b.clamp_min(torch.finfo(b.dtype).tiny), 0.0)


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{v:.4g}") for v in values.tolist()]
