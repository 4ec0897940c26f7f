"""What is not supported is refused before weights load, with the option and the way out."""

from __future__ import annotations

import os
from typing import Any

from .config import ATTENTION_BACKEND, PREFILL_ATTENTION, OscarError
from .hybrid import is_gated_delta_net, is_hybrid
from .kernels.codec import CODECS
from .kernels.layout import BLOCK, SUPPORTED_HEAD_DIMS


def _is_set(args: Any, name: str, off: tuple = (None, False, 0, "", "none")) -> bool:
    return getattr(args, name, None) not in off


# (ServerArgs field, flag, why)
_OPTIONS = (
    ("enable_hierarchical_cache", "--enable-hierarchical-cache", "HiCache copies BF16 buffers"),
    ("enable_lmcache", "--enable-lmcache", "LMCache copies BF16 buffers"),
    ("enable_flexkv", "--enable-flexkv", "FlexKV copies BF16 buffers"),
    ("speculative_algorithm", "--speculative-algorithm", "speculative decoding is not built yet"),
    ("enable_unified_memory", "--enable-unified-memory", "it replaces the KV pool"),
    ("enable_page_major_kv_layout", "--enable-page-major-kv-layout", "it replaces the KV pool"),
    ("prefill_only_disable_kv_cache", "--prefill-only-disable-kv-cache", "there is no KV cache"),
    ("enable_deterministic_inference", "--enable-deterministic-inference", "not built yet"),
    ("enable_hisparse", "--enable-hisparse", "it replaces the KV pool"),
    ("enable_two_batch_overlap", "--enable-two-batch-overlap", "not built yet"),
    ("enable_pdmux", "--enable-pdmux", "not built yet"),
    ("dllm_algorithm", "--dllm-algorithm", "diffusion models rewrite their cache"),
    ("enable_dp_attention", "--enable-dp-attention", "not built yet"),
    ("use_ray", "--use-ray", "it copies the arguments without ours"),
    ("kv_canary", "--kv-canary", "it checks BF16 buffers"),
)
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def _prefill_graph(args: Any) -> str | None:
    """The prefill graph asked for by flag or JSON, or that SGLang has chosen on a GPU."""
    config = getattr(args, "cuda_graph_config", None)
    if isinstance(config, dict):
        backend = (config.get("prefill") or {}).get("backend")
    else:  # resolved; without a GPU SGLang names one that it will not use
        on_gpu = getattr(args, "device", None) == "cuda"
        backend = config.prefill.backend if config is not None and on_gpu else None
    return backend or getattr(args, "cuda_graph_backend_prefill", None)


def refuse_options(args: Any) -> None:
    """Options of SGLang that contradict a 2-bit cache. ``args`` needs no resolution."""
    for field, name, why in _OPTIONS:
        if _is_set(args, field):
            raise OscarError(
                f"--kv-cache-dtype int2 does not work with {name} ({why}); drop {name}"
            )
    if (mode := getattr(args, "disaggregation_mode", "null")) != "null":
        raise OscarError(
            "--kv-cache-dtype int2 does not work with prefill/decode disaggregation yet; "
            f"drop --disaggregation-mode {mode}"
        )
    if getattr(args, "device", None) == "cpu" and _is_set(args, "enable_strict_thinking"):
        raise OscarError(
            "--enable-strict-thinking masks tokens on a GPU only and would end a CPU server at the "
            "first request; drop it (regex, json_schema and EBNF work on a CPU)"
        )
    graph = _prefill_graph(args)
    if graph not in (None, "breakable", "disabled"):  # the rest captures attention itself
        raise OscarError(
            f"--kv-cache-dtype int2 does not work with --cuda-graph-backend-prefill {graph}; drop "
            "it (breakable is SGLang's default) or set it to disabled"
        )
    for field in ("dcp_size", "pp_size"):
        if (getattr(args, field, 1) or 1) > 1:
            flag = "--" + field.replace("_", "-")
            raise OscarError(
                f"--kv-cache-dtype int2 does not work with {flag} > 1 yet; drop {flag}"
            )
    for field in _BACKENDS:
        if (name := getattr(args, field, None)) not in (None, ATTENTION_BACKEND):
            flag = "--" + field.replace("_", "-")
            raise OscarError(
                f"--kv-cache-dtype int2 chooses its own attention backend; drop {flag} {name} (the "
                f"library of prefill: --oscar-prefill-attention {'|'.join(PREFILL_ATTENTION)})"
            )
    post_capture = os.environ.get("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "").lower()
    if post_capture in ("1", "true", "yes", "on"):
        raise OscarError(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING resizes BF16 buffers after graph capture and "
            "does not work with --kv-cache-dtype int2; unset it"
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
    if config.is_encoder_decoder:
        raise OscarError(f"{name} is an encoder-decoder model; drop --kv-cache-dtype int2")
    if is_hybrid(config) and not is_gated_delta_net(config):
        raise OscarError(
            f"{name} mixes attention with Mamba, convolution or linear-attention layers of a kind "
            "that int2 is not tested with (tested: Gated DeltaNet, as in Qwen3-Next and Qwen3.5); "
            "drop --kv-cache-dtype int2"
        )
    if is_hybrid(config) and tp_size > 1:
        raise OscarError(
            f"int2 is not tested with hybrid models like {name} on several GPUs; drop --tp-size "
            f"{tp_size} or --kv-cache-dtype int2"
        )
    window = getattr(config.hf_text_config, "sliding_window", None)
    uses_window = getattr(config.hf_text_config, "use_sliding_window", window is not None)
    layer_types = getattr(config.hf_text_config, "layer_types", None) or ()
    local = "sliding_attention" in layer_types or config.attention_chunk_size
    if config.is_hybrid_swa or local or (window and uses_window):
        raise OscarError(
            f"{name} has sliding-window (or chunked) attention layers, which int2 does not support "
            "yet; drop --kv-cache-dtype int2"
        )
    if config.head_dim not in SUPPORTED_HEAD_DIMS:
        raise OscarError(
            f"head_dim {config.head_dim} of {name} has no 2-bit layout; supported: powers of two, "
            f"{', '.join(map(str, SUPPORTED_HEAD_DIMS))}; drop --kv-cache-dtype int2"
        )
    if config.v_head_dim != config.head_dim:
        raise OscarError(
            f"{name} has K heads of {config.head_dim} and V heads of {config.v_head_dim} channels; "
            "int2 needs both equal; drop --kv-cache-dtype int2"
        )
