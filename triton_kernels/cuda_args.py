"""What the launchers of the CUDA kernels share: shapes as macros, argument blocks of rows.cu."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .views import LayerView

HEAD_DIMS = (64, 128)


def shape_defines(view: LayerView, heads: int) -> tuple[tuple[str, int], ...]:
    return (
        ("HEAD_DIM", view.head_dim),
        ("KV_HEADS", view.kv_heads),
        ("GROUP", heads // view.kv_heads),
        ("WINDOW_BF16", int(view.sink_k.dtype == torch.bfloat16)),
        ("META_FORM", view.form),
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
        ("ACCURATE", int(spec.search == "accurate")),
    )


class Fresh(NamedTuple):
    """Rotated rows whose codes are still to be written.

    kv_rot  [2, T, Hk, D] float32, K then V
    slots   [T] int64
    """

    kv_rot: torch.Tensor
    slots: torch.Tensor
