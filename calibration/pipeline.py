"""A model directory in, an ``Artifact`` out."""

from __future__ import annotations

import datetime
import gc
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import __version__
from ..artifact import Artifact, Fingerprint
from ..kernels.codec import CODECS
from .collect import Progress, check_supported, collect, load_model
from .data import RANDOM, Tokens, load_tokens
from .errors import CalibrationError
from .fit import DAMPING, LayerFit, fit_layer
from .stats import Moments
from .warn import calibration_warnings

DEFAULT_TOKENS = 8192
N_SINK = 64
_MIN_ROWS = 256
_BIAS = re.compile(r"(q_proj|k_proj|qkv|c_attn)[^.]*\.bias$")


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
) -> Artifact:
    """Run the model on ``tokens`` ids from ``data`` and fit ``codec`` to what its attention saw.

    data      ``random``, a text file, or NPZ:KEY (see ``data.load_tokens``)
    n_sink    positions below it are left out: the cache keeps them exact
    progress  called with (stage, done, total)
    engine    what runs the model: transformers, or sglang for any checkpoint SGLang can load

    Raises CalibrationError or FingerprintError, whose messages are for the operator.
    """
    options = dict(device=device, seed=seed, n_sink=n_sink, progress=progress, engine=engine)
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
) -> dict[str, Artifact]:
    """``calibrate`` for several codecs, from one pass over the tokens."""
    start = time.monotonic()
    model_dir = Path(model_dir)
    if unknown := [name for name in codecs if name not in CODECS]:
        raise CalibrationError(f"unknown codec {unknown[0]!r}; supported: {', '.join(CODECS)}")
    fingerprint = Fingerprint.of(model_dir)
    check_supported(model_dir, fingerprint.head_dim)
    source = load_tokens(data, model_dir, tokens, seed)
    rows = sum(max(0, len(ids) - n_sink) for ids in source.sequences)
    if rows < _MIN_ROWS:
        raise CalibrationError(
            f"{source.description}: {source.count} tokens leave {rows} beyond the first {n_sink} "
            f"of their sequence, expected at least {_MIN_ROWS}; give more tokens"
        )
    moments, biased = _ENGINES[engine](model_dir, device, source, n_sink, progress)
    made = {}
    for codec in codecs:
        fits = _fit(moments, codec, progress)
        made[codec] = Artifact(
            fingerprint=fingerprint,
            codec=codec,
            options={"damping": DAMPING, "n_sink": n_sink},
            layers=[fit.params for fit in fits],
            provenance={
                "tool": f"oscar_sglang {__version__}",
                "model": model_dir.resolve().name,
                "data": source.description,
                "data_hash": source.hash,
                "tokens": source.count,
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "device": device,
                "engine": engine,
                "seconds": round(time.monotonic() - start, 1),
                "layers": [fit.report for fit in fits],
                "warnings": calibration_warnings(source, tokens, moments, fits, biased),
            },
        )
    return made


def _by_transformers(
    model_dir: Path, device: str, source: Tokens, n_sink: int, progress: Progress | None
) -> tuple[list[Moments], bool]:
    """Moments and whether Q or K projections have biases; gives the model's memory back before
    anything else is allocated."""
    model = load_model(model_dir, device)
    try:
        moments = collect(model, source.sequences, n_sink, progress=progress)
        return moments, any(_BIAS.search(name) for name, _ in model.named_parameters())
    finally:
        del model
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def _by_sglang(
    model_dir: Path, device: str, source: Tokens, n_sink: int, progress: Progress | None
) -> tuple[list[Moments], bool]:
    """The same, inside SGLang's model runner."""
    from ..sglang_stats import collect_in_sglang  # imports sglang

    moments, names = collect_in_sglang(model_dir, source.sequences, n_sink, device, progress)
    return moments, any(map(_BIAS.search, names))


_ENGINES = {"transformers": _by_transformers, "sglang": _by_sglang}


def _fit(moments: list[Moments], codec: str, progress: Progress | None) -> list[LayerFit]:
    fits = []
    for m in moments:
        fits.append(fit_layer(m, codec))
        if progress:
            progress("fitting", len(fits), len(moments))
    return fits
