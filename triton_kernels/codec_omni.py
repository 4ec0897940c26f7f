"""Codec ``omni``: OScaR (arXiv 2605.19660), keys per channel over a block of tokens.

    K   y = k @ H; norm = |y| / sqrt(D) per token and head, FP16; u = y / norm
        over the BLOCK tokens of a block, per channel: step = (max - min) / 3, lo = min, FP16
        codes = clip(rint((u - lo) / step), 0, 3);  decoded = (codes * step + lo) * norm
    V   y = v @ H; per token: step = (max - min) / 3, lo = min, FP16; nearest codes

The published code takes the norm over all heads of a token; here it is per KV head, because a norm
over heads needs an all-reduce under tensor parallelism. A key's codes exist once its block is full.
Sink tokens, which are kept exactly, do not widen the ranges of their block.

``OPTIONS`` take the method apart, as the paper's ablation does: without the norm (all norms 1), or
without the rotation (the identity in place of H), or both (keys per channel alone, as KIVI).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .codec_affine import LEVELS, RangeRule, Rows, pack, round_codes, unpack, value_range
from .codec_parts import Affine

BLOCK = 128
# Option of an artifact -> its values, the default first.
OPTIONS = {"norm": ("head", "none"), "rotation": ("hadamard", "none")}
V_RANGE = RangeRule("shrink", 1.0)
_FP16_MAX = 65504.0


class KeyBlock(NamedTuple):
    """One sealed block of n tokens (n = BLOCK, fewer where the sink window cuts the first one).

    packed  [n, Hk, D/4] uint8     norm  [n, Hk] float16     meta  [Hk, D, 2] float16 (step, lo)

    Rows of several blocks have a meta each: [n, Hk, D, 2].
    """

    packed: torch.Tensor
    norm: torch.Tensor
    meta: torch.Tensor


def encode_k(y: torch.Tensor, sinks: int = 0, token_norm: bool = True) -> KeyBlock:
    """The rotated keys of one block, [n, Hk, D] float32; the first ``sinks`` are sink tokens."""
    norm = y.square().mean(-1).sqrt().clamp_max(_FP16_MAX).half()
    if not token_norm:
        norm = torch.ones_like(norm)
    unit = torch.where(norm[..., None] > 0, y / norm[..., None].float(), 0.0)
    ranged = unit[sinks:] if sinks < len(unit) else unit
    low, high = ranged.aminmax(dim=0)
    meta = torch.stack([(high - low) / LEVELS, low], -1).clamp(-_FP16_MAX, _FP16_MAX).half()
    step, lo = meta.float().unbind(-1)
    inverse = torch.where(step > 0, 1 / step, 0.0)
    codes = ((unit - lo) * inverse).round().clamp(0, LEVELS)
    return KeyBlock(pack(codes.to(torch.uint8)), norm, meta)


def decode_k(block: KeyBlock) -> torch.Tensor:
    """float32 [n, Hk, D], still rotated."""
    step, lo = block.meta.float().unbind(-1)
    return (unpack(block.packed).float() * step + lo) * block.norm.float()[..., None]


def encode_v(y: torch.Tensor) -> Rows:
    """Rotated values [..., D] float32."""
    meta = value_range(y, V_RANGE)
    return Rows(pack(round_codes(y, meta)), meta)


@dataclass(frozen=True)
class Channel(Affine):
    """K's share channels over a block, V's are affine; ``token_norm``: of ``OPTIONS``."""

    name = "channel"
    form = 3
    numbers = (1, 2)
    block = BLOCK
    choices = OPTIONS
    token_norm: bool = True

    def configured(self, options):
        return replace(self, token_norm=self.chosen(options)["norm"] == "head")

    def encode_k(self, codec, params, y, positions):
        raise ValueError(f"keys of {codec.name} are encoded in blocks, not one by one")

    def encode_block(self, k, v, sinks):
        key = encode_k(k, sinks, self.token_norm)
        return Rows(key.packed, key.norm[..., None]), encode_v(v), key.meta

    def decode_k(self, codec, params, rows, positions, channels):
        return decode_k(KeyBlock(rows.packed, rows.meta[..., 0], channels))
