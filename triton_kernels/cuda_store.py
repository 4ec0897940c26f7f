"""store in CUDA C++ (store.cu): the fast path of ``store.store`` for head_dim 64 and 128."""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from . import nvrtc
from .codec import CodecSpec
from .cuda_args import (
    HEAD_DIMS,
    ROW_FILES,
    ROWS,
    CodeArgs,
    Coding,
    Defines,
    Fresh,
    MeanArgs,
    Shape,
    half_stride,
    pointer,
)
from .driver import Kernel, Source, module, overlaps
from .views import LayerView, TokenBatch

_WINDOWS = ("sink_k", "sink_v", "ring_k", "ring_v", "cache_k", "cache_v")


class WindowArgs(ctypes.Structure):
    """``WindowArgs`` of rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*TokenBatch._fields, *_WINDOWS)),
        *((name, ctypes.c_int) for name in ("n_sink", "n_recent")),
    ]


class StoreArgs(ctypes.Structure):
    """``StoreArgs`` of store.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_rot", "kv_rot", "r_k", "r_v")),
        ("to", WindowArgs),
        ("codes", CodeArgs),
        *((name, ctypes.c_int64) for name in ("stride_q", "stride_k", "stride_v")),
        *((name, ctypes.c_int) for name in ("tokens", "q_half")),
        ("r_q", ctypes.c_void_p),
        ("mean", MeanArgs),
    ]


SOURCE = Source((*ROW_FILES, "store.cu"), (CodeArgs, MeanArgs, WindowArgs, StoreArgs))


def has_codec(spec: CodecSpec) -> bool:
    """Whether store.cu writes it: all codecs but those whose keys are encoded together."""
    return spec.block == 1


def supported(view: LayerView, tokens: TokenBatch, q, k, v, q_rot) -> bool:
    """Whether codec and tensors can take the CUDA path: 16-bit model, int64 metadata, aligned
    rows."""
    return (
        q.is_cuda
        and has_codec(view.spec)
        and view.head_dim in HEAD_DIMS
        and (q_rot is None or q_rot.dtype == torch.float32 or _narrow(view, q, q_rot))
        and view.sink_k.dtype in (torch.bfloat16, torch.float16)
        and all(x.dtype == view.sink_k.dtype for x in (q, k, v))
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 for x in (q, k, v))
        and all(x.dtype == torch.int64 and x.is_contiguous() for x in tokens)
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and nvrtc.available()
    )


def _narrow(view: LayerView, q: torch.Tensor, q_rot: torch.Tensor) -> bool:
    """Whether rotated queries are asked for in the model's dtype, and can be."""
    return view.means is None and q_rot.dtype == q.dtype


def _y_stride(head_dim: int) -> int:
    """Floats from row to row of a tile in shared memory."""
    return head_dim + 4


def _warps(head_dim: int) -> int:
    """Of ``store``: one for 8 columns of the rotation, and one for a row of codes."""
    return max(head_dim // 8, ROWS)


def defines_of(shape: Shape, coding: Coding) -> Defines:
    dim = shape.layout.head_dim
    mine = ("Y_STRIDE", _y_stride(dim)), ("WARPS", _warps(dim))
    return shape.defines() + coding.defines(dim) + mine


@functools.cache
def _kernel(
    name: str, shape: Shape, coding: Coding, threads: int, shared: int, device: int
) -> Kernel:
    code = module(SOURCE, defines_of(shape, coding), device)
    return Kernel(code, name, threads, shared, overlaps(device))


def _launch(
    name, grid, threads, shared, view, tokens, q, k, v, q_rot, kv_rot=None, shares=None
) -> None:  # fmt: skip
    windows = view.windows
    to = WindowArgs(
        n_sink=windows.n_sink,
        n_recent=windows.n_recent,
        **{name: pointer(tensor) for name, tensor in tokens._asdict().items()},
        **{name: pointer(getattr(view, name)) for name in _WINDOWS},
    )
    args = StoreArgs(
        q=pointer(q),
        k=pointer(k),
        v=pointer(v),
        q_rot=pointer(q_rot),
        kv_rot=pointer(kv_rot),
        r_k=pointer(view.params.r_k),
        r_v=pointer(view.params.r_v),
        to=to,
        codes=CodeArgs.of(view),
        stride_q=q.stride(0),
        stride_k=k.stride(0),
        stride_v=v.stride(0),
        tokens=len(q),
        q_half=q_rot is not None and q_rot.dtype != torch.float32,
        r_q=pointer(view.q_matrix),
        mean=MeanArgs.of(view, shares, k, tokens.positions),
    )
    shape, coding = Shape.of(view, q.shape[1]), Coding.of(view.spec)
    kernel = _kernel(name, shape, coding, threads, shared, q.device.index)
    kernel(grid, args, torch.cuda.current_stream(q.device).cuda_stream)


def _tiles(view: LayerView, q: torch.Tensor, ctas: int) -> int:
    """Extent of a grid that holds a CTA per 16 rows, but few CTAs per processor."""
    tiles = math.ceil(len(q) * (q.shape[1] // view.kv_heads) / ROWS)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    return min(tiles, math.ceil(8 * sms / ctas))


def store(view: LayerView, tokens: TokenBatch, q, k, v, q_rot) -> None:
    """``store.store``."""
    dim = view.head_dim
    tile = 4 * ROWS * _y_stride(dim)
    shared = tile + (4 * dim * dim if view.spec.k_feedback else 0)
    if view.means is not None:  # rows of lift, FP16 rows for the metric
        shared += tile + 2 * ROWS * half_stride(dim)
    grid = (_tiles(view, q, 3 * view.kv_heads), view.kv_heads, 3)
    _launch("store", grid, 32 * _warps(dim), shared, view, tokens, q, k, v, q_rot)


def rotate(view: LayerView, tokens: TokenBatch, q, k, v, q_rot) -> Fresh:
    """``store`` without the codes, which ``cuda_attend.merge`` writes from what this returns."""
    lifted = view.means is not None
    kv_rot = torch.empty((2 + lifted, *k.shape), dtype=torch.float32, device=q.device)
    parts = (3 + lifted) * (view.head_dim // 32)
    grid = (_tiles(view, q, parts * view.kv_heads), view.kv_heads, parts)
    shares = kv_rot.new_empty(k.shape[:2]) if lifted else None
    _launch("rotate", grid, 128, 0, view, tokens, q, k, v, q_rot, kv_rot, shares)
    return Fresh(kv_rot, tokens.slots, shares)
