"""What a model must have in common with the model an artifact was calibrated on.

Read from ``config.json`` and the weight files (``weights``), before any weight is loaded and
without transformers. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .weights import FingerprintError, hash_weights

__all__ = ["Fingerprint", "FingerprintError"]


# Names that different model families use for the same number, most common first.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
# Where multimodal configs keep their language model; SGLang looks in the same order.
_TEXT_PARTS = ("thinker_config", "llm_config", "language_config", "text_config")
# What lists of kinds call a layer with K and V, and one with a state or nothing at all.
_LOCAL = ("sliding_attention", "swa", "chunked_attention")
_ATTENTION = ("full_attention", "attention", "attn", *_LOCAL)
# Text models whose configs may name a window that SGLang's classes for them leave out.
_WHOLE = (
    *("mistral", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2"),
    *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    *("qwen3", "qwen3_moe"),
)
_OTHERS = ("linear_attention", "conv", "short_conv", "mamba", "mamba2", "jet", "mlp", "moe")
_PATTERN = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}  # Nemotron-H, a letter a layer

# Settings of RoPE outside its own dictionary, and kinds that need to know the trained context.
_ROPE = (
    *("rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_dim", "rotary_emb_base"),
    *("rope_interleave", "no_rope_layers", "no_rope_layer_interval"),
)
_STRETCHED = ("dynamic", "yarn", "longrope")
# What else in a config.json changes K, V or Q with the same weights.
_SETTINGS = (
    *("hidden_act", "hidden_activation", "activation_function"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "clip_qkv", "use_qk_norm", "qk_layernorm"),
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "scoring_func"),
    *("n_group", "topk_group", "topk_method"),
)


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model's KV cache.

    architecture  class name of the model, e.g. LlamaForCausalLM
    layers        that have K and V: in a hybrid model fewer than the model has
    heads, kv_heads, head_dim  of the whole model, before any tensor parallelism
    rope          canonical JSON of theta and scaling (K is calibrated after RoPE)
    settings      canonical JSON of other settings that K, V and Q depend on
    weights       ``weights.hash_weights``, ``"none"`` if there are none
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str
    settings: str
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
            layers=_attention_layers(model_dir, text),
            heads=heads,
            kv_heads=_number(model_dir, text, _KV_HEADS, heads),
            head_dim=_head_dim(model_dir, text, heads),
            rope=canonical_rope(text),
            settings=_canonical({name: text.get(name) for name in _SETTINGS}),
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
    """The language model's part of a (possibly multimodal) config: of an omni model, the part of
    the thinker, which is what SGLang serves."""
    for name in _TEXT_PARTS:
        if isinstance(nested := config.get(name), dict):
            return text_config(nested)
    return config


def attention_layers(text: dict[str, Any], layers: int) -> list[int]:
    """Ids of the layers with K and V among the model's ``layers``.

    Raises FingerprintError for a kind of layer that is not known to have K and V or none: counting
    it wrong would give every later layer the parameters of another.
    """
    kinds = _layer_kinds(text)
    if kinds is not None:
        if len(kinds) < layers:
            raise FingerprintError(
                f"config.json names the kind of {len(kinds)} layers, but the model has {layers}"
            )
        if unknown := sorted({k for k in kinds if k not in (*_ATTENTION, *_OTHERS)}):
            raise FingerprintError(
                f"config.json has layers of a kind that int2 does not know: {', '.join(unknown)}"
            )
        return [i for i, kind in enumerate(kinds[:layers]) if kind in _ATTENTION]
    if isinstance(ids := text.get("full_attn_idxs"), list):  # LFM2
        return sorted(i for i in ids if i < layers)
    every = text.get("full_attention_interval")  # Qwen3-Next's own spelling
    if isinstance(every, int) and every > 0 and text.get("linear_num_key_heads"):
        return [i for i in range(layers) if (i + 1) % every == 0]
    return list(range(layers))


def slides(text: dict[str, Any]) -> bool:
    """Whether some layers attend to the last tokens only, as SGLang runs the model: in a window or
    a chunk. What the config says of it counts only where SGLang's class applies it."""
    if text.get("model_type") in _WHOLE:
        return False
    kinds = text.get("layer_types") or ()
    if text.get("attention_chunk_size") or any(kind in _LOCAL for kind in kinds):
        return True
    return not kinds and bool(text.get("sliding_window")) and text.get("use_sliding_window", True)


def _layer_kinds(text: dict[str, Any]) -> list[str] | None:
    """The kind of each layer, where the config lists them."""
    for name in ("layer_types", "layers_block_type"):
        if isinstance(kinds := text.get(name), list):
            return kinds
    pattern = text.get("hybrid_override_pattern")
    return [_PATTERN.get(c, c) for c in pattern] if isinstance(pattern, str) else None


def canonical_rope(text: dict[str, Any]) -> str:
    """Canonical JSON of RoPE, the same for transformers 4 (``rope_theta`` + ``rope_scaling``) and
    5 (``rope_parameters``) spellings of one model."""
    rope = dict(text.get("rope_scaling") or {}) | dict(text.get("rope_parameters") or {})
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind)
    if kind not in (None, "default"):
        rope["rope_type"] = kind
    for name in _ROPE:
        if text.get(name) is not None:
            rope.setdefault(name, text[name])
    if kind in _STRETCHED and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = text.get("max_position_embeddings")
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    return _canonical(rope)


def _canonical(values: dict[str, Any]) -> str:
    """JSON that does not tell 1 from 1.0, or null from nothing."""
    numbers = {k: float(v) if _is_number(v) else v for k, v in values.items() if v is not None}
    return json.dumps(numbers, sort_keys=True, separators=(",", ":"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _architecture(model_dir: Path, config: dict[str, Any], text: dict[str, Any]) -> str:
    names = config.get("architectures") or text.get("architectures") or [config.get("model_type")]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise FingerprintError(f"{model_dir}: config.json names no architecture")
    return names[0]


def _attention_layers(model_dir: Path, text: dict[str, Any]) -> int:
    kinds = _layer_kinds(text) or ()  # Nemotron-H names no number beside them
    layers = _number(model_dir, text, _LAYERS, len(kinds) or None)
    try:
        return len(attention_layers(text, layers))
    except FingerprintError as error:
        raise FingerprintError(f"{model_dir}: {error}") from None


def _number(
    model_dir: Path | str, text: dict[str, Any], names: tuple[str, ...], default: int | None = None
) -> int:
    value = next((text[n] for n in names if text.get(n) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FingerprintError(
            f"{model_dir}: config.json field {names[0]} is {value!r}, expected a positive integer"
        )
    return value


def model_head_dim(text: dict[str, Any], where: Path | str = "the model") -> int:
    """Channels of a head, from the language model's config."""
    return _head_dim(where, text, _number(where, text, _HEADS))


def _head_dim(model_dir: Path | str, text: dict[str, Any], heads: int) -> int:
    if text.get("head_dim") is not None:
        return _number(model_dir, text, ("head_dim",))
    return _number(model_dir, text, _HIDDEN) // heads
