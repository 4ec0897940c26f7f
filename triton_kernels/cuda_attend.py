"""attend and merge in CUDA C++ (attend.cu, merge.cu): the fast path, for head_dim 64 and 128.

Two forms of attend, chosen on the host from shapes only, so that a CUDA graph keeps its choice:

    cta   one CTA reads the runs of 8 KV heads; KV heads a multiple of 8, whole pages, large batches
    warp  one CTA per KV head, its warps share the tiles; any KV heads, any page size

Same plan, partial results and arguments as ``attend.attend`` and ``merge.merge``.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from . import codec_omni, nvrtc, plan
from .attend import Partials
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
from .layout import BLOCK, HistoryLayout
from .views import LayerView

ATTEND_FILES = ("common.cu", "meta.cu", "warp.cu", "attend.cu")
MERGE_FILES = ("common.cu", "rows.cu", "merge.cu")
_COLUMNS = 8  # of a warp
_CTA_FROM_BATCH = 4


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "o", "ml", "plan", "q", "blocks", "sink_k", "sink_v", "ring_k", "ring_v", "table",
            "r_v",
        )),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("batch", "n_sink", "n_recent", "columns")),
        *((name, ctypes.c_float) for name in ("scale_log2", "cap_log2")),
        *((name, ctypes.c_void_p) for name in ("grid", "channels")),
        ("zero", ctypes.c_int),
        ("turns", ctypes.c_void_p),
    ]  # fmt: skip


class _MergeArgs(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("out", "lse", "o", "ml", "plan", "r_v", "kv_rot", "slots")
        ),
        ("codes", CodeArgs),
        *((name, ctypes.c_int) for name in ("columns", "max_q", "tokens", "slices", "fresh")),
        ("mean", MeanArgs),
    ]


@dataclass(frozen=True)
class Form:
    """How attend is launched; ``splits`` is the length of the grid and of the plan."""

    kernel: str
    splits: int
    paged: bool
    warps: int = 4
    stages: int = 4
    min_ctas: int = 4

    def stages_of(self, layout: HistoryLayout) -> int:
        """Tiles of a pipeline: fewer where they are larger, so that as many CTAs fit."""
        bits = layout.k_bits + layout.v_bits
        if self.kernel == "attend_cta":
            return 3 if bits == 4 else 2  # CTA_STAGES
        return min(self.stages, {4: self.stages, 6: 3, 8: 2}[bits])

    def shared_bytes(self, layout: HistoryLayout, means: bool) -> int:
        """Dynamic shared memory."""
        dim, tile, stages = layout.head_dim, 2 * layout.block_bytes, self.stages_of(layout)
        channels = layout.channel_bytes // layout.kv_heads  # of a page and head
        side = 512 * means  # of a warp: warp.cu's SIDE
        if self.kernel == "attend_cta":
            if means and layout.k_bits + layout.v_bits < 8:
                side += 16 * dim
            return stages * 8 * (tile + channels) + 64 + 8 * (_COLUMNS * (4 * dim + 8) + side)
        pipeline = stages * (tile + 8) + 2 * channels
        return self.warps * (pipeline + _COLUMNS * (4 * dim + 8) + side)

    @property
    def threads(self) -> int:
        return 288 if self.kernel == "attend_cta" else 32 * self.warps


def supported(device: torch.device, dim: int, dtype: torch.dtype) -> bool:
    """Whether this device, head_dim and model dtype have a CUDA form (NVRTC present included)."""
    return (
        device.type == "cuda"
        and dim in HEAD_DIMS
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and nvrtc.available()
    )


def has_layout(layout: HistoryLayout) -> bool:
    """Whether attend.cu reads such blocks: keys share metadata not at all, or over its PAGE."""
    return layout.block in (1, codec_omni.BLOCK)


def choose_form(
    batch: int, kv_heads: int, columns: int, page_size: int, device: torch.device
) -> Form:
    """Form and split count that fill the device once, whatever the lengths will be."""
    properties = torch.cuda.get_device_properties(device)
    paged = page_size % BLOCK == 0 and properties.major >= 9
    tiles = math.ceil(columns / _COLUMNS)
    if paged and kv_heads % 8 == 0 and batch >= _CTA_FROM_BATCH:
        splits = 2 * properties.multi_processor_count // (kv_heads // 8 * tiles)
        return Form("attend_cta", max(1, splits), True)
    min_ctas = 4 if properties.shared_memory_per_multiprocessor > 200_000 else 2
    splits = min_ctas * properties.multi_processor_count // (kv_heads * tiles)
    return Form("attend_warp", max(1, splits), paged, min_ctas=min_ctas)


@functools.cache
def _attend_kernel(
    form: Form, shape: tuple, cap: bool, layout: HistoryLayout, means: bool, device: int
) -> Kernel:
    defines = (
        *shape,
        ("SOFT_CAP", int(cap)),
        ("PAGED", int(form.paged)),
        ("WIN_COST", plan.WINDOW_COST.value),
        *((("WARPS", form.warps), ("STAGES", form.stages_of(layout)), ("MIN_CTAS", form.min_ctas))
          if form.kernel == "attend_warp" else ()),
    )  # fmt: skip
    code = module(ATTEND_FILES, defines, device)
    shared = form.shared_bytes(layout, means)
    return Kernel(code, form.kernel, form.threads, shared, overlaps(device))


@functools.cache
def _merge_kernel(defines: tuple, shared: int, device: int) -> Kernel:
    code = module(MERGE_FILES, defines, device)
    return Kernel(code, "merge", 256, shared, overlaps(device))


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def attend(
    form: Form,
    part: Partials,
    view: LayerView,
    q_rot: torch.Tensor,
    req_to_token: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
) -> None:
    """``attend.attend``; ``form.splits`` must be the plan's."""
    assert q_rot.dtype == torch.float32 and q_rot.is_contiguous()
    assert q_rot.shape[2] == view.query_width
    assert req_to_token.dtype == torch.int32 and form.splits == part.splits
    layout = view.spec.layout(view.kv_heads, view.head_dim)
    assert has_layout(layout)
    # With a shorter ring history could end inside a page, of which this step sealed the keys.
    longest_q = part.columns * view.kv_heads // q_rot.shape[1]
    assert view.spec.block == 1 or view.windows.n_recent >= view.spec.block + longest_q - 1
    shape = shape_defines(view, q_rot.shape[1])
    means = view.means is not None
    kernel = _attend_kernel(form, shape, logit_cap > 0, layout, means, q_rot.device.index)
    log2e = math.log2(math.e)
    args = _Args(
        *(x.data_ptr() for x in (part.o, part.ml, part.plan, q_rot, *view[2:7], req_to_token)),
        view.params.r_v.data_ptr(),
        req_to_token.stride(0), part.batch, view.windows.n_sink,
        view.windows.n_recent, part.columns,
        scale * log2e, logit_cap * log2e, view.grid.data_ptr(), pointer(view.channels), 0,
        pointer(view.means and view.means.turns),
    )  # fmt: skip
    tiles = math.ceil(part.columns / _COLUMNS)
    heads = view.kv_heads
    grid = (
        (form.splits, heads // 8, tiles)
        if form.kernel == "attend_cta"
        else (heads, form.splits, tiles)
    )
    kernel(grid, args, _stream(q_rot.device))


def merge_rows(tokens: int, kv_heads: int, group: int, sms: int) -> int:
    """Query heads a merge CTA finishes together: the fewest whose CTAs fit the device at once."""
    heads = tokens * kv_heads * group
    return 1 if heads <= sms else min(2 if heads <= 4 * sms else 4, group)


def merge(
    part: Partials,
    view: LayerView,
    out: torch.Tensor,
    max_q: int = 1,
    lse: torch.Tensor | None = None,
    fresh: Fresh | None = None,
) -> torch.Tensor:
    """``merge.merge`` for out [T, H, D] in the windows' dtype; encodes ``fresh`` meanwhile."""
    assert out.dtype == view.sink_k.dtype and out.is_contiguous()
    group, tokens, heads = out.shape[1] // view.kv_heads, part.batch * max_q, view.kv_heads
    sms = torch.cuda.get_device_properties(out.device).multi_processor_count
    rows = merge_rows(tokens, heads, group, sms)
    defines = shape_defines(view, out.shape[1]) + code_defines(view) + (("MERGE_ROWS", rows),)
    dim = view.head_dim
    shared = 4 * dim**2 if fresh and view.spec.k_feedback else 0
    if fresh and view.means is not None:  # 8 rows, and the same in FP16
        shared += 8 * (4 * dim + 2 * (dim + 32))
    kernel = _merge_kernel(defines, shared, out.device.index)
    slices = math.ceil(group / rows)
    kv_rot, slots, shares = fresh or (None, None, None)
    args = _MergeArgs(
        out.data_ptr(), pointer(lse), part.o.data_ptr(), part.ml.data_ptr(), part.plan.data_ptr(),
        view.params.r_v.data_ptr(), pointer(kv_rot), pointer(slots), CodeArgs.of(view),
        part.columns, max_q, tokens, slices, len(slots) if fresh else 0,
        MeanArgs.of(view, shares),
    )  # fmt: skip
    share = max(1, 4 * sms // (heads * slices))
    kernel((min(tokens, share), heads, slices + 2 * bool(fresh)), args, _stream(out.device))
    return out
