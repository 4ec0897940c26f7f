"""The two front ends that gather statistics: transformers, and SGLang's own model runner."""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..artifact.weights import weight_files
from ..kernels.codec import LayerCodec
from .collect import collect, load_model, score
from .data import Tokens
from .pictures import hash_files, load_pictures
from .plan import Plan
from .selfsample import plausible
from .state import Partial
from .stats import Moments
from .widths import Scores, probe_ids

_BIAS = re.compile(r"(q_proj|k_proj|qkv|c_attn)[^.]*\.bias$")


# The codec whose slots are to be scored (``widths``), from moments.
Fit = Callable[[list[Moments]], Sequence[LayerCodec]]


@dataclass(frozen=True)
class Observed:
    """What was seen, on which tokens, and whether Q or K projections have biases. ``scores``: of
    each layer's slots, if they were asked for and the model and the tokens allow it."""

    moments: list[Moments]
    source: Tokens
    biased: bool
    scores: Scores | None = None


def by_transformers(plan: Plan, source: Tokens, fit: Fit | None = None) -> Observed:
    """Gives the model's memory back before anything else is allocated."""
    model = load_model(plan.model_dir, plan.device)
    try:
        return observe(model, plan, source, fit)
    finally:
        del model
        gc.collect()
        if plan.device.startswith("cuda"):
            torch.cuda.empty_cache()


def observe(model: PreTrainedModel, plan: Plan, source: Tokens, fit: Fit | None = None) -> Observed:
    """The same with a model that is loaded already."""
    source = plausible(model, source, plan.progress)
    partial = Partial(plan.partial, _key(plan, source)) if plan.partial else None
    moments = collect(
        model,
        source.sequences,
        plan.n_sink,
        progress=plan.progress,
        partial=partial,
        pictures=load_pictures(plan.model_dir, plan.images) if plan.images else (),
    )
    if partial:
        partial.remove()
    biased = _biased(name for name, _ in model.named_parameters())
    ids = probe_ids(source.sequences, plan.n_sink)
    if fit is None or ids is None:
        return Observed(moments, source, biased)
    return Observed(moments, source, biased, score(model, ids, fit(moments), plan.n_sink))


def by_sglang(plan: Plan, source: Tokens, fit: Fit | None = None) -> Observed:
    """Inside SGLang; random ids are used as they are, and an interrupted run starts again."""
    from .sglang_engine import collect_in_sglang  # imports sglang

    moments, names, scores = collect_in_sglang(
        plan.model_dir,
        source.sequences,
        plan.n_sink,
        plan.device,
        plan.progress,
        plan.tp,
        fit=fit,
    )
    return Observed(moments, source, _biased(names), scores)


ENGINES = {"transformers": by_transformers, "sglang": by_sglang}


def _biased(names) -> bool:
    return any(map(_BIAS.search, names))


def _key(plan: Plan, source: Tokens) -> str:
    """Identifies the sums: model, tokens, sink. The folder may be a temporary one of links, so its
    files count where they really are; their contents are hashed by the caller's fingerprint."""
    files = [str(file.resolve()) for file in weight_files(plan.model_dir)]
    config = (plan.model_dir / "config.json").read_text()
    parts = (config, *files, source.hash, plan.device, str(plan.n_sink), hash_files(plan.images))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
