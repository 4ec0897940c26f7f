"""A model directory in, an ``Artifact`` out."""

from __future__ import annotations

import datetime
import gc
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

DEFAULT_TOKENS = 8192
N_SINK = 64
ENOUGH_TOKENS = 2048
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
) -> Artifact:
    """Run the model on ``tokens`` ids from ``data`` and fit ``codec`` to what its attention saw.

    data      ``random``, a text file, or NPZ:KEY (see ``data.load_tokens``)
    n_sink    positions below it are left out: the cache keeps them exact
    progress  called with (stage, done, total)

    Raises CalibrationError or FingerprintError, whose messages are for the operator.
    """
    options = dict(device=device, seed=seed, n_sink=n_sink, progress=progress)
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
    moments = _moments(model_dir, device, source, n_sink, progress)
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
                "seconds": round(time.monotonic() - start, 1),
                "layers": [fit.report for fit in fits],
                "warnings": _warnings(source, tokens, fits),
            },
        )
    return made


def _moments(
    model_dir: Path, device: str, source: Tokens, n_sink: int, progress: Progress | None
) -> list[Moments]:
    """Collect, and give the model's memory back before anything else is allocated."""
    model = load_model(model_dir, device)
    try:
        return collect(model, source.sequences, n_sink, progress=progress)
    finally:
        del model
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def _fit(moments: list[Moments], codec: str, progress: Progress | None) -> list[LayerFit]:
    fits = []
    for m in moments:
        fits.append(fit_layer(m, codec))
        if progress:
            progress("fitting", len(fits), len(moments))
    return fits


def _warnings(source: Tokens, asked: int, fits: list[LayerFit]) -> list[str]:
    warnings = []
    if source.count < asked:
        warnings.append(f"{source.description} holds {source.count} tokens, asked for {asked}")
    if source.count < ENOUGH_TOKENS:
        warnings.append(f"only {source.count} tokens: at least {ENOUGH_TOKENS} are recommended")
    for i, fit in enumerate(fits):
        worst = max(fit.report["v_error"])
        if worst > 0.5:
            warnings.append(f"layer {i}: V keeps less than half of its energy (error {worst})")
    return warnings
