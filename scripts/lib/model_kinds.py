"""The kinds of model that ``check_models.py`` serves: tiny random weights, or a folder given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.lib.tiny_models import VOCAB, edit_config, family, lora_adapter

# Wide enough for the kernels that real models use: GQA of 4, 8-bit and 4-bit weight tiles.
_SIZES = dict(
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=2,
    sharp=True,
)
ADAPTERS = ("one", "two", None)  # of the prompts of a batch, in turn; None: the model itself
_AWQ_GROUP = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs packed into one int32


@dataclass(frozen=True)
class Kind:
    """``make(folder)`` writes the model; flags are SGLang's.

    exact     more flags of the BF16 server only
    int2      more flags of the int2 servers only, on a GPU
    adapters  LoRA names, used by the requests of a batch in turn
    gpu       why it needs a GPU, where SGLang itself cannot serve it without one
    sinks     exact first tokens of the run "wide"
    hits      cases whose prefix must be found in the cache
    """

    make: Callable[[Path], object]
    flags: Callable[[Path], list[str]] = lambda folder: []
    exact: tuple[str, ...] = ()
    int2: tuple[str, ...] = ()
    adapters: tuple[str | None, ...] = (None,)
    gpu: str | None = None
    sinks: int = 512
    hits: tuple[str, ...] = ("hit", "turn")


def _tiny(name: str, **changes) -> Callable[[Path], object]:
    return partial(family, name, **(_SIZES | changes))


def _with_adapters(folder: Path) -> None:
    family("llama-64", folder, **_SIZES)
    for seed, name in enumerate(filter(None, ADAPTERS)):
        lora_adapter(folder, folder / name, folder / f"{name}-merged", seed)


def _adapter_flags(folder: Path) -> list[str]:
    names = filter(None, ADAPTERS)
    return ["--enable-lora", "--lora-paths", *(f"{name}={folder / name}" for name in names)]


def _few_states(folder: Path) -> list[str]:
    return ["--max-mamba-cache-size", "64"]  # SGLang would give them half of the memory


def _no_prefix_cache(folder: Path) -> list[str]:
    return [*_few_states(folder), "--disable-radix-cache"]


def _awq(folder: Path) -> None:
    """A Llama with every linear layer of its blocks in AWQ's 4-bit format."""
    family("llama-64", folder, head_dim=128, **_SIZES)
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weights |= _awq_tensors(name.removesuffix(".weight"), weight)
        else:
            weights[name] = weight.half()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    method = dict(quant_method="awq", version="gemm", bits=4, group_size=_AWQ_GROUP)
    edit_config(folder, quantization_config={**method, "zero_point": True})


def _awq_tensors(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Plain round-to-nearest of weight [out, in]; the format is what matters here."""
    groups = weight.t().reshape(-1, _AWQ_GROUP, weight.shape[0])  # [in / group, group, out]
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale + zero).round().clamp(0, 15).flatten(0, 1)
    return {
        f"{name}.qweight": _awq_pack(codes),
        f"{name}.qzeros": _awq_pack(zero.squeeze(1)),
        f"{name}.scales": scale.squeeze(1).half().contiguous(),
    }


def _awq_pack(codes: torch.Tensor) -> torch.Tensor:
    """[n, out] of 0..15 -> int32 [n, out / 8]."""
    eights = codes.to(torch.int64).unflatten(-1, (-1, 8))[..., _AWQ_ORDER]
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _hybrid(name: str, head_dim: int, **more) -> Kind:
    """Sizes that SGLang's kernels for linear attention are made for. They go on only from where a
    state was kept, at the end of a prompt or thereabouts: prefixes are found there, or not at all.
    """
    sizes = dict(linear_key_head_dim=128, linear_value_head_dim=128, head_dim=head_dim)
    make, gpu = _tiny(name, **sizes), "kernels for linear attention"
    return Kind(make, **dict(flags=_few_states, gpu=gpu, sinks=1024, hits=("turn",)) | more)


def _state_space(name: str, **sizes) -> Kind:
    """The same for Mamba-2 and LFM2's convolutions."""
    kind = dict(flags=_few_states, gpu="kernels for Mamba-2", sinks=1024, hits=("turn",))
    return Kind(_tiny(name, **sizes), **kind)


# A FlashAttention-3 build may lack head_dim 256 and FP16; then a server ends, and says so too late.
_NO_FA3 = dict(
    exact=("--attention-backend", "triton"), int2=("--oscar-prefill-attention", "flashinfer")
)
_MOE = "SGLang routes experts with GPU kernels"
KINDS = {
    "llama-64": Kind(_tiny("llama-64")),
    "qwen2-128": Kind(_tiny("qwen2", hidden_size=1024)),  # biased K; head_dim 1024 / 8
    "qwen3-128": Kind(_tiny("qwen3")),  # QK-norm
    "qwen3-moe-128": Kind(_tiny("qwen3-moe", head_dim=128), gpu=_MOE),
    "glm4-moe-128": Kind(_tiny("glm4-moe", head_dim=128), gpu=_MOE),
    "llama-256": Kind(_tiny("llama-256"), **_NO_FA3),
    "qwen3-next-128": _hybrid("qwen3-next", 128),
    "qwen3-next-256": _hybrid("qwen3-next", 256, **_NO_FA3),
    # SGLang keeps no states for the prefix cache of this form, the text-only one.
    "qwen3.5-128": _hybrid("qwen3.5", 128, flags=_no_prefix_cache, hits=()),
    "mistral-64": Kind(_tiny("mistral")),  # a window that SGLang leaves out
    "phi3-96": Kind(_tiny("phi3")),  # in rows of 128
    "qwen3-vl-64": Kind(_tiny("qwen3-vl")),  # text alone
    "nemotron-h-128": _state_space(
        "nemotron-h", head_dim=128, mamba_num_heads=8, mamba_head_dim=64, ssm_state_size=128
    ),
    "granite-hybrid-128": _state_space(
        "granite-hybrid", hidden_size=1024, mamba_n_heads=32, mamba_d_state=128
    ),
    "falcon-h1-128": _state_space(
        "falcon-h1", head_dim=128, mamba_d_head=64, mamba_d_ssm=256, mamba_d_state=128
    ),
    "lfm2-128": _state_space("lfm2", hidden_size=1024),
    "fp8-128": Kind(
        _tiny("qwen3"),
        lambda folder: ["--quantization", "fp8"],
        gpu="FP8 matrix products",
    ),
    # Of the default, Marlin's kernels, SGLang compiles for minutes; these know float16 only.
    "awq-128": Kind(
        _awq,
        lambda folder: ["--quantization", "awq", "--dtype", "float16"],
        gpu="AWQ kernels",
        **_NO_FA3,
    ),
    "lora-64": Kind(
        _with_adapters, _adapter_flags, adapters=ADAPTERS, gpu="SGLang pins memory for adapters"
    ),
}

# Made where there was no GPU: not in the committed results yet.
UNMEASURED = frozenset(
    ("mistral-64", "phi3-96", "qwen3-vl-64", "nemotron-h-128", "granite-hybrid-128")
    + ("falcon-h1-128", "lfm2-128")
)


def text_ids(folder: Path, vocab: int, text: Path) -> list[int]:
    """Tokens of prompts: of ``text`` where the model has a tokenizer, else random ones."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text()).ids
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, vocab, (4000,), generator=generator).tolist()


def vocabulary(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return config.get("vocab_size") or config["text_config"].get("vocab_size", VOCAB)
