"""Run a transformers model with an attention function of ours, without touching its code.

Every causal LM with standard heads calls one function ``(module, q, k, v, ...)`` after QK-norm and
RoPE, chosen by name from ``transformers.AttentionInterface``: that is the seam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..artifact.fingerprint import attention_layers
from ..kernels.padding import padded
from .errors import CalibrationError

# Heads as they are stored, padded where the model's have no layout of their own:
# (layer, q [B, H, T, D], k [B, Hk, S, D], v [B, Hk, S, D], scale) -> o [B, H, T, D];
# layers are counted without those that do not attend.
AttentionFunction = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

_NAME = "oscar_sglang"
_active: list[tuple[AttentionFunction, dict[int, int]]] = []


@contextmanager
def replaced_attention(model: PreTrainedModel, function: AttentionFunction) -> Iterator[None]:
    """Within the block ``model`` attends through ``function``. Not for two models at once."""
    previous = model.config._attn_implementation
    AttentionInterface.register(_NAME, _dispatch)
    AttentionMaskInterface.register(_NAME, _padding)
    ids = attention_layers_of(model)
    _active.append((function, {layer: index for index, layer in enumerate(ids)}))
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        _active.pop()
        model.set_attn_implementation(previous)


def attention_layers_of(model: PreTrainedModel) -> list[int]:
    """Ids of the layers that have K and V: a hybrid model has others too."""
    config = model.config.get_text_config()
    return attention_layers(config.to_dict(), config.num_hidden_layers)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Exact causal attention of one whole sequence: [B, H, T, D] of q's dtype and device."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def _padding(*args, attention_mask=None, **kwargs):
    """The padding mask if it hides anything; our functions are causal by themselves."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


def _dispatch(module, query, key, value, attention_mask, scaling=None, **kwargs):
    if not hasattr(module, "layer_idx"):  # of the part that reads pictures: no KV cache
        exact = AttentionInterface()["sdpa"]
        return exact(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # A window that SGLang leaves out; other models with one are refused (``check_supported``).
    for name in ("softcap", "s_aux", "head_mask"):
        if kwargs.get(name) is not None:
            raise CalibrationError(f"attention with {name} is not supported")
    if attention_mask is not None:
        raise CalibrationError("padded or masked batches are not supported: run one sequence")
    if query.shape[-1] != value.shape[-1]:
        raise CalibrationError(
            f"K heads of {query.shape[-1]} and V heads of {value.shape[-1]} channels (MLA?) are "
            "not supported"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    function, index = _active[-1]
    d = query.shape[-1]
    q, k, v = (padded(x) for x in (query, key, value))
    out = function(index[module.layer_idx], q, k, v, scale)[..., :d]
    return out.transpose(1, 2).contiguous(), None
