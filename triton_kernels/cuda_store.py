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
    CodeArgs,
    Fresh,
    MeanArgs,
    code_defines,
    pointer,
    shape_defines,
)
from .driver import Kernel, module, overlaps
from .views import LayerView, TokenBatch

STORE_FILES = ("common.cu", "rows.cu", "store.cu")
_ROWS = 16  # of a tile
_WINDOWS = ("sink_k", "sink_v", "ring_k", "ring_v", "cache_k", "cache_v")


class _WindowArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*TokenBatch._fields, *_WINDOWS)),
        *((name, ctypes.c_int) for name in ("n_sink", "n_recent")),
    ]


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_rot", "kv_rot", "r_k", "r_v")),
        ("to", _WindowArgs),
        ("codes", CodeArgs),
        *((name, ctypes.c_int64) for name in ("stride_q", "stride_k", "stride_v")),
        *((name, ctypes.c_int) for name in ("tokens", "q_half")),
        ("r_q", ctypes.c_void_p),
        ("mean", MeanArgs),
    ]


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


@functools.cache
def _kernel(name: str, defines: tuple, threads: int, shared: int, device: int) -> Kernel:
    code = module(STORE_FILES, defines, device)
    return Kernel(code, name, threads, shared, overlaps(device))


def _launch(
    name, grid, threads, shared, view, tokens, q, k, v, q_rot, kv_rot=None, shares=None
) -> None:  # fmt: skip
    windows = view.windows
    where = (pointer(x) for x in (*tokens, *(getattr(view, name) for name in _WINDOWS)))
    args = _Args(
        *(pointer(x) for x in (q, k, v, q_rot, kv_rot, view.params.r_k, view.params.r_v)),
        _WindowArgs(*where, windows.n_sink, windows.n_recent),
        CodeArgs.of(view),
        q.stride(0), k.stride(0), v.stride(0),
        len(q), int(q_rot is not None and q_rot.dtype != torch.float32),
        view.q_matrix.data_ptr(), MeanArgs.of(view, shares, k, tokens.positions),
    )  # fmt: skip
    defines = shape_defines(view, q.shape[1]) + code_defines(view)
    kernel = _kernel(name, defines, threads, shared, q.device.index)
    kernel(grid, args, torch.cuda.current_stream(q.device).cuda_stream)


def _tiles(view: LayerView, q: torch.Tensor, ctas: int) -> int:
    """Extent of a grid that holds a CTA per 16 rows, but few CTAs per processor."""
    tiles = math.ceil(len(q) * (q.shape[1] // view.kv_heads) / _ROWS)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    return min(tiles, math.ceil(8 * sms / ctas))


def store(view: LayerView, tokens: TokenBatch, q, k, v, q_rot) -> None:
    """``store.store``."""
    dim = view.head_dim
    shared = 4 * (_ROWS * (dim + 4) + (dim * dim if view.spec.k_feedback else 0))
    if view.means is not None:  # rows of lift, FP16 rows for the metric
        shared += _ROWS * (4 * (dim + 4) + 2 * (dim + 32))
    grid = (_tiles(view, q, 3 * view.kv_heads), view.kv_heads, 3)
    threads = 32 * max(dim // 8, _ROWS)
    _launch("store", grid, threads, shared, view, tokens, q, k, v, q_rot)


def rotate(view: LayerView, tokens: TokenBatch, q, k, v, q_rot) -> Fresh:
    """``store`` without the codes, which ``cuda_attend.merge`` writes from what this returns."""
    lifted = view.means is not None
    kv_rot = torch.empty((2 + lifted, *k.shape), dtype=torch.float32, device=q.device)
    parts = (3 + lifted) * (view.head_dim // 32)
    grid = (_tiles(view, q, parts * view.kv_heads), view.kv_heads, parts)
    shares = kv_rot.new_empty(k.shape[:2]) if lifted else None
    _launch("rotate", grid, 128, 0, view, tokens, q, k, v, q_rot, kv_rot, shares)
    return Fresh(kv_rot, tokens.slots, shares)
