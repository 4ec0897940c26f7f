"""What the launchers of the CUDA kernels share: shapes as macros, argument blocks of rows."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from . import plan
from .codec_accurate import Accurate
from .layout import BLOCK, HistoryLayout
from .tile import FORMS
from .views import LayerView

HEAD_DIMS = (64, 128)
ROWS = 16  # that an MMA rotates
ROW_FILES = ("common.cu", "rows.cu", "codes.cu", "position.cu")
Defines = tuple[tuple[str, int], ...]


class Shape(NamedTuple):
    """What every CUDA kernel is compiled for. ``group``: query heads per KV head; ``bf16``: the
    model's dtype, else FP16; ``form``: of ``codec_parts.Metadata``."""

    layout: HistoryLayout
    group: int
    bf16: bool
    form: int

    @classmethod
    def of(cls, view: LayerView, heads: int) -> Shape:
        bf16 = view.sink_k.dtype == torch.bfloat16
        return cls(view.layout, heads // view.kv_heads, bf16, view.spec.meta.form)

    def defines(self) -> Defines:
        h = self.layout
        return (
            ("HEAD_DIM", h.head_dim),
            ("KV_HEADS", h.kv_heads),
            ("GROUP", self.group),
            ("WINDOW_BF16", int(self.bf16)),
            ("META_FORM", self.form),
            *((name.upper(), form) for name, form in FORMS.items()),
            ("K_BITS", h.k_bits),
            ("V_BITS", h.v_bits),
            ("CHUNK", BLOCK * h.k_chunk_bytes),
            ("V_CODES", BLOCK * h.k_row_bytes),
            ("META", h.code_bytes_per_block),
            ("META_BYTES", h.meta_fields * h.meta_bytes),
            ("HB", h.block_bytes),
            ("PAGE", h.block),
            ("CHANNELS", h.channel_bytes // h.kv_heads),
            ("TILE", plan.TILE_TOKENS.value),
            ("WIN", plan.WINDOW_TOKENS.value),
            ("WIN_COST", plan.WINDOW_COST.value),
            ("HEADER", plan.HEADER.value),
            ("FIELDS", plan.FIELDS.value),
            ("SPLIT", plan.SPLIT.value),
        )


class Coding(NamedTuple):
    """What kernels that encode are compiled for besides."""

    k_rank: bool
    v_rank: bool
    feedback: bool
    accurate: bool

    @classmethod
    def of(cls, spec) -> Coding:
        ranks = (rule.kind == "rank" for rule in (spec.k_range, spec.v_range))
        return cls(*ranks, spec.k_feedback, isinstance(spec.search, Accurate))

    def defines(self, head_dim: int) -> Defines:
        return (
            *((name.upper(), int(value)) for name, value in self._asdict().items()),
            ("ROWS", ROWS),
            ("HALF_STRIDE", half_stride(head_dim)),
        )


def half_stride(head_dim: int) -> int:
    """FP16 numbers from row to row of a tile in shared memory, so that banks do not conflict."""
    return head_dim + 32


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class CodeArgs(ctypes.Structure):
    """``CodeArgs`` of codes.cu."""

    _fields_ = [
        ("blocks", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("k_rank", "v_rank")),
        *((name, ctypes.c_float) for name in ("k_ratio", "v_ratio")),
        *((name, ctypes.c_void_p) for name in ("grid", "metric")),
    ]

    @classmethod
    def of(cls, view: LayerView) -> CodeArgs:
        spec, dim = view.spec, view.head_dim
        factor = view.params.factor if spec.k_feedback else view.params.r_k
        return cls(
            blocks=pointer(view.blocks),
            factor=pointer(factor),
            k_rank=spec.k_range.rank(dim),
            v_rank=spec.v_range.rank(dim),
            k_ratio=spec.k_range.half_ratio,
            v_ratio=spec.v_range.half_ratio,
            grid=pointer(view.grid),
            metric=pointer(view.params.metric),
        )


class MeanArgs(ctypes.Structure):
    """``MeanArgs`` of position.cu; empty but for codec ``position``."""

    _fields_ = [
        ("shares", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("stride_k", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (
            "positions", "turns", "lift", "mix", "partner", "units", "metric",
        )),
    ]  # fmt: skip

    @classmethod
    def of(cls, view: LayerView, shares=None, k=None, positions=None) -> MeanArgs:
        """For fresh keys k [T, Hk, D] of the model at ``positions`` [T] int64, or their ``shares``
        [T, Hk] float32 alone."""
        m = view.means
        if m is None:
            return cls()
        return cls(
            shares=pointer(shares),
            k=pointer(k),
            stride_k=0 if k is None else k.stride(0),
            positions=pointer(positions),
            **{name: pointer(tensor) for name, tensor in m._asdict().items()},
        )


class Fresh(NamedTuple):
    """Rotated rows whose codes are still to be written.

    kv_rot  [2, T, Hk, D] float32, K then V; codec ``position``: [3, ...], then its rows of lift
    slots   [T] int64
    shares  [T, Hk] float32  of the mean, of codec ``position``
    """

    kv_rot: torch.Tensor
    slots: torch.Tensor
    shares: torch.Tensor | None
