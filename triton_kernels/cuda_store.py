"""store in CUDA C++ (store.cu): the fast path of ``store.store`` for head_dim 64 and 128."""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from . import nvrtc
from .cuda_attend import HEAD_DIMS, shape_defines
from .driver import Kernel, module, overlaps
from .views import LayerView, TokenBatch

_ROWS = 16  # of a tile
_POINTERS = (
    "q", "k", "v", "q_rot", "r_k", "r_v", "factor",
    "rows", "positions", "ends", "slots", "cache_index",
    "blocks", "sink_k", "sink_v", "ring_k", "ring_v", "cache_k", "cache_v",
)  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("stride_q", "stride_k", "stride_v")),
        *(
            (n, ctypes.c_int)
            for n in ("tokens", "q_half", "n_sink", "n_recent", "k_rank", "v_rank")
        ),
        *((name, ctypes.c_float) for name in ("k_ratio", "v_ratio")),
    ]


def supported(view: LayerView, tokens: TokenBatch, q, k, v, q_rot) -> bool:
    """Whether these tensors can take the CUDA path: 16-bit model, int64 metadata, aligned rows."""
    return (
        q.is_cuda
        and view.head_dim in HEAD_DIMS
        and (q_rot is None or q_rot.dtype in (torch.float32, q.dtype))
        and view.sink_k.dtype in (torch.bfloat16, torch.float16)
        and all(x.dtype == view.sink_k.dtype for x in (q, k, v))
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 for x in (q, k, v))
        and all(x.dtype == torch.int64 and x.is_contiguous() for x in tokens)
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and nvrtc.available()
    )


@functools.cache
def _kernel(shape: tuple, ranks: tuple[bool, bool], feedback: bool, dim: int, device: int):
    defines = (
        *shape,
        ("K_RANK", int(ranks[0])),
        ("V_RANK", int(ranks[1])),
        ("FEEDBACK", int(feedback)),
    )
    code = module(("common.cu", "store.cu"), defines, device)
    shared = 4 * (_ROWS * (dim + 4) + (dim * dim if feedback else 0))
    return Kernel(code, "store", 32 * max(dim // 8, _ROWS), shared, overlaps(device))


def store(view: LayerView, tokens: TokenBatch, q, k, v, q_rot, k_rule, v_rule) -> None:
    """``store.store``; rules are (half ratio, rank, whether the rank rule applies)."""
    n, heads, dim = q.shape
    feedback, params = view.spec.k_feedback, view.params
    shape = shape_defines(view, heads)
    kernel = _kernel(shape, (k_rule[2], v_rule[2]), feedback, dim, q.device.index)
    factor = params.factor if feedback else params.r_k
    args = _Args(
        *(x.data_ptr() for x in (q, k, v)), None if q_rot is None else q_rot.data_ptr(),
        *(x.data_ptr() for x in (params.r_k, params.r_v, factor)),
        *(x.data_ptr() for x in (*tokens, *view[2:])),
        q.stride(0), k.stride(0), v.stride(0),
        n, int(q_rot is not None and q_rot.dtype != torch.float32),
        view.windows.n_sink, view.windows.n_recent, k_rule[1], v_rule[1], k_rule[0], v_rule[0],
    )  # fmt: skip
    group = heads // view.kv_heads
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    share = math.ceil(8 * sms / (3 * view.kv_heads))  # a few CTAs per processor
    grid = (min(math.ceil(n * group / _ROWS), share), view.kv_heads, 3)
    kernel(grid, args, torch.cuda.current_stream(q.device).cuda_stream)
