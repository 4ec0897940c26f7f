"""The served codecs in plain PyTorch, any device: the specification of every kernel.

A codec turns a rotated K or V row (``row @ R``) into D codes of 2 bits and a few bytes of metadata,
and back. It is described by what it states about

    ranges    how a row's step and lo are chosen (``RangeRule``)
    search    how K's codes are: ``round`` each channel by itself, ``feedback`` (errors spread over
              the channels still to come), ``accurate`` (``codec_accurate``); V's are rounded
    meta      what is stored beside the codes: ``affine`` step and lo in FP16, ``compact`` a byte
              each (``codec_compact``), ``scale`` one FP16 and fixed levels (``codec_lloyd``),
              ``channel`` a norm per token and step and lo per channel of a block (``codec_omni``)

and nothing else: tensors of the artifact, bytes of a slot, the CPU server, the evaluator and the
kernels follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from . import codec_accurate, codec_compact, codec_lloyd, codec_omni
from .codec_affine import (
    LEVELS,
    RangeRule,
    Rows,
    decode,
    feedback_codes,
    pack,
    rotate,
    round_codes,
    to_half,
    unpack,
    value_range,
)
from .layout import HistoryLayout

__all__ = [
    "CODECS", "LEVELS", "CodecSpec", "LayerParams", "RangeRule", "Rows", "decode",
    "decode_k", "decode_v", "encode_k", "encode_v", "feedback_codes", "pack", "rotate",
    "round_codes", "spec_of", "unpack", "value_range",
]  # fmt: skip

# Metadata of a K row, of a V row (numbers), and the bytes of one number.
_META_LAYOUT = {
    "affine": (2, 2, 2), "compact": (2, 2, 1), "scale": (1, 1, 2), "channel": (1, 2, 2),
}  # fmt: skip


@dataclass(frozen=True)
class CodecSpec:
    """A served codec (see the module docstring); which basis it rotates into is calibration's."""

    name: str
    summary: str
    k_range: RangeRule
    v_range: RangeRule
    search: str = "round"
    meta: str = "affine"
    block: int = 1  # tokens that are encoded together
    token_norm: bool = True  # of meta ``channel``: off only for the paper's ablation
    needs_data: bool = True  # whether calibration has anything to measure

    @property
    def k_feedback(self) -> bool:
        """Whether K's codes need the feedback factor."""
        return self.search != "round"

    def ring_tokens(self, recent: int) -> int:
        """Rows of a ring that leaves the last ``recent`` tokens exact: history ends at a block, so
        up to block - 1 tokens more are not in it."""
        return recent + self.block - 1

    def layout(self, kv_heads: int, head_dim: int) -> HistoryLayout:
        return HistoryLayout(kv_heads, head_dim, *_META_LAYOUT[self.meta], self.block)

    def tensors(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shape per KV head of each float32 tensor a layer keeps, by field of ``LayerParams``."""
        square = (head_dim, head_dim)
        shapes = {"r_k": square, "r_v": square}
        if self.k_feedback:
            shapes["factor"] = square
        if self.search == "accurate":
            shapes["metric"] = square
        if self.meta == "compact":
            shapes["grid"] = codec_compact.GRID_SHAPE
        return shapes


_SHRINK = RangeRule("shrink", 0.80), RangeRule("shrink", 0.75)
_RMS = RangeRule("rms", 1.0), RangeRule("rms", 1.0)
CODECS = {
    c.name: c
    for c in (
        CodecSpec(
            "feedback",
            "best of several bases per head, K codes chosen by error feedback in the query metric",
            *_SHRINK,
            search="feedback",
        ),
        CodecSpec(
            "accurate", "feedback with more search per written key", *_SHRINK, search="accurate"
        ),
        CodecSpec(
            "compact",
            "feedback with 8-bit step and zero",
            *_SHRINK,
            search="feedback",
            meta="compact",
        ),
        CodecSpec(
            "accurate-compact",
            "feedback with more search per written key, 8-bit step and zero",
            *_SHRINK,
            search="accurate",
            meta="compact",
        ),
        CodecSpec(
            "aligned",
            "K mean aligned with the all-ones direction, plain rounding",
            RangeRule("shrink", 0.75),
            RangeRule("shrink", 0.75),
        ),
        CodecSpec(
            "oscar",
            "OSCAR as published: attention-aware rotations, quantile clipping",
            RangeRule("rank", 0.96),
            RangeRule("rank", 0.92),
        ),
        CodecSpec("lloyd", "OSCAR's rotations, Lloyd-Max codebook, no zero", *_RMS, meta="scale"),
        CodecSpec(
            "omni",
            "OScaR: keys per channel over 128 tokens after a token norm",
            codec_omni.V_RANGE,
            codec_omni.V_RANGE,
            meta="channel",
            block=codec_omni.BLOCK,
            needs_data=False,
        ),
    )
}


def spec_of(name: str, options: Mapping[str, Any]) -> CodecSpec:
    """The codec ``name`` as an artifact with these ``options`` runs it."""
    spec = CODECS[name]
    if spec.meta == "channel":
        spec = replace(spec, token_norm=codec_omni.chosen(options)["norm"] == "head")
    return spec


class LayerParams(NamedTuple):
    """Device tensors of one layer's codec; None where ``CodecSpec.tensors`` does not name it.

    r_k, r_v  [Hk, D, D] float32  orthogonal, applied on the right of row vectors
    factor    [Hk, D, D] float32  strictly upper triangular, row j = U[j, j+1:] / U[j, j] for
                                  G^-1 = U^T U
    metric    [Hk, D, D] float32  G, the query metric in the rotated basis, symmetric
    grid      [Hk, 2, 3] float32  metadata grid of K and of V (``codec_compact``)
    """

    r_k: torch.Tensor
    r_v: torch.Tensor
    factor: torch.Tensor | None = None
    metric: torch.Tensor | None = None
    grid: torch.Tensor | None = None

    def to(self, device) -> LayerParams:
        return LayerParams(*(None if t is None else t.to(device) for t in self))


def encode_k(spec: CodecSpec, params: LayerParams, k_rot: torch.Tensor) -> Rows:
    """Encode rotated keys [T, Hk, D] float32. Raises ValueError for a block codec, whose keys are
    encoded together (``reference.seal``)."""
    if spec.block > 1:
        raise ValueError(f"keys of {spec.name} are encoded in blocks, not one by one")
    if spec.meta == "scale":
        return codec_lloyd.encode(k_rot)
    grid = _grid(params, 0)
    if spec.search == "accurate":

        def storable(meta: torch.Tensor) -> torch.Tensor:
            return _storable(meta, grid)

        codes, meta = codec_accurate.encode(k_rot, params.factor, params.metric, storable)
    else:
        meta = _storable(value_range(k_rot, spec.k_range), grid)
        if spec.search == "feedback":
            codes = feedback_codes(k_rot, meta, params.factor)
        else:
            codes = round_codes(k_rot, meta)
    return Rows(pack(codes), _stored(meta, grid))


def encode_v(spec: CodecSpec, params: LayerParams, v_rot: torch.Tensor) -> Rows:
    """Encode rotated values [T, Hk, D] float32."""
    if spec.meta == "scale":
        return codec_lloyd.encode(v_rot)
    grid = _grid(params, 1)
    meta = _storable(value_range(v_rot, spec.v_range), grid)
    return Rows(pack(round_codes(v_rot, meta)), _stored(meta, grid))


def decode_k(spec: CodecSpec, params: LayerParams, rows: Rows) -> torch.Tensor:
    """Keys [T, Hk, D] float32, still rotated."""
    return _decode(spec, params, rows, 0)


def decode_v(spec: CodecSpec, params: LayerParams, rows: Rows) -> torch.Tensor:
    """Values [T, Hk, D] float32, still rotated."""
    return _decode(spec, params, rows, 1)


def _decode(spec: CodecSpec, params: LayerParams, rows: Rows, side: int) -> torch.Tensor:
    if spec.meta == "scale":
        return codec_lloyd.decode(rows)
    meta = rows.meta
    if spec.meta == "compact":
        meta = codec_compact.decode_meta(meta, _grid(params, side))
    return decode(unpack(rows.packed), meta)


def _grid(params: LayerParams, side: int) -> torch.Tensor | None:
    """[Hk, 3] of K (side 0) or V (1); None without compact metadata."""
    return None if params.grid is None else params.grid[:, side]


def _storable(meta: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
    """(step, lo) [T, Hk, 2] rounded to what can be stored, float32."""
    if grid is None:
        return to_half(meta).float()
    return codec_compact.decode_meta(codec_compact.encode_meta(meta, grid), grid)


def _stored(meta: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
    """Storable (step, lo) as the bytes a slot holds."""
    return meta.half() if grid is None else codec_compact.encode_meta(meta, grid)
