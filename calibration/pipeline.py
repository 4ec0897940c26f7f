"""A model directory in, an ``Artifact`` out."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import __version__
from ..artifact.file import Artifact, Fingerprint, data_free
from ..artifact.fingerprint import read_config, text_config
from ..kernels.codec import CODECS
from ..kernels.layout import PADDED_HEAD_DIMS
from .collect import check_supported
from .engines import ENGINES
from .errors import CalibrationError
from .fit import CONTEXT, DAMPING, LayerFit
from .fit_options import K_SIGMAS, V_SIGMAS
from .model_fit import Fitter, wanted_bits, widen
from .pictures import hash_files
from .plan import Plan
from .warn import calibration_warnings

_MIN_ROWS = 256


def calibrate(plan: Plan, codec: str = "feedback") -> Artifact:
    """Run the model as planned and fit ``codec`` to what its attention saw.

    A codec that needs no data is made from the model's shape alone; the model does not run.
    Raises CalibrationError or FingerprintError, whose messages are for the operator.
    """
    return calibrate_codecs(plan, [codec])[codec]


def calibrate_codecs(plan: Plan, codecs: Sequence[str]) -> dict[str, Artifact]:
    """``calibrate`` for several codecs, from one pass over the tokens."""
    start = time.monotonic()
    n_sink, progress = plan.n_sink, plan.progress
    if unknown := [name for name in codecs if name not in CODECS]:
        raise CalibrationError(f"unknown codec {unknown[0]!r}; supported: {', '.join(CODECS)}")
    fingerprint = Fingerprint.of(plan.model_dir)
    made = _without_data(fingerprint, codecs, plan.codec_options, start)
    codecs = [name for name in codecs if name not in made]
    if not codecs:
        return made
    check_supported(plan.model_dir, fingerprint.head_dim)
    if "position" in codecs and fingerprint.head_dim in PADDED_HEAD_DIMS:
        raise CalibrationError(
            f"{plan.model_dir}: codec position is not made for heads of {fingerprint.head_dim} "
            "channels; take another"
        )
    context = max(plan.context or context_length(read_config(plan.model_dir)), 2 * n_sink)
    source = plan.source()
    rows = sum(max(0, len(ids) - n_sink) for ids in source.sequences)
    if rows < _MIN_ROWS:
        raise CalibrationError(
            f"{source.description}: {source.count} tokens leave {rows} beyond the first {n_sink} "
            f"of their sequence, expected at least {_MIN_ROWS}; give more tokens"
        )
    if plan.tp > 1 and plan.engine != "sglang":
        raise CalibrationError(f"{plan.tp} tensor-parallel ranks need --engine sglang")
    mixed = [codec for codec in codecs if CODECS[codec].meta.mixed]
    if plan.images and (plan.engine != "transformers" or mixed):
        raise CalibrationError(
            "images are read by the transformers engine only, and not for codec position, which "
            "counts positions by tokens; drop --engine, the codec, or --images"
        )
    fitter = Fitter(mixed[0], context, n_sink, progress) if mixed else None
    wanted = wanted_bits(plan.bits, fingerprint.head_dim)
    observed = ENGINES[plan.engine](plan, source, fitter)
    facts = {
        "tool": f"oscar_sglang {__version__}",
        "model": plan.model_dir.resolve().name,
        "data": observed.source.description,
        "data_hash": observed.source.hash,
        "tokens": observed.source.count,
        "device": plan.device,
        "engine": plan.engine,
    }
    if plan.images:
        facts |= {"images": len(plan.images), "images_hash": hash_files(plan.images)}
    for codec in codecs:
        fits, unscored = Fitter(codec, context, n_sink, progress).fit(observed.moments), []
        if codec in mixed:
            fits, unscored = widen(fits, observed.moments, observed.scores, wanted, context, n_sink)
        warnings = unscored + calibration_warnings(
            observed.source, plan.tokens, observed.moments, fits, observed.biased
        )
        seconds = round(time.monotonic() - start, 1)
        provenance = facts | {"date": _now(), "seconds": seconds, "warnings": warnings}
        made[codec] = Artifact(
            fingerprint=fingerprint,
            codec=codec,
            options={"damping": DAMPING, "n_sink": n_sink} | _options(codec, fits, context),
            layers=[fit.params for fit in fits],
            provenance=provenance | {"layers": [fit.report for fit in fits]},
        )
    return made


def _without_data(
    fingerprint: Fingerprint,
    codecs: Sequence[str],
    codec_options: Mapping[str, str] | None,
    start: float,
) -> dict[str, Artifact]:
    """Artifacts of those codecs that have nothing to measure; only they have options to choose."""
    made = {}
    for codec in codecs:
        if CODECS[codec].needs_data:
            if codec_options:
                raise CalibrationError(
                    f"codec {codec} has no options {', '.join(codec_options)}; they are omni's"
                )
            continue
        artifact = made[codec] = data_free(fingerprint, codec, dict(codec_options or {}))
        artifact.provenance |= {
            "tool": f"oscar_sglang {__version__}",
            "date": _now(),
            "seconds": round(time.monotonic() - start, 1),
        }
    return made


def _options(codec: str, fits: list[LayerFit], context: int) -> dict[str, Any]:
    """What else the codec was fitted with, and what ``codec.layer_specs`` reads."""
    has_grid = fits[0].params.grid is not None
    found = {"k_sigmas": K_SIGMAS, "v_sigmas": V_SIGMAS} if has_grid else {}
    spec = CODECS[codec]
    if spec.fit == "before_rope":
        found["context"] = context
    return found | spec.meta.layer_options([fit.spec for fit in fits])


def context_length(config: dict[str, Any]) -> int:
    """Positions that the model takes by its own account; ``CONTEXT`` if it does not say."""
    found = text_config(config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else CONTEXT


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
