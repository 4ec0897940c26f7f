"""Random transformers models of a few layers, written to a folder as a user's model would be."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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


def llama(folder: Path) -> Path:
    """Llama: GQA, head_dim 64."""
    torch.manual_seed(0)
    return _write(LlamaForCausalLM(LlamaConfig(head_dim=64, **_COMMON)), folder)


def qwen3(folder: Path) -> Path:
    """Qwen3: QK-norm, head_dim 128."""
    torch.manual_seed(0)
    return _write(Qwen3ForCausalLM(Qwen3Config(head_dim=128, **_COMMON)), folder)


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
    model.save_pretrained(folder)
    return folder
