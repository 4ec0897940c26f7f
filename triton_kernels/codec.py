"""The served codecs in plain PyTorch, any device: the specification of every kernel.

``CODECS`` is the table of all: each row composes the parts of ``codec_parts`` and of the files
``codec_*.py``, and states

    ranges    how a row's step and lo are chosen (``RangeRule``)
    search    how K's codes are: ``Round``, ``Feedback``, ``Accurate`` (``codec_accurate``),
              ``Unbiased`` (``codec_position``); V's are rounded
    meta      what is stored beside the codes: ``Affine`` step and lo in FP16, ``Compact`` a byte
              each (``codec_compact``), ``Position`` the same with K's share of its mean in the
              place of lo (``codec_position``), ``Scale`` one FP16 and fixed levels
              (``codec_lloyd``), ``Channel`` a norm per token and step and lo per channel of a
              block (``codec_omni``)

To add a codec add a row here, with parts of its own from a file of its own, and the form of its
metadata to the kernels, unless they have it (``tile``, ``meta.cu``, ``codes.cu``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import codec_omni, codec_position
from .codec_accurate import Accurate
from .codec_affine import (
    LEVELS,
    RangeRule,
    Rows,
    decode,
    feedback_codes,
    pack,
    rotate,
    round_codes,
    unpack,
    value_range,
)
from .codec_compact import Compact
from .codec_lloyd import Scale
from .codec_omni import Channel
from .codec_parts import CodecSpec, Feedback, LayerParams, Metadata, Round, Search
from .codec_position import Position, Rope, Unbiased, with_bits, with_rope
from .layout import BITS

__all__ = [
    "CODECS", "LEVELS", "CodecSpec", "LayerCodec", "LayerParams", "Metadata", "RangeRule", "Rope",
    "Round", "Rows", "Search", "decode", "feedback_codes", "layer_specs", "pack", "rotate",
    "round_codes", "spec_of", "unpack", "value_range", "with_bits", "with_rope",
]  # fmt: skip

_SHRINK = RangeRule("shrink", 0.80), RangeRule("shrink", 0.75)
_RMS = RangeRule("rms", 1.0), RangeRule("rms", 1.0)
_FEEDBACK = "here, with error feedback as in GPTQ, arXiv 2210.17323"
CODECS = {
    c.name: c
    for c in (
        CodecSpec(
            "feedback",
            "best of several bases per head, K codes chosen by error feedback in the query metric",
            *_SHRINK,
            search=Feedback(),
            when="default; store and attention in CUDA",
            source=_FEEDBACK,
        ),
        CodecSpec(
            "accurate",
            "feedback with more search per written key",
            *_SHRINK,
            search=Accurate(),
            when="retrieval matters more than the cost of a store",
            source=_FEEDBACK,
        ),
        CodecSpec(
            "compact",
            "feedback with 8-bit step and zero",
            *_SHRINK,
            search=Feedback(),
            meta=Compact(),
            when="6% more tokens than `feedback`",
            source=_FEEDBACK,
        ),
        CodecSpec(
            "accurate-compact",
            "feedback with more search per written key, 8-bit step and zero",
            *_SHRINK,
            search=Accurate(),
            meta=Compact(),
            when="both of the above: the least error at the fewest bits, the slowest store",
            source=_FEEDBACK,
        ),
        CodecSpec(
            "position",
            "K's mean subtracted where the token stands, bits where they matter",
            RangeRule("rms", codec_position.SPREADS[BITS]),
            RangeRule("shrink", codec_position.V_RATIOS[BITS]),
            search=Unbiased(),
            meta=Position(),
            when="contexts are long: its error does not grow with them",
            source=_FEEDBACK,
            fit="before_rope",
        ),
        CodecSpec(
            "aligned",
            "K mean aligned with the all-ones direction, plain rounding",
            RangeRule("shrink", 0.75),
            RangeRule("shrink", 0.75),
            when="the fastest store: no error feedback",
            fit="mean",
        ),
        CodecSpec(
            "oscar",
            "OSCAR as published: attention-aware rotations, quantile clipping",
            RangeRule("rank", 0.96),
            RangeRule("rank", 0.92),
            when="comparing with the paper, or rotations imported from RotationZoo",
            source="OSCAR, arXiv 2605.17757",
            family="published",
            fit="oscar",
        ),
        CodecSpec(
            "lloyd",
            "OSCAR's rotations, Lloyd-Max codebook, no zero",
            *_RMS,
            meta=Scale(),
            when="comparing; few bits without a calibrated grid",
            source="OSCAR's rotations, arXiv 2605.17757; levels: Max, 1960",
            family="published",
            fit="oscar",
        ),
        CodecSpec(
            "omni",
            "OScaR: keys per channel over 128 tokens after a token norm",
            codec_omni.V_RANGE,
            codec_omni.V_RANGE,
            meta=Channel(),
            when="comparing with OScaR; pages of 128 tokens, no calibration",
            source="OScaR, arXiv 2605.19660",
            family="published",
            fit="none",
        ),
    )
}


def spec_of(name: str, options: Mapping[str, Any]) -> CodecSpec:
    """The codec ``name`` as an artifact with these ``options`` runs it."""
    spec = CODECS[name]
    return replace(spec, meta=spec.meta.configured(options))


def layer_specs(spec: CodecSpec, layers: int, options: Mapping[str, Any]) -> list[CodecSpec]:
    """``spec`` as each of ``layers`` has it, from an artifact's options. Raises ValueError for what
    is not such."""
    return spec.meta.layer_specs(spec, layers, options)


class LayerCodec(NamedTuple):
    """One layer's codec: what it does and with which tensors."""

    spec: CodecSpec
    params: LayerParams

    def quantised(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a cache returns for k, v [T, Hk, D] of the model at ``positions`` [T]: float32,
        still rotated by r_k, r_v."""
        spec, p = self
        k_rows = spec.encode_k(p, rotate(k.float(), p.r_k), positions)
        v_rows = spec.encode_v(p, rotate(v.float(), p.r_v))
        return spec.decode_k(p, k_rows, positions), spec.decode_v(p, v_rows)
