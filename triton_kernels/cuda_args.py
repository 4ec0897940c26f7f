"""What the launchers of the CUDA kernels share: shapes as macros, argument blocks of rows.cu."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .codec_accurate import Accurate
from .tile import FORMS
from .views import LayerView

HEAD_DIMS = (64, 128)


def shape_defines(view: LayerView, heads: int) -> tuple[tuple[str, int], ...]:
    return (
        ("HEAD_DIM", view.head_dim),
        ("KV_HEADS", view.kv_heads),
        ("GROUP", heads // view.kv_heads),
        ("WINDOW_BF16", int(view.sink_k.dtype == torch.bfloat16)),
        ("META_FORM", view.spec.meta.form),
        *((name.upper(), form) for name, form in FORMS.items()),
        ("K_BITS", view.spec.k_bits),
        ("V_BITS", view.spec.v_bits),
    )


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class CodeArgs(ctypes.Structure):
    """``CodeArgs`` of rows.cu."""

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
            view.blocks.data_ptr(), factor.data_ptr(),
            spec.k_range.rank(dim), spec.v_range.rank(dim),
            spec.k_range.half_ratio, spec.v_range.half_ratio, view.grid.data_ptr(),
            pointer(view.params.metric),
        )  # fmt: skip


def code_defines(view: LayerView) -> tuple[tuple[str, int], ...]:
    spec = view.spec
    return (
        ("K_RANK", int(spec.k_range.kind == "rank")),
        ("V_RANK", int(spec.v_range.kind == "rank")),
        ("FEEDBACK", int(spec.k_feedback)),
        ("ACCURATE", int(isinstance(spec.search, Accurate))),
    )


class MeanArgs(ctypes.Structure):
    """``MeanArgs`` of rows.cu; empty but for codec ``position``."""

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
        tensors = (positions, m.turns, m.lift, m.mix, m.partner, m.units, m.metric)
        stride = 0 if k is None else k.stride(0)
        return cls(pointer(shares), pointer(k), stride, *(pointer(x) for x in tensors))


class Fresh(NamedTuple):
    """Rotated rows whose codes are still to be written.

    kv_rot  [2, T, Hk, D] float32, K then V; codec ``position``: [3, ...], then its rows of lift
    slots   [T] int64
    shares  [T, Hk] float32  of the mean, of codec ``position``
    """

    kv_rot: torch.Tensor
    slots: torch.Tensor
    shares: torch.Tensor | None
