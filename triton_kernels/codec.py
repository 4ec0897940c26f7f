"""The served codecs in plain PyTorch, any device: the specification of every kernel.

A codec turns a rotated K or V row (``row @ R``) into D codes of 2 bits and a few bytes of metadata,
and back. It is described by what it states about

    ranges    how a row's step and lo are chosen (``RangeRule``)
    search    how K's codes are: ``round`` each channel by itself, ``feedback`` (errors spread over
              the channels still to come), ``unbiased`` (and then a gain, ``codec_position``),
              ``accurate`` (``codec_accurate``); V's are rounded
    meta      what is stored beside the codes: ``affine`` step and lo in FP16, ``compact`` a byte
              each (``codec_compact``), ``position`` the same with K's share of its mean in the
              place of lo (``codec_position``), ``scale`` one FP16 and fixed levels
              (``codec_lloyd``), ``channel`` a norm per token and step and lo per channel of a
              block (``codec_omni``)

and of a layer the bits of its K and V and its RoPE, and nothing else: tensors of the artifact,
bytes of a slot, the CPU server, the evaluator and the kernels follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from . import codec_accurate, codec_compact, codec_lloyd, codec_omni, codec_position
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
from .codec_position import Rope
from .layout import BITS, HistoryLayout

__all__ = [
    "CODECS", "LEVELS", "CodecSpec", "LayerCodec", "LayerParams", "RangeRule", "Rope", "Rows",
    "decode", "decode_k", "decode_v", "encode_k", "encode_v", "feedback_codes", "layer_specs",
    "pack", "rotate", "round_codes", "spec_of", "unpack", "value_range",
    "with_bits",
]  # fmt: skip

# Metadata of a K row, of a V row (numbers), and the bytes of one number.
_META_LAYOUT = {
    "affine": (2, 2, 2), "compact": (2, 2, 1), "position": (2, 2, 1), "scale": (1, 1, 2),
    "channel": (1, 2, 2),
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
    k_bits: int = BITS  # of a layer
    v_bits: int = BITS
    rope: Rope | None = None  # of a layer; only where metadata are ``position``

    @property
    def has_grid(self) -> bool:
        """Whether metadata are bytes."""
        return self.meta in ("compact", "position")

    @property
    def per_octave(self) -> int:
        """Steps of a byte that stands for a step, where metadata are bytes."""
        return codec_position.PER_OCTAVE if self.meta == "position" else codec_compact.PER_OCTAVE

    @property
    def k_feedback(self) -> bool:
        """Whether K's codes need the feedback factor."""
        return self.search != "round"

    def ring_tokens(self, recent: int) -> int:
        """Rows of a ring that leaves the last ``recent`` tokens exact: history ends at a block, so
        up to block - 1 tokens more are not in it."""
        return recent + self.block - 1

    def layout(self, kv_heads: int, head_dim: int) -> HistoryLayout:
        meta = _META_LAYOUT[self.meta]
        return HistoryLayout(kv_heads, head_dim, *meta, self.block, self.k_bits, self.v_bits)

    def tensors(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shape per KV head of each float32 tensor a layer keeps, by field of ``LayerParams``."""
        square = (head_dim, head_dim)
        shapes = {"r_k": square, "r_v": square}
        if self.k_feedback:
            shapes["factor"] = square
        if self.search in ("accurate", "unbiased"):
            shapes["metric"] = square
        if self.has_grid:
            shapes["grid"] = codec_compact.GRID_SHAPE
        if self.meta == "position":
            shapes |= {"q_k": square, "mean": (head_dim,)}
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
            "position",
            "K's mean subtracted where the token stands, bits where they matter",
            RangeRule("rms", codec_position.SPREADS[BITS]),
            RangeRule("shrink", codec_position.V_RATIOS[BITS]),
            search="unbiased",
            meta="position",
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


def layer_specs(spec: CodecSpec, layers: int, options: Mapping[str, Any]) -> list[CodecSpec]:
    """``spec`` as each of ``layers`` has it, from an artifact's options:

    rope       {"theta": D/2 numbers, "pairs": D channels}  of ``codec_position.Rope``
    rope_free  ids of layers that have none
    bits       for each layer (K's, V's)

    Raises ValueError for what is not such.
    """
    if spec.meta != "position":
        return [spec] * layers
    rope = Rope(**{n: tuple(options["rope"][n]) for n in ("theta", "pairs")})
    free, still = options.get("rope_free", ()), Rope.still(len(rope.pairs))
    bits = options.get("bits") or [(spec.k_bits, spec.v_bits)] * layers
    if len(bits) != layers:
        raise ValueError(f"bits of {len(bits)} layers, expected {layers}")
    return [
        with_bits(replace(spec, rope=still if i in free else rope), k, v)
        for i, (k, v) in enumerate(bits)
    ]


def with_bits(spec: CodecSpec, k_bits: int, v_bits: int) -> CodecSpec:
    """``position`` with other widths. Raises ValueError for widths without a rule."""
    if not {k_bits, v_bits} <= set(codec_position.V_RATIOS):
        raise ValueError(f"K and V have 2 or 4 bits, got {k_bits} and {v_bits}")
    ranges = RangeRule("shrink", codec_position.V_RATIOS[v_bits])
    return replace(spec, k_bits=k_bits, v_bits=v_bits, v_range=ranges)


class LayerParams(NamedTuple):
    """Device tensors of one layer's codec; None where ``CodecSpec.tensors`` does not name it.

    r_k, r_v  [Hk, D, D] float32  applied on the right of row vectors; orthogonal, but for r_k of
                                  ``position``
    factor    [Hk, D, D] float32  strictly upper triangular, row j = U[j, j+1:] / U[j, j] for
                                  G^-1 = U^T U
    metric    [Hk, D, D] float32  G, the query metric in the rotated basis, symmetric
    grid      [Hk, 2, 3] float32  metadata grid of K and of V (``codec_compact``)
    q_k       [Hk, D, D] float32  r_k^-T, applied to queries; where it is None they take r_k
    mean      [Hk, D]    float32  ``codec_position.tile_mean``
    """

    r_k: torch.Tensor
    r_v: torch.Tensor
    factor: torch.Tensor | None = None
    metric: torch.Tensor | None = None
    grid: torch.Tensor | None = None
    q_k: torch.Tensor | None = None
    mean: torch.Tensor | None = None

    @property
    def queries(self) -> torch.Tensor:
        """[Hk, D, D] that turns queries into the basis of rotated keys."""
        return self.r_k if self.q_k is None else self.q_k

    @property
    def k_back(self) -> torch.Tensor:
        """[Hk, D, D] that turns rotated keys back into the model's basis."""
        return self.queries.transpose(-1, -2)

    def to(self, device) -> LayerParams:
        return LayerParams(*(None if t is None else t.to(device) for t in self))


class LayerCodec(NamedTuple):
    """One layer's codec: what it does and with which tensors."""

    spec: CodecSpec
    params: LayerParams


def encode_k(
    spec: CodecSpec,
    params: LayerParams,
    k_rot: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> Rows:
    """Encode rotated keys [T, Hk, D] float32 of tokens at ``positions`` [T] int64 of their
    requests; only ``position`` asks for those. Raises ValueError for a block codec, whose keys are
    encoded together (``reference.seal``)."""
    if spec.block > 1:
        raise ValueError(f"keys of {spec.name} are encoded in blocks, not one by one")
    if spec.meta == "scale":
        return codec_lloyd.encode(k_rot)
    if spec.meta == "position":
        at = _needed(positions)
        codes, meta = codec_position.encode_k(k_rot, at, spec.rope, params, spec.k_bits)
        return Rows(pack(codes, spec.k_bits), meta)
    grid = _grid(params, 0)
    if spec.search == "accurate":

        def storable(meta: torch.Tensor) -> torch.Tensor:
            return _storable(spec, meta, grid)

        codes, meta = codec_accurate.encode(k_rot, params.factor, params.metric, storable)
    else:
        meta = _storable(spec, value_range(k_rot, spec.k_range), grid)
        if spec.search == "feedback":
            codes = feedback_codes(k_rot, meta, params.factor)
        else:
            codes = round_codes(k_rot, meta)
    return Rows(pack(codes), _stored(spec, meta, grid))


def encode_v(spec: CodecSpec, params: LayerParams, v_rot: torch.Tensor) -> Rows:
    """Encode rotated values [T, Hk, D] float32."""
    if spec.meta == "scale":
        return codec_lloyd.encode(v_rot)
    grid, levels = _grid(params, 1), 2**spec.v_bits - 1
    meta = _storable(spec, value_range(v_rot, spec.v_range, levels), grid)
    codes = round_codes(v_rot, meta, levels)
    return Rows(pack(codes, spec.v_bits), _stored(spec, meta, grid))


def decode_k(
    spec: CodecSpec, params: LayerParams, rows: Rows, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Keys [T, Hk, D] float32 of tokens at ``positions`` [T] int64, still rotated."""
    if spec.meta == "position":
        codes = unpack(rows.packed, spec.k_bits)
        at = _needed(positions)
        return codec_position.decode_k(codes, rows.meta, at, spec.rope, params, spec.k_bits)
    return _decode(spec, params, rows, 0)


def decode_v(spec: CodecSpec, params: LayerParams, rows: Rows) -> torch.Tensor:
    """Values [T, Hk, D] float32, still rotated."""
    return _decode(spec, params, rows, 1)


def _needed(positions: torch.Tensor | None) -> torch.Tensor:
    if positions is None:
        raise ValueError("keys of position cannot be coded without their positions")
    return positions


def _decode(spec: CodecSpec, params: LayerParams, rows: Rows, side: int) -> torch.Tensor:
    if spec.meta == "scale":
        return codec_lloyd.decode(rows)
    meta = rows.meta
    if spec.has_grid:
        meta = codec_compact.decode_meta(meta, _grid(params, side), spec.per_octave)
    return decode(unpack(rows.packed, (spec.k_bits, spec.v_bits)[side]), meta)


def _grid(params: LayerParams, side: int) -> torch.Tensor | None:
    """[Hk, 3] of K (side 0) or V (1); None without metadata bytes."""
    return None if params.grid is None else params.grid[:, side]


def _storable(spec: CodecSpec, meta: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
    """(step, lo) [T, Hk, 2] rounded to what can be stored, float32."""
    if grid is None:
        return to_half(meta).float()
    return codec_compact.decode_meta(_stored(spec, meta, grid), grid, spec.per_octave)


def _stored(spec: CodecSpec, meta: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
    """Storable (step, lo) as the bytes a slot holds."""
    return meta.half() if grid is None else codec_compact.encode_meta(meta, grid, spec.per_octave)
