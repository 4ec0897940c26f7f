"""A model directory in, an ``Artifact`` out."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..artifact.file import Artifact, Fingerprint, data_free
from ..artifact.fingerprint import read_config, text_config
from ..kernels.codec import CODECS
from ..kernels.layout import PADDED_HEAD_DIMS
from .collect import Progress, check_supported
from .data import RANDOM, load_tokens
from .engines import ENGINES, Run
from .errors import CalibrationError
from .fit import CONTEXT, DAMPING, N_SINK, LayerFit
from .fit_options import K_SIGMAS, V_SIGMAS
from .model_fit import Fitter, wanted_bits, widen
from .pictures import hash_files
from .warn import calibration_warnings

DEFAULT_TOKENS = 8192
_MIN_ROWS = 256


def calibrate(
    model_dir: Path | str,
    codec: str = "feedback",
    data: str = RANDOM,
    tokens: int = DEFAULT_TOKENS,
    *,
    device: str = "cpu",
    seed: int = 0,
    n_sink: int = N_SINK,
    progress: Progress | None = None,
    engine: str = "transformers",
    partial: Path | None = None,
    tp: int = 1,
    codec_options: Mapping[str, str] | None = None,
    context: int | None = None,
    bits: float | None = None,
    images: Sequence[Path] = (),
) -> Artifact:
    """Run the model on ``tokens`` ids from ``data`` and fit ``codec`` to what its attention saw.

    data      ``random``, a text file, or NPZ:KEY (see ``data.load_tokens``)
    n_sink    positions below it are left out: the cache keeps them exact
    progress  called with (stage, done, total)
    engine    what runs the model: transformers, or sglang for any checkpoint SGLang can load
    partial   file that keeps the sums of an interrupted run (transformers engine); removed at the
              end
    tp        tensor-parallel ranks (sglang engine)
    codec_options  of ``omni`` (``codec_omni.OPTIONS``)
    context        positions that ``position`` is fitted for; None: the model's own context length
    bits           per element that ``position`` may spend on history; what is left over 2 bits and
                   metadata widens the K or V of some layers (``widths``). None: ``EXTRA_BITS``
    images         files that a vision-language model reads besides (transformers engine)

    A codec that needs no data is made from the model's shape alone; the model does not run.
    Raises CalibrationError or FingerprintError, whose messages are for the operator.
    """
    options = dict(
        device=device,
        seed=seed,
        n_sink=n_sink,
        progress=progress,
        engine=engine,
        partial=partial,
        tp=tp,
        codec_options=codec_options,
        context=context,
        bits=bits,
        images=images,
    )
    return calibrate_codecs(model_dir, [codec], data, tokens, **options)[codec]


def calibrate_codecs(
    model_dir: Path | str,
    codecs: Sequence[str],
    data: str = RANDOM,
    tokens: int = DEFAULT_TOKENS,
    *,
    device: str = "cpu",
    seed: int = 0,
    n_sink: int = N_SINK,
    progress: Progress | None = None,
    engine: str = "transformers",
    partial: Path | None = None,
    tp: int = 1,
    codec_options: Mapping[str, str] | None = None,
    context: int | None = None,
    bits: float | None = None,
    images: Sequence[Path] = (),
) -> dict[str, Artifact]:
    """``calibrate`` for several codecs, from one pass over the tokens."""
    start = time.monotonic()
    model_dir = Path(model_dir)
    if unknown := [name for name in codecs if name not in CODECS]:
        raise CalibrationError(f"unknown codec {unknown[0]!r}; supported: {', '.join(CODECS)}")
    fingerprint = Fingerprint.of(model_dir)
    made = _without_data(fingerprint, codecs, codec_options, start)
    codecs = [name for name in codecs if name not in made]
    if not codecs:
        return made
    check_supported(model_dir, fingerprint.head_dim)
    if "position" in codecs and fingerprint.head_dim in PADDED_HEAD_DIMS:
        raise CalibrationError(
            f"{model_dir}: codec position is not made for heads of {fingerprint.head_dim} "
            "channels; take another"
        )
    context = max(context or context_length(read_config(model_dir)), 2 * n_sink)
    source = load_tokens(data, model_dir, tokens, seed)
    rows = sum(max(0, len(ids) - n_sink) for ids in source.sequences)
    if rows < _MIN_ROWS:
        raise CalibrationError(
            f"{source.description}: {source.count} tokens leave {rows} beyond the first {n_sink} "
            f"of their sequence, expected at least {_MIN_ROWS}; give more tokens"
        )
    if tp > 1 and engine != "sglang":
        raise CalibrationError(f"{tp} tensor-parallel ranks need --engine sglang")
    if images and (engine != "transformers" or "position" in codecs):
        raise CalibrationError(
            "images are read by the transformers engine only, and not for codec position, which "
            "counts positions by tokens; drop --engine, the codec, or --images"
        )
    fitter = Fitter("position", context, n_sink, progress) if "position" in codecs else None
    wanted = wanted_bits(bits, fingerprint.head_dim)
    run = Run(model_dir, source, device, n_sink, progress, partial, tp, fitter, tuple(images))
    observed = ENGINES[engine](run)
    facts = {
        "tool": f"oscar_sglang {__version__}",
        "model": model_dir.resolve().name,
        "data": observed.source.description,
        "data_hash": observed.source.hash,
        "tokens": observed.source.count,
        "device": device,
        "engine": engine,
    }
    if images:
        facts |= {"images": len(images), "images_hash": hash_files(images)}
    for codec in codecs:
        fits, unscored = Fitter(codec, context, n_sink, progress).fit(observed.moments), []
        if codec == "position":
            fits, unscored = widen(fits, observed.moments, observed.scores, wanted, context, n_sink)
        warnings = unscored + calibration_warnings(
            observed.source, tokens, observed.moments, fits, observed.biased
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
    spec = CODECS[codec]
    found = {"k_sigmas": K_SIGMAS, "v_sigmas": V_SIGMAS} if spec.has_grid else {}
    if spec.meta == "position":
        ropes = [fit.spec.rope for fit in fits]
        rope = max(ropes, key=lambda r: sum(map(bool, r.theta)))
        found |= {
            "context": context,
            "rope": {n: list(v) for n, v in dataclasses.asdict(rope).items()},
            "rope_free": [i for i, r in enumerate(ropes) if r != rope],
            "bits": [[fit.spec.k_bits, fit.spec.v_bits] for fit in fits],
        }
    return found


def context_length(config: dict[str, Any]) -> int:
    """Positions that the model takes by its own account; ``CONTEXT`` if it does not say."""
    found = text_config(config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else CONTEXT


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
