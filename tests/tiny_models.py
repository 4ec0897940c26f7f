"""Random transformers models of a few layers, written to a folder as a user's model would be."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 256
_COMMON = dict(
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
# What sets an architecture apart for a KV cache, at the smallest size.
FAMILIES = {
    "llama-64": dict(model_type="llama", head_dim=64),
    "llama-256": dict(model_type="llama", head_dim=256),
    "qwen2": dict(model_type="qwen2"),  # biased K, head_dim 128 / 4
    "qwen3": dict(model_type="qwen3", head_dim=128),  # QK-norm
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
}


def family(name: str, folder: Path, **changes) -> Path:
    """One of ``FAMILIES``: random weights, biases included; ``changes`` to its config."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**_COMMON, **FAMILIES[name], **changes})
    return _write(AutoModelForCausalLM.from_config(config), folder)


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


def _write(model, folder: Path) -> Path:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                p.mul_(8)  # attention that is not uniform
            elif name.endswith(".bias"):
                p.normal_(std=0.5)  # they start as zeros
    model.save_pretrained(folder)
    return folder


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
