"""Model + token sequences -> Moments per layer. The transformers front end of calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..artifact.fingerprint import model_head_dim, read_config, slides, text_config
from ..kernels.codec import LayerCodec
from ..kernels.layout import stored_head_dim
from .attention import attention_layers_of, causal_attention, replaced_attention
from .errors import CalibrationError
from .rope import PROBE_TOKENS, Turning, checked, turning
from .state import Partial
from .stats import Accumulator, Moments
from .widths import Prober, Scores, projection

Progress = Callable[[str, int, int], None]  # (stage, done, total)


def check_supported(model_dir: Path, head_dim: int) -> None:
    """Refuse, from config.json, models whose KV cache is not standard K/V heads everywhere."""
    text = text_config(read_config(model_dir))
    if text.get("kv_lora_rank"):
        raise CalibrationError(
            f"{model_dir}: latent attention (MLA, kv_lora_rank {text['kv_lora_rank']}) has no K/V "
            "heads to quantise; serve it without the 2-bit cache"
        )
    if slides(text):
        raise CalibrationError(
            f"{model_dir}: has sliding-window attention layers, which the 2-bit cache does not "
            "support; serve it without the 2-bit cache"
        )
    try:
        stored_head_dim(head_dim)
    except ValueError as error:
        raise CalibrationError(f"{model_dir}: {error}") from None


def load_model(model_dir: Path, device: str) -> PreTrainedModel:
    """The model in eval mode: float32 on a CPU, bfloat16 elsewhere."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        with _quiet():
            make, options = _loader(model_dir)
            model = make.from_pretrained(
                model_dir, dtype=dtype, attn_implementation="sdpa", local_files_only=True, **options
            )
        return model.to(device).eval()
    except Exception as error:  # transformers raises whatever it likes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CalibrationError(
            f"{model_dir}: transformers cannot load this model: {reason}"
        ) from error


def _loader(model_dir: Path) -> tuple[Any, dict[str, Any]]:
    """The transformers class that holds the language model of a folder, and its arguments."""
    raw = read_config(model_dir)
    if isinstance(text := raw.get("llm_config"), dict):  # InternVL's own format, unknown here
        config = AutoConfig.for_model(**text)
        return AutoModelForCausalLM, {"config": config, "key_mapping": {r"^language_model\.": ""}}
    config: PretrainedConfig = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    if hasattr(config, "thinker_config"):  # the talker would speak what the thinker has written
        return AutoModelForImageTextToText, {"config": config.thinker_config}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM, {}
    return AutoModelForImageTextToText, {}


def body(model: PreTrainedModel) -> PreTrainedModel:
    """What gives the last hidden states, without logits."""
    inner = model.base_model
    return inner if inner is not model else model.get_decoder()


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList | None:
    """The blocks of the language model, None if they are not found."""
    inner = body(model)
    return getattr(getattr(inner, "language_model", inner), "layers", None)


@contextmanager
def _quiet() -> Iterator[None]:
    """No loading bar and no warnings from transformers; leaves its settings as they were."""
    bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


@torch.no_grad()
def model_turning(model: PreTrainedModel, token: int) -> Turning:
    """How the model's keys turn: what its configuration says, checked where that is possible."""
    text = model.config.get_text_config().to_dict()
    layer_ids, keys = attention_layers_of(model), []

    def attend(layer, q, k, v, scale):
        if layer == 0:
            keys.append(k[0].transpose(0, 1).float())
        return causal_attention(q, k, v, scale)

    ids = torch.full((1, PROBE_TOKENS), token, device=model.device)
    with replaced_attention(model, attend):
        body(model)(input_ids=ids, use_cache=False)
    found = turning(text, model_head_dim(text), layer_ids)
    return checked(found, keys[0]) if layer_ids[0] == 0 else found


@torch.no_grad()
def score(
    model: PreTrainedModel, ids: torch.Tensor, codecs: Sequence[LayerCodec], n_sink: int
) -> Scores | None:
    """Of each layer's slots on the sequence ``ids`` [T]; None if the model's output projections
    are not found."""
    layer_ids = attention_layers_of(model)
    modules = {m.layer_idx: m for m in model.modules() if projection(m) and hasattr(m, "layer_idx")}
    blocks = decoder_layers(model)
    if blocks is None or not set(layer_ids) <= set(modules):
        return None
    project = [projection(modules[i]) for i in layer_ids]
    prober = Prober(codecs, project, [0.0] * len(layer_ids), n_sink)

    def attend(layer, q, k, v, scale):
        o = causal_attention(q.float(), k.float(), v.float(), scale)
        prober.scales[layer] = scale
        prober.add(layer, *(x[0].transpose(0, 1) for x in (q, k, v, o)))
        return o.to(q.dtype)

    def before(layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        prober.residual[layer] = hidden[0]

    hooks = [
        blocks[layer_id].register_forward_pre_hook(
            lambda _module, args, kwargs, i=i: before(i, args, kwargs), with_kwargs=True
        )
        for i, layer_id in enumerate(layer_ids)
    ]
    try:
        with replaced_attention(model, attend):
            body(model)(input_ids=ids[None].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return prober.scores()


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    sequences: Sequence[torch.Tensor],
    n_sink: int = 64,
    capacity: int = 512,
    progress: Progress | None = None,
    partial: Partial | None = None,
    pictures: Sequence[dict[str, Any]] = (),
) -> list[Moments]:
    """Moments of every layer over positions >= n_sink of each sequence ([T] int64 ids), before and
    after RoPE.

    Logits are never computed and one sequence is in memory at a time. ``capacity`` bounds the
    held-back rows per layer. ``partial`` lets a later call continue an interrupted one.
    ``pictures``: more sequences, as keyword arguments of the model (``pictures``).
    """
    turns = model_turning(model, int(sequences[0][0]))
    total = Accumulator(n_sink, capacity, turns)
    first = partial.restore(total) if partial else 0

    def attend(layer, q, k, v, scale):
        o = causal_attention(q.float(), k.float(), v.float(), scale)
        total.add(layer, *(x[0].transpose(0, 1) for x in (q, k, v, o)))
        return o.to(q.dtype)

    tokens, done = sum(map(len, sequences)), sum(map(len, sequences[:first]))
    with replaced_attention(model, attend):
        for i, ids in enumerate(sequences[first:], start=first + 1):
            body(model)(input_ids=ids[None].to(model.device), use_cache=False)
            total.advance(len(ids))
            done += len(ids)
            if progress:
                progress("running the model", done, tokens)
            if partial:
                partial.save(total, i)
        for inputs in pictures:
            inputs = {name: value.to(model.device) for name, value in inputs.items()}
            model.base_model(**inputs, use_cache=False)
            total.advance(inputs["input_ids"].shape[1])
    return total.finish(len(attention_layers_of(model)))
