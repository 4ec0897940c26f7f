"""Does an artifact fit a model, and is the error it records seen again on other tokens?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from ..artifact.file import Artifact, Fingerprint, check
from .collect import Progress
from .data import RANDOM
from .engines import by_transformers
from .fit import k_error, v_error
from .plan import Plan

TOLERANCE = 1.5  # fresh error over recorded error, mean over a model's layers
LAYER_TOLERANCE = 2.5  # the same for one layer; a few hundred rows decide each


@dataclass(frozen=True)
class Row:
    """Relative errors of a layer, mean over heads; None where the artifact records none."""

    layer: int
    k_recorded: float | None
    k_now: float
    v_recorded: float | None
    v_now: float

    @property
    def errors(self) -> tuple[float | None, ...]:
        return self.k_recorded, self.k_now, self.v_recorded, self.v_now

    @property
    def ok(self) -> bool:
        pairs = ((self.k_recorded, self.k_now), (self.v_recorded, self.v_now))
        return all(old is None or new <= LAYER_TOLERANCE * old for old, new in pairs)


@dataclass(frozen=True)
class Verification:
    rows: list[Row]
    sample: str
    ok: bool
    verdict: str


def verify(
    artifact: Artifact,
    model_dir: Path,
    data: str = RANDOM,
    tokens: int = 4096,
    *,
    device: str = "cpu",
    seed: int = 1,
    progress: Progress | None = None,
) -> Verification:
    """Raises ArtifactError if the artifact is another model's, before the model is loaded."""
    check(artifact, Fingerprint.of(model_dir))
    if not artifact.spec.needs_data:
        text = f"fits this model; codec {artifact.codec} has no statistics that could differ"
        return Verification([], "no tokens", True, text)
    n_sink = int(artifact.options.get("n_sink", 64))
    plan = Plan(model_dir, data, tokens, device, seed, n_sink, progress)
    source = plan.source()
    moments = by_transformers(plan, source).moments
    recorded = artifact.provenance.get("layers") or [None] * len(moments)
    rows = []
    for i, (m, params, old) in enumerate(zip(moments, artifact.layers, recorded, strict=True)):
        k_old, v_old = _recorded(old)
        k_now = k_error(artifact.spec, params, m).mean().item()
        rows.append(Row(i, k_old, k_now, v_old, v_error(artifact.spec, params, m).mean().item()))
    return _judge(rows, source.description)


def _recorded(layer: dict | None) -> tuple[float | None, float | None]:
    """Mean K and V error in a layer's report. Provenance is untrusted: anything else is None."""
    if layer is None:
        return None, None
    try:
        k = [layer["k_error"][basis][head] for head, basis in enumerate(layer["k_basis"])]
        return statistics.mean(map(float, k)), statistics.mean(map(float, layer["v_error"]))
    except (TypeError, KeyError, IndexError, ValueError):
        return None, None


def _judge(rows: list[Row], sample: str) -> Verification:
    if any(r.k_recorded is None or r.v_recorded is None for r in rows):
        text = "fits this model; it records no errors to compare with"
        return Verification(rows, sample, True, text)
    ratios = {}
    for name in ("k", "v"):
        old = statistics.mean(getattr(r, f"{name}_recorded") for r in rows)
        new = statistics.mean(getattr(r, f"{name}_now") for r in rows)
        ratios[name] = new / old if old > 0 else (1.0 if new == 0 else float("inf"))
    bad = [r.layer for r in rows if not r.ok]
    ok = max(ratios.values()) <= TOLERANCE and not bad
    text = f"fits this model; errors are {ratios['k']:.2f} x (K) and {ratios['v']:.2f} x (V) those "
    text += "recorded"
    if not ok:
        where = f", worst in layers {', '.join(map(str, bad))}" if bad else ""
        text += f"{where}: not reproduced; calibrate again"
    return Verification(rows, sample, ok, text)
