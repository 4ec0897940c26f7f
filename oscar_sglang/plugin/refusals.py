"""What is not supported is refused before weights load, with the option and the way out."""

from __future__ import annotations

import os
from typing import Any

from ..artifact.fingerprint import slides
from ..config import OscarError
from ..kernels.codec import CODECS
from ..kernels.layout import BLOCK, stored_head_dim
from ..pool.hybrid import has_known_states, is_hybrid
from .flags import REFUSED, classes, field_defaults

# Models whose layers attend to what follows a token, which is then not in the cache yet; by class
# name, because their attention is known only when the model is built (``refuse_layers``).
BIDIRECTIONAL = (
    "BertModel",
    "BertForSequenceClassification",
    "Contriever",
    "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
    "EmbeddingGemma2Model",
    "Lfm2BidirectionalModel",
    "HrmTextForCausalLM",
    "SDARForCausalLM",
    "SDARMoeForCausalLM",
    "LLaDA2MoeModelLM",
    "DiffusionGemmaForBlockDiffusion",
)
_WITHOUT_ATTENTION = ("CLIPModel",)


def refuse_options(args: Any) -> None:
    """Options of SGLang that contradict a 2-bit cache. ``args`` needs no resolution."""
    for row in REFUSED:
        if message := row.message(getattr(args, row.field, None)):
            raise OscarError(message)
    for phase in ("prefill", "decode"):
        row = next(r for r in REFUSED if r.field == f"cuda_graph_backend_{phase}")
        if message := row.message(_graph(args, phase)):
            raise OscarError(message)
    if getattr(args, "device", None) == "cpu" and getattr(args, "enable_strict_thinking", False):
        raise OscarError(
            "--enable-strict-thinking masks tokens on a GPU only and would end a CPU server at the "
            "first request; drop it (regex, json_schema and EBNF work on a CPU)"
        )
    post_capture = os.environ.get("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "").lower()
    if post_capture in ("1", "true", "yes", "on"):
        raise OscarError(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING resizes BF16 buffers after graph capture and "
            "does not work with --kv-cache-dtype int2; unset it"
        )


def _graph(args: Any, phase: str) -> str | None:
    """The graph of a phase asked for in JSON, or that SGLang has chosen on a GPU."""
    config = getattr(args, "cuda_graph_config", None)
    if isinstance(config, dict):
        return (config.get(phase) or {}).get("backend")
    # Resolved; without a GPU SGLang names one that it will not use.
    on_gpu = config is not None and getattr(args, "device", None) == "cuda"
    return getattr(config, phase).backend if on_gpu else None


def refuse_unknown(args: Any) -> None:
    """Options that ``flags.py`` does not know: those of an SGLang that nobody has looked at.

    ``args`` before SGLang resolves them: what it decides by itself is none of the operator's.
    """
    from sglang.srt.server_args import ServerArgs

    defaults = field_defaults(ServerArgs)
    for name in sorted(set(defaults) - set(classes())):
        if getattr(args, name) != defaults[name]:
            raise OscarError(
                f"--{name.replace('_', '-')} is an option that int2 does not know: whether a 2-bit "
                "cache works with it has not been looked at; drop it, or --kv-cache-dtype int2"
            )


def refuse_page_size(page_size: int, codec: str) -> None:
    """A page must map to whole history blocks, or whole pages to one block; for a block codec it
    is a block."""
    block = CODECS[codec].block
    if block > 1 and page_size != block:
        raise OscarError(
            f"--page-size {page_size} does not work with codec {codec}, which encodes blocks of "
            f"{block} tokens that must be pages; drop --page-size or give --page-size {block}"
        )
    if page_size < 1 or (page_size % BLOCK and BLOCK % page_size):
        raise OscarError(
            f"--page-size {page_size} has no 2-bit layout: use 1, 2, 4, 8, or a multiple of {BLOCK}"
        )


def refuse_model(config: Any, tp_size: int = 1) -> None:
    """Models whose cache is not plain multi-head K and V. ``config``: SGLang's ModelConfig."""
    name = ", ".join(config.hf_config.architectures or ["this model"])
    if config.attention_arch.name != "MHA":
        raise OscarError(
            f"{name} uses {config.attention_arch.name} attention, whose cache int2 cannot hold; "
            "drop --kv-cache-dtype int2"
        )
    kinds = config.hf_config.architectures or []
    causal = getattr(config.hf_text_config, "is_causal", True)
    bidirectional = getattr(config.hf_text_config, "use_bidirectional_attention", False)
    if any(k in BIDIRECTIONAL for k in kinds) or not causal or bidirectional:
        raise OscarError(
            f"{name} attends to tokens in both directions and keeps nothing in a KV cache that "
            "int2 could make smaller; drop --kv-cache-dtype int2"
        )
    if any(k in _WITHOUT_ATTENTION for k in kinds):
        raise OscarError(f"{name} has no KV cache; drop --kv-cache-dtype int2")
    if config.is_encoder_decoder:
        raise OscarError(f"{name} is an encoder-decoder model; drop --kv-cache-dtype int2")
    if is_hybrid(config) and not has_known_states(config):
        raise OscarError(
            f"{name} mixes attention with layers of a kind that int2 is not tested with (tested: "
            "Gated DeltaNet, Mamba-2 and LFM2's convolutions); "
            "drop --kv-cache-dtype int2"
        )
    if is_hybrid(config) and tp_size > 1:
        raise OscarError(
            f"int2 is not tested with hybrid models like {name} on several GPUs; drop --tp-size "
            f"{tp_size} or --kv-cache-dtype int2"
        )
    if config.is_hybrid_swa or slides(config.hf_text_config.to_dict()):
        raise OscarError(
            f"{name} has sliding-window (or chunked) attention layers, which int2 does not support "
            "yet; drop --kv-cache-dtype int2"
        )
    if config.has_attention_sinks:
        raise OscarError(
            f"{name} has learned attention sinks, which int2 does not support; "
            "drop --kv-cache-dtype int2"
        )
    try:
        stored_head_dim(config.head_dim)
    except ValueError as error:
        raise OscarError(f"{name}: {error}; drop --kv-cache-dtype int2") from None
    if config.v_head_dim != config.head_dim:
        raise OscarError(
            f"{name} has K heads of {config.head_dim} and V heads of {config.v_head_dim} channels; "
            "int2 needs both equal; drop --kv-cache-dtype int2"
        )
