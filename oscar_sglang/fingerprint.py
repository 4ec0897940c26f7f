"""What a model must have in common with the model an artifact was calibrated on.

Read from ``config.json`` and a sample of the weight files, before any weight is loaded and without
transformers. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
NO_WEIGHTS = "none"
LINEAR_LAYER = "linear_attention"
METADATA_KEY = "oscar_sglang"  # of our own safetensors files
_HEADER_BYTES = 256
_SAMPLES = 16
_SAMPLE_BYTES = 4096

# Names that different model families use for the same number, most common first.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


class FingerprintError(ValueError):
    """The model directory does not say what the plugin needs to know about its attention."""


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model's KV cache.

    architecture  class name of the model, e.g. LlamaForCausalLM
    layers        that have K and V: in a hybrid model fewer than the model has
    heads, kv_heads, head_dim  of the whole model, before any tensor parallelism
    rope          canonical JSON of theta and scaling (K is calibrated after RoPE)
    weights       hash of a sample of the weight files, or ``"none"`` if there are none
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str
    weights: str

    @classmethod
    def of(cls, model_dir: Path | str, config: dict[str, Any] | None = None) -> Fingerprint:
        """Fingerprint of a model directory; ``config`` replaces its config.json if given.

        Raises FingerprintError naming the directory and the missing field.
        """
        model_dir = Path(model_dir)
        config = read_config(model_dir) if config is None else config
        text = text_config(config)
        heads = _number(model_dir, text, _HEADS)
        return cls(
            architecture=_architecture(model_dir, config, text),
            layers=len(attention_layers(text, _number(model_dir, text, _LAYERS))),
            heads=heads,
            kv_heads=_number(model_dir, text, _KV_HEADS, heads),
            head_dim=_head_dim(model_dir, text, heads),
            rope=canonical_rope(text),
            weights=hash_weights(model_dir),
        )

    @property
    def key(self) -> str:
        """12 hex digits over all fields, for file names."""
        values = json.dumps([getattr(self, f.name) for f in fields(self)])
        return hashlib.sha256(values.encode()).hexdigest()[:12]


def read_config(model_dir: Path) -> dict[str, Any]:
    """``config.json`` of a model directory, as it is on disk."""
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FingerprintError(
            f"{path}: not found; expected a local model directory in Hugging Face format"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise FingerprintError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise FingerprintError(f"{path}: found {type(config).__name__}, expected a JSON object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a (possibly multimodal) config."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def attention_layers(text: dict[str, Any], layers: int) -> list[int]:
    """Ids of the layers with K and V among ``layers``: all but those of linear attention."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [i for i, kind in enumerate(kinds) if kind != LINEAR_LAYER]
    every = text.get("full_attention_interval")  # Qwen3-Next's own spelling
    if isinstance(every, int) and every > 0 and text.get("linear_num_key_heads"):
        return [i for i in range(layers) if (i + 1) % every == 0]
    return list(range(layers))


def canonical_rope(text: dict[str, Any]) -> str:
    """Canonical JSON of RoPE, the same for transformers 4 (``rope_theta`` + ``rope_scaling``) and
    5 (``rope_parameters``) spellings of one model."""
    rope = dict(text.get("rope_scaling") or {}) | dict(text.get("rope_parameters") or {})
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind)
    if kind not in (None, "default"):
        rope["rope_type"] = kind
    for name in ("rope_theta", "partial_rotary_factor"):
        if text.get(name) is not None:
            rope.setdefault(name, text[name])
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    numbers = {k: float(v) if _is_number(v) else v for k, v in rope.items() if v is not None}
    return json.dumps(numbers, sort_keys=True, separators=(",", ":"))


def hash_weights(model_dir: Path) -> str:
    """16 hex digits over size and ``_SAMPLES`` pieces of every weight file, in name order.

    Our own artifacts, which users keep beside the weights, are not weights.
    """
    files = sorted(
        p for p in Path(model_dir).iterdir() if p.suffix in WEIGHT_SUFFIXES and not _is_artifact(p)
    )
    if not files:
        return NO_WEIGHTS
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _is_artifact(path: Path) -> bool:
    """Whether the safetensors header at the start of the file has our metadata key."""
    with path.open("rb") as file:
        return f'"{METADATA_KEY}":'.encode() in file.read(_HEADER_BYTES)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _architecture(model_dir: Path, config: dict[str, Any], text: dict[str, Any]) -> str:
    names = config.get("architectures") or text.get("architectures") or [config.get("model_type")]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise FingerprintError(f"{model_dir}: config.json names no architecture")
    return names[0]


def _number(
    model_dir: Path, text: dict[str, Any], names: tuple[str, ...], default: int | None = None
) -> int:
    value = next((text[n] for n in names if text.get(n) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FingerprintError(
            f"{model_dir}: config.json field {names[0]} is {value!r}, expected a positive integer"
        )
    return value


def _head_dim(model_dir: Path, text: dict[str, Any], heads: int) -> int:
    if text.get("head_dim") is not None:
        return _number(model_dir, text, ("head_dim",))
    return _number(model_dir, text, _HIDDEN) // heads
