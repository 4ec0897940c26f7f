"""What the serving benchmarks compare: model shapes with dummy weights, caches and their flags."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    torch_dtype="bfloat16",
    head_dim=128,
    num_key_value_heads=8,
    num_attention_heads=32,
    num_hidden_layers=36,
    vocab_size=151936,
    max_position_embeddings=262144,
    rms_norm_eps=1e-6,
    rope_theta=1000000,
    hidden_act="silu",
    bos_token_id=1,
    eos_token_id=2,
)
SHAPES = {
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
    "qwen3-4b": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    # Measures nothing: for a dry run of the scripts on a CPU.
    "tiny": {
        **QWEN3,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32768,
    },
}
CACHES = {
    "bf16": ["--attention-backend", "fa3"],
    "fp8": ["--attention-backend", "fa3", "--kv-cache-dtype", "fp8_e4m3", "--page-size", "64"],
    "int2": ["--kv-cache-dtype", "int2"],
}
UNCHECKED = {"SGLANG_CHECK_KV_PAGE_INVARIANTS": "0"}  # a check for tests
FIRST_TOKEN, UNUSED_TOKEN = 100, 30000  # ``tokens`` draws from this range


def tokens(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, UNUSED_TOKEN) for _ in range(n)]


def model_folder(shape: str, layers: int | None = None) -> Path:
    """A folder with the config of ``shape`` (fewer layers if asked), for dummy weights.

    Its tokenizer calls every token by its number, so that servers stream text, as SGLang's own
    benchmark client expects, and the ids can be read back from it.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = dict(SHAPES[shape])
    if layers:
        config["num_hidden_layers"] = layers
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    words = {str(i): i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def common_arguments(mem_fraction: str) -> list[str]:
    """Flags that all compared servers share."""
    flags = ["--load-format", "dummy", "--context-length", "131072"]
    flags += ["--mem-fraction-static", mem_fraction, "--max-running-requests", "32"]
    return [*flags, "--cuda-graph-max-bs-decode", "32", "--grammar-backend", "none"]


def bf16_token_bytes(shape: str, layers: int | None = None) -> int:
    """K and V of one token in a BF16 cache."""
    config = SHAPES[shape]
    rows = 2 * (layers or config["num_hidden_layers"]) * config["num_key_value_heads"]
    return rows * config["head_dim"] * 2
