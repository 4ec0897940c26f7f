"""How a model turns its keys: frequencies and channel pairs from its configuration, and a check
against keys that it computed.

Known are RoPE without scaling, ``linear``, ``llama3`` and ``yarn`` scaling, partial rotary factors,
multimodal RoPE (text: one position) and layers without any. ``dynamic`` is taken for what it is up
to the original context length. A model whose RoPE is another one is treated as if it had none:
its K is then coded about a constant mean, and the calibration says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.codec_position import Rope
from ..kernels.layout import stored_head_dim

# Model types whose pairs are neighbouring channels; elsewhere they are half the channels apart.
_ADJACENT = {
    "chatglm", "codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj",
    "llama4", "llama4_text",
}  # fmt: skip
_WITHOUT = {"nemotron_h"}  # although their configurations do not say so
PROBE_TOKENS = 64
_TOLERANCE = 2e-2  # of a key's norm; BF16 rounding is 4e-3, another frequency or pairing near 1


@dataclass(frozen=True)
class Turning:
    """How the keys of a model turn.

    rope   of the layers that have one
    free   attention layers (counted without others) that have none
    doubt  why ``rope`` is none at all although the model may have one; None if there is no doubt
    """

    rope: Rope
    free: tuple[int, ...] = ()
    doubt: str | None = None

    def of_layer(self, layer: int) -> Rope:
        return Rope.still(len(self.rope.pairs)) if layer in self.free else self.rope


def turning(text: dict[str, Any], head_dim: int, layer_ids: Sequence[int]) -> Turning:
    """From the language model's configuration, over heads as they are stored; ``head_dim``: the
    model's; ``layer_ids``: of its attention layers."""
    settings = dict(text.get("rope_scaling") or {}) | dict(text.get("rope_parameters") or {})
    kind = settings.get("rope_type", settings.get("type")) or "default"
    theta = settings.get("rope_theta") or text.get("rope_theta") or text.get("rotary_emb_base")
    stored = stored_head_dim(head_dim)
    still = Rope.still(stored)
    said = text.get("position_embedding_type") or "rope"
    if text.get("model_type") in _WITHOUT or said not in ("rope", "rotary"):
        return Turning(still)
    # Without a word transformers' default; the check finds out where there is no RoPE.
    n = int(head_dim * _partial(text, settings, head_dim)) // 2
    plain = float(theta or 10000.0) ** (-torch.arange(n, dtype=torch.float64) / max(n, 1))
    scale = {
        "default": lambda: plain,
        "mrope": lambda: plain,
        "dynamic": lambda: plain,
        "linear": lambda: plain / settings["factor"],
        "llama3": lambda: _llama3(plain, settings),
        "yarn": lambda: _yarn(plain, settings, text, float(theta or 10000.0)),
    }.get(kind)
    if scale is None:
        return Turning(still, doubt=f"RoPE of type {kind!r} is not known here")
    try:
        frequencies = scale()
    except (KeyError, TypeError, ZeroDivisionError) as error:
        return Turning(still, doubt=f"RoPE of type {kind!r} lacks a setting ({error})")
    adjacent = text.get("model_type") in _ADJACENT or bool(text.get("rope_interleave"))
    return Turning(Rope.of(frequencies.tolist(), stored, adjacent), _free(text, layer_ids))


def checked(found: Turning, keys: torch.Tensor) -> Turning:
    """``found``, or what fits better, by keys [T, Hk, D] of one token at positions 0..T-1, in the
    model's first layer and only if that has attention: there they differ by their turn alone."""
    layer = found.of_layer(0)
    half = len([t for t in layer.theta if t])
    turns = layer.theta[:half]
    for rope in (layer, *(Rope.of(turns, keys.shape[-1], adjacent) for adjacent in (False, True))):
        if turned_back(rope, keys) < _TOLERANCE:
            return found if 0 in found.free else Turning(rope, found.free, found.doubt)
    if turned_back(Rope.still(keys.shape[-1]), keys) < _TOLERANCE:
        return Turning(Rope.still(keys.shape[-1]))
    return Turning(
        Rope.still(keys.shape[-1]), doubt="its keys do not turn as its configuration says"
    )


def turned_back(rope: Rope, keys: torch.Tensor) -> float:
    """Largest distance, in norms, between keys of one token once their turn is taken back."""
    positions = torch.arange(len(keys), device=keys.device)
    back = rope.turn(keys, positions, back=True)
    return float(((back - back[:1]).norm(dim=-1) / back[0].norm(dim=-1).clamp_min(1e-9)).max())


def _partial(text: dict[str, Any], settings: dict[str, Any], head_dim: int) -> float:
    for found in (settings.get("partial_rotary_factor"), text.get("partial_rotary_factor")):
        if found is not None:
            return float(found)
    if text.get("rotary_dim"):
        return text["rotary_dim"] / head_dim
    return float(text.get("rotary_pct") or 1.0)


def _free(text: dict[str, Any], layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Attention layers without RoPE. ``no_rope_layers`` holds 1 where there is one."""
    flags = text.get("no_rope_layers")
    if not isinstance(flags, list) or len(flags) <= max(layer_ids, default=0):
        return ()
    return tuple(i for i, layer in enumerate(layer_ids) if not flags[layer])


def _llama3(plain: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
    """Low frequencies divided by the factor, high ones kept, a ramp between."""
    factor, original = s["factor"], s["original_max_position_embeddings"]
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # in the original context
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (ramp + (1 - ramp) / factor)


def _yarn(
    plain: torch.Tensor, s: dict[str, Any], text: dict[str, Any], theta: float
) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): as llama3 with a ramp over the pair's index."""
    original = s.get("original_max_position_embeddings") or text["max_position_embeddings"]
    factor = s.get("factor") or text["max_position_embeddings"] / original
    dim = 2 * len(plain)

    def index(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(s.get("beta_fast") or 32), index(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(len(plain)) - low) / max(high - low, 1e-3)).clamp(0, 1).double()
    return plain * (1 - ramp) + plain / factor * ramp
