"""The two front ends that gather statistics: transformers, and SGLang's own model runner."""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..kernels.codec import LayerCodec
from .collect import Progress, collect, load_model, score
from .data import Tokens
from .selfsample import plausible
from .state import Partial
from .stats import Moments
from .widths import Scores, probe_ids

_BIAS = re.compile(r"(q_proj|k_proj|qkv|c_attn)[^.]*\.bias$")


@dataclass(frozen=True)
class Run:
    """What to run. ``partial``: file that keeps the sums of an interrupted run; ``tp``: ranks
    that share the model (sglang); ``fit``: the codec whose slots are to be scored, from moments
    (``widths``)."""

    model_dir: Path
    source: Tokens
    device: str
    n_sink: int
    progress: Progress | None = None
    partial: Path | None = None
    tp: int = 1
    fit: Callable[[list[Moments]], Sequence[LayerCodec]] | None = None


@dataclass(frozen=True)
class Observed:
    """What was seen, on which tokens, and whether Q or K projections have biases. ``scores``: of
    each layer's slots, if they were asked for and the model and the tokens allow it."""

    moments: list[Moments]
    source: Tokens
    biased: bool
    scores: Scores | None = None


def by_transformers(run: Run) -> Observed:
    """Gives the model's memory back before anything else is allocated."""
    model = load_model(run.model_dir, run.device)
    try:
        return observe(model, run)
    finally:
        del model
        gc.collect()
        if run.device.startswith("cuda"):
            torch.cuda.empty_cache()


def observe(model: PreTrainedModel, run: Run) -> Observed:
    """The same with a model that is loaded already."""
    source = plausible(model, run.source, run.progress)
    partial = Partial(run.partial, _key(run, source)) if run.partial else None
    moments = collect(model, source.sequences, run.n_sink, progress=run.progress, partial=partial)
    if partial:
        partial.remove()
    biased = _biased(name for name, _ in model.named_parameters())
    ids = probe_ids(source.sequences, run.n_sink)
    if run.fit is None or ids is None:
        return Observed(moments, source, biased)
    return Observed(moments, source, biased, score(model, ids, run.fit(moments), run.n_sink))


def by_sglang(run: Run) -> Observed:
    """Inside SGLang; random ids are used as they are, and an interrupted run starts again."""
    from .sglang_engine import collect_in_sglang  # imports sglang

    moments, names, scores = collect_in_sglang(
        run.model_dir,
        run.source.sequences,
        run.n_sink,
        run.device,
        run.progress,
        run.tp,
        fit=run.fit,
    )
    return Observed(moments, run.source, _biased(names), scores)


ENGINES = {"transformers": by_transformers, "sglang": by_sglang}


def _biased(names) -> bool:
    return any(map(_BIAS.search, names))


def _key(run: Run, source: Tokens) -> str:
    """Identifies the sums: model, tokens, sink. Weights are hashed by the caller's fingerprint."""
    parts = (str(run.model_dir.resolve()), source.hash, run.device, str(run.n_sink))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
