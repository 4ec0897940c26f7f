"""What a model's keys look like to a quantiser, from one document: input of the report."""

from __future__ import annotations

from typing import Any

import torch

from ..continuation import Document

N_SINK = 64
_SPECTRUM = 16


def profile(document: Document) -> dict[str, Any]:
    """JSON values per layer and KV head, over positions >= N_SINK:

    k_mean_energy  [L][Hk]      part of E|k|^2 that the mean holds
    k_spectrum     [L][Hk][16]  largest eigenvalues of E[k^T k] over their sum
    token_norm     [L][5]       quantiles 1, 25, 50, 75, 99% of |k| over its median: OScaR's token
                                norm imbalance (arXiv 2605.19660); sink tokens are left out
    sink_norm      [L]          largest |k| among the first N_SINK tokens over that median
    """
    found: dict[str, Any] = {n: [] for n in ("k_mean_energy", "k_spectrum", "token_norm")}
    found["sink_norm"] = []
    quantiles = torch.tensor([0.01, 0.25, 0.5, 0.75, 0.99], dtype=torch.float64)
    for k in document.k:
        k = k.double().cpu()
        rows = k[N_SINK:] if len(k) > 2 * N_SINK else k
        ktk = torch.einsum("thd,the->hde", rows, rows) / len(rows)
        energy = ktk.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-30)
        values = torch.linalg.eigvalsh(ktk).flip(-1)[:, :_SPECTRUM] / energy[:, None]
        norms = rows.norm(dim=-1)
        median = norms.median(0).values.clamp_min(1e-30)
        found["k_mean_energy"].append(_list(rows.mean(0).square().sum(-1) / energy))
        found["k_spectrum"].append([_list(v) for v in values])
        found["token_norm"].append(_list((norms / median).flatten().quantile(quantiles)))
        found["sink_norm"].append(float(f"{(k[:N_SINK].norm(dim=-1) / median).max():.4g}"))
    return found


def _list(x: torch.Tensor) -> list[float]:
    return [float(f"{v:.4g}") for v in x.tolist()]
