"""Random transformers models of a few layers, written to a folder as a user's model would be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

VOCAB = 256
_PEAK = 8
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
)


_MOE = dict(moe_intermediate_size=64, num_experts_per_tok=2, norm_topk_prob=True)
# Gated DeltaNet in every other layer; an output gate, RoPE on a quarter of the channels.
_HYBRID = dict(
    head_dim=64,
    num_hidden_layers=4,
    full_attention_interval=2,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
# Mamba-2 in every other layer, or beside every attention layer.
_MAMBA = dict(mamba_n_heads=4, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=64)
HYBRID_FAMILIES = (*("qwen3-next", "qwen3.5", "nemotron-h", "granite-hybrid", "falcon-h1", "lfm2"),)
# What sets an architecture apart for a KV cache, at the smallest size.
FAMILIES = {
    "llama-64": dict(model_type="llama", head_dim=64),
    "llama-256": dict(model_type="llama", head_dim=256),
    "qwen2": dict(model_type="qwen2"),  # biased K, head_dim 128 / 4
    "qwen3": dict(model_type="qwen3", head_dim=128),  # QK-norm
    # Windows that SGLang leaves out: its classes attend to everything.
    "mistral": dict(model_type="mistral", head_dim=64, sliding_window=16),
    "qwen2-window": dict(
        model_type="qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    # Q, K and V in one projection; RoPE on three quarters of the channels; rows of 128 cached
    "phi3": dict(
        model_type="phi3",
        head_dim=96,
        sliding_window=16,
        partial_rotary_factor=0.75,
        pad_token_id=0,
    ),
    "qwen3-moe": dict(model_type="qwen3_moe", head_dim=64, num_experts=4, **_MOE),
    "glm4-moe": dict(  # biased K, QK-norm, RoPE on half of the channels, a dense first layer
        model_type="glm4_moe",
        head_dim=64,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        **_MOE,
    ),
    "qwen3-next": dict(
        model_type="qwen3_next",
        num_experts=4,
        shared_expert_intermediate_size=64,
        **_MOE,
        **_HYBRID,
    ),
    "qwen3.5": dict(model_type="qwen3_5_text", **_HYBRID),
    "nemotron-h": dict(  # no RoPE; layers without a mixer of tokens, too
        model_type="nemotron_h",
        head_dim=64,
        num_hidden_layers=6,
        hybrid_override_pattern="M*-M*-",
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        chunk_size=64,
    ),
    "granite-hybrid": dict(  # no RoPE
        model_type="granitemoehybrid",
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        mamba_d_head=64,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        position_embedding_type="nope",
        **_MAMBA,
    ),
    "falcon-h1": dict(
        model_type="falcon_h1", head_dim=64, mamba_d_head=32, mamba_d_ssm=128, **_MAMBA
    ),
    "lfm2": dict(
        model_type="lfm2",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    ),
}
# Tokens that pictures need, the last ones of the vocabulary.
SPECIAL = {
    name: VOCAB - 6 + i
    for i, name in enumerate(
        (
            "<|vision_start|>",
            "<|vision_end|>",
            "<|image_pad|>",
            "<|video_pad|>",
            "<|im_end|>",
            "<e>",
        )
    )
}
PATCH = 8
VISION = dict(
    depth=2,
    hidden_size=64,
    intermediate_size=64,
    num_heads=2,
    patch_size=PATCH,
    spatial_merge_size=2,
    temporal_patch_size=2,
)
VISION_IDS = dict(
    image_token_id=SPECIAL["<|image_pad|>"],
    video_token_id=SPECIAL["<|video_pad|>"],
    vision_start_token_id=SPECIAL["<|vision_start|>"],
    vision_end_token_id=SPECIAL["<|vision_end|>"],
)


def mrope(*sections: int, **more) -> dict:
    plain = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return plain | more


# Models of text and pictures: positions in three dimensions.
FAMILIES |= {
    "qwen3-vl": dict(
        model_type="qwen3_vl",
        text_config=dict(head_dim=64, rope_parameters=mrope(12, 10, 10, mrope_interleaved=True)),
        vision_config=dict(
            VISION, out_hidden_size=128, num_position_embeddings=64, deepstack_visual_indexes=[0]
        ),
        **VISION_IDS,
    ),
    "qwen2.5-vl": dict(  # biased K; its window is for layers that none of its checkpoints has
        model_type="qwen2_5_vl",
        text_config=dict(rope_parameters=mrope(4, 6, 6)),
        vision_config=dict(VISION, out_hidden_size=128, fullatt_block_indexes=[1], window_size=32),
        **VISION_IDS,
    ),
}
# config.json of the first of them, for runs with dummy weights or with none at all.
LLAMA = {
    **COMMON,
    **FAMILIES["llama-64"],
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def family(name: str, folder: Path, *, sharp: bool = False, seed: int = 0, **changes) -> Path:
    """One of ``FAMILIES``: random weights, biases included; ``changes`` to its config.

    ``sharp``: distributions far from uniform, so that differences of them mean something.
    """
    torch.manual_seed(seed)
    spec = FAMILIES[name]
    if "text_config" in spec:
        text = {**COMMON, **spec["text_config"], **changes}
        vision = spec["vision_config"] | {"out_hidden_size": text["hidden_size"]}
        config = AutoConfig.for_model(**{**spec, "text_config": text, "vision_config": vision})
    else:
        config = AutoConfig.for_model(**{**COMMON, **spec, **changes})
    plain = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model = (AutoModelForCausalLM if plain else AutoModelForImageTextToText).from_config(config)
    if sharp:
        _sharpen(model)
    write(model, folder)
    if pattern := spec.get("hybrid_override_pattern"):  # as checkpoints have it
        edit_config(folder, hybrid_override_pattern=pattern, layers_block_type=None)
    return folder


def head_dim(name: str) -> int:
    """Channels of a head of one of ``FAMILIES``."""
    spec = FAMILIES[name]
    text = COMMON | spec.get("text_config", spec)
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def llama(folder: Path) -> Path:
    """Llama: GQA, head_dim 64."""
    return family("llama-64", folder)


def qwen3(folder: Path) -> Path:
    """Qwen3: QK-norm, head_dim 128."""
    return family("qwen3", folder)


def random_ids(*lengths: int) -> list[torch.Tensor]:
    """The same token ids every time, one [n] int64 sequence a length."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]


def edit_config(folder: Path, **changes) -> None:
    """Change entries of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@torch.no_grad()
def _sharpen(model) -> None:
    """Logits and, unless there is QK-norm, attention scores of a size that does not depend on the
    hidden size: neither flat nor so peaked that 2 bits turn everything around."""
    for name, p in model.named_parameters():
        if name.endswith("lm_head.weight"):
            p.normal_(std=1.6 / p.shape[1] ** 0.5)
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            p.normal_(std=1.2 / _PEAK / p.shape[1] ** 0.5)


def write(model, folder: Path) -> Path:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                p.mul_(_PEAK)  # attention that is not uniform
            elif "visual.merger" in name:
                p.mul_(_PEAK)  # pictures that make a difference
            elif name.endswith(".bias"):  # they start as zeros
                # Values that are mostly bias would make all contexts alike.
                p.normal_(std=0.05 if name.endswith("v_proj.bias") else 0.5)
    model.save_pretrained(folder)
    return folder


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def lora_adapter(
    model: Path, adapter: Path, merged: Path, seed: int, rank: int = 4, alpha: int = 8
) -> None:
    """A random adapter in PEFT's format, and a copy of the model that has it merged in."""
    generator = torch.Generator().manual_seed(seed)
    weights, parts = load_file(model / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if name.split(".")[-2] in LORA_TARGETS:
            a = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
            b = torch.randn(weight.shape[0], rank, generator=generator) / 4
            stem = "base_model.model." + name.removesuffix(".weight")
            parts[f"{stem}.lora_A.weight"], parts[f"{stem}.lora_B.weight"] = a, b
            weights[name] = weight + (b @ a) * (alpha / rank)
    adapter.mkdir()
    save_file(parts, adapter / "adapter_model.safetensors")
    config = dict(peft_type="LORA", r=rank, lora_alpha=alpha, target_modules=list(LORA_TARGETS))
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    merged.mkdir()
    shutil.copy(model / "config.json", merged)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})


def with_tokenizer(folder: Path) -> Path:
    """The model with a tokenizer that calls every token by its number."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {str(i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
