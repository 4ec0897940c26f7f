"""The two front ends that gather statistics: transformers, and SGLang's own model runner."""

from __future__ import annotations

import gc
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .collect import Progress, collect, load_model
from .data import Tokens
from .selfsample import plausible
from .state import Partial
from .stats import Moments

_BIAS = re.compile(r"(q_proj|k_proj|qkv|c_attn)[^.]*\.bias$")


@dataclass(frozen=True)
class Run:
    """What to run. ``partial``: file that keeps the sums of an interrupted run; ``tp``: ranks
    that share the model (sglang)."""

    model_dir: Path
    source: Tokens
    device: str
    n_sink: int
    progress: Progress | None = None
    partial: Path | None = None
    tp: int = 1


@dataclass(frozen=True)
class Observed:
    """What was seen, on which tokens, and whether Q or K projections have biases."""

    moments: list[Moments]
    source: Tokens
    biased: bool


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
    return Observed(moments, source, _biased(name for name, _ in model.named_parameters()))


def by_sglang(run: Run) -> Observed:
    """Inside SGLang; random ids are used as they are, and an interrupted run starts again."""
    from ..sglang_stats import collect_in_sglang  # imports sglang

    moments, names = collect_in_sglang(
        run.model_dir, run.source.sequences, run.n_sink, run.device, run.progress, run.tp
    )
    return Observed(moments, run.source, _biased(names))


ENGINES = {"transformers": by_transformers, "sglang": by_sglang}


def _biased(names) -> bool:
    return any(map(_BIAS.search, names))


def _key(run: Run, source: Tokens) -> str:
    """Identifies the sums: model, tokens, sink. Weights are hashed by the caller's fingerprint."""
    parts = (str(run.model_dir.resolve()), source.hash, run.device, str(run.n_sink))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
