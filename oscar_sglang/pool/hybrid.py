"""Hybrid models: some layers keep a recurrent state; only the others have K and V to quantise."""

from __future__ import annotations

from typing import Any

from .sglang_types import Configurator


def is_hybrid(config: Any) -> bool:
    """Whether some layers keep a state instead of K and V. ``config``: SGLang's ModelConfig."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(config) is not None


def has_known_states(config: Any) -> bool:
    """Whether the state layers are of a kind that int2 is tested beside: Gated DeltaNet, Mamba-2,
    LFM2's convolutions."""
    from sglang.srt import configs

    text = configs.Qwen3NextConfig, configs.Qwen3_5Config, configs.Qwen3_5MoeConfig
    plain = (
        *(configs.NemotronHConfig, configs.GraniteMoeHybridConfig, configs.FalconH1Config),
        *(configs.Lfm2Config, configs.Lfm2MoeConfig),
    )
    inside = any(isinstance(c, text) for c in (config.hf_config, config.hf_text_config))
    return inside or isinstance(config.hf_config, plain)


def attention_layer_ids(kvc: Configurator) -> list[int]:
    """The model's layers with K and V, from SGLang's ``KVCacheConfigurator``.

    There is one pipeline stage: more are refused.
    """
    if kvc.mambaish_config is not None:
        return list(kvc.mambaish_config.full_attention_layer_ids)
    return list(range(kvc.layer_info.start_layer, kvc.layer_info.end_layer))


def attention_pool(kv_cache: Any) -> Any:
    """SGLang's KV pool, or the part of a hybrid model's that holds its attention layers."""
    return getattr(kv_cache, "full_kv_pool", kv_cache)
