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

from . import codec_omni, nvrtc
from .attend import Partials
from .cuda_args import (
    HEAD_DIMS,
    ROW_FILES,
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
from .layout import BLOCK, HistoryLayout
from .views import LayerView

_COLUMNS = 8  # of a warp
_CTA_HEADS = 8  # KV heads of an attend_cta, a warp each
_BARRIER_BYTES = 64  # of an attend_cta, in shared memory
_CTA_FROM_BATCH = 4
_MERGE_WARPS = 8


class Args(ctypes.Structure):
    """``Args`` of work.cu."""

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


class MergeArgs(ctypes.Structure):
    """``MergeArgs`` of merge.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("out", "lse", "o", "ml", "plan", "r_v", "kv_rot", "slots")
        ),
        ("codes", CodeArgs),
        *((name, ctypes.c_int) for name in ("columns", "max_q", "tokens", "slices", "fresh")),
        ("mean", MeanArgs),
    ]


ATTEND = Source(("common.cu", "meta.cu", "work.cu", "columns.cu", "warp.cu", "attend.cu"), (Args,))
MERGE = Source((*ROW_FILES, "merge.cu"), (CodeArgs, MeanArgs, MergeArgs))


@dataclass(frozen=True)
class Form:
    """How attend is launched; ``splits`` is the length of the grid and of the plan.

    warps, stages, min_ctas  of attend_warp: warps of a CTA, tiles of the pipeline that each has,
                             CTAs a processor. attend_cta has a warp for each of its KV heads and
                             one that brings the tiles
    """

    kernel: str
    splits: int
    paged: bool
    warps: int = 4
    stages: int = 4
    min_ctas: int = 4

    @property
    def cta(self) -> bool:
        return self.kernel == "attend_cta"

    @property
    def threads(self) -> int:
        return 32 * (_CTA_HEADS + 1 if self.cta else self.warps)

    def stages_of(self, layout: HistoryLayout) -> int:
        """Tiles of a pipeline: fewer where they are larger, so that as many CTAs fit."""
        bits = layout.k_bits + layout.v_bits
        if self.cta:
            return 3 if bits == 4 else 2  # two CTAs fit a processor
        return min(self.stages, {4: self.stages, 6: 3, 8: 2}[bits])

    def keeps_queries(self, layout: HistoryLayout, means: bool) -> bool:
        """Whether query operands lie in shared memory: with means attend_cta has too few registers
        for them, and beside tiles of 4-bit codes no room."""
        return self.cta and means and layout.k_bits + layout.v_bits < 8

    def shared_bytes(self, layout: HistoryLayout, means: bool) -> int:
        """Dynamic shared memory, as attend.cu divides it (and checks)."""
        dim, tile, stages = layout.head_dim, 2 * layout.block_bytes, self.stages_of(layout)
        channels = layout.channel_bytes // layout.kv_heads  # of a page and head
        side = 512 * means + 16 * dim * self.keeps_queries(layout, means)  # of a warp
        result = _COLUMNS * (4 * dim + 8)  # of a warp's windows
        if self.cta:
            pipeline = stages * _CTA_HEADS * (tile + channels) + _BARRIER_BYTES
            return pipeline + _CTA_HEADS * (result + side)
        pipeline = stages * (tile + 8) + 2 * channels
        return self.warps * (pipeline + result + side)

    def defines(self, layout: HistoryLayout, means: bool) -> Defines:
        stages = self.stages_of(layout)
        return (
            ("COLS", _COLUMNS),
            ("PAGED", int(self.paged)),
            ("Q_SHARED", int(self.keeps_queries(layout, means))),
            ("SHARED_BYTES", self.shared_bytes(layout, means)),
            *((("CTA_HEADS", _CTA_HEADS), ("CTA_STAGES", stages), ("BARRIERS", _BARRIER_BYTES))
              if self.cta else
              (("WARPS", self.warps), ("STAGES", stages), ("MIN_CTAS", self.min_ctas))),
        )  # fmt: skip


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
    if paged and kv_heads % _CTA_HEADS == 0 and batch >= _CTA_FROM_BATCH:
        splits = 2 * properties.multi_processor_count // (kv_heads // _CTA_HEADS * tiles)
        return Form("attend_cta", max(1, splits), True)
    min_ctas = 4 if properties.shared_memory_per_multiprocessor > 200_000 else 2
    splits = min_ctas * properties.multi_processor_count // (kv_heads * tiles)
    return Form("attend_warp", max(1, splits), paged, min_ctas=min_ctas)


def attend_defines(form: Form, shape: Shape, cap: bool, means: bool) -> Defines:
    return (*shape.defines(), *form.defines(shape.layout, means), ("SOFT_CAP", int(cap)))


def merge_defines(shape: Shape, coding: Coding, rows: int) -> Defines:
    mine = ("MERGE_ROWS", rows), ("MERGE_WARPS", _MERGE_WARPS)
    return shape.defines() + coding.defines(shape.layout.head_dim) + mine


@functools.cache
def _attend_kernel(form: Form, shape: Shape, cap: bool, means: bool, device: int) -> Kernel:
    code = module(ATTEND, attend_defines(form, shape, cap, means), device)
    shared = form.shared_bytes(shape.layout, means)
    return Kernel(code, form.kernel, form.threads, shared, overlaps(device))


@functools.cache
def _merge_kernel(shape: Shape, coding: Coding, rows: int, shared: int, device: int) -> Kernel:
    code = module(MERGE, merge_defines(shape, coding, rows), device)
    return Kernel(code, "merge", 32 * _MERGE_WARPS, shared, overlaps(device))


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
    assert has_layout(view.layout)
    # With a shorter ring history could end inside a page, of which this step sealed the keys.
    longest_q = part.columns * view.kv_heads // q_rot.shape[1]
    assert view.spec.block == 1 or view.windows.n_recent >= view.spec.block + longest_q - 1
    shape, means = Shape.of(view, q_rot.shape[1]), view.means is not None
    kernel = _attend_kernel(form, shape, logit_cap > 0, means, q_rot.device.index)
    log2e, windows = math.log2(math.e), view.windows
    args = Args(
        o=pointer(part.o),
        ml=pointer(part.ml),
        plan=pointer(part.plan),
        q=pointer(q_rot),
        blocks=pointer(view.blocks),
        sink_k=pointer(view.sink_k),
        sink_v=pointer(view.sink_v),
        ring_k=pointer(view.ring_k),
        ring_v=pointer(view.ring_v),
        table=pointer(req_to_token),
        r_v=pointer(view.params.r_v),
        table_stride=req_to_token.stride(0),
        batch=part.batch,
        n_sink=windows.n_sink,
        n_recent=windows.n_recent,
        columns=part.columns,
        scale_log2=scale * log2e,
        cap_log2=logit_cap * log2e,
        grid=pointer(view.grid),
        channels=pointer(view.channels),
        zero=0,
        turns=pointer(view.means and view.means.turns),
    )
    tiles, heads = math.ceil(part.columns / _COLUMNS), view.kv_heads
    grid = (form.splits, heads // _CTA_HEADS, tiles) if form.cta else (heads, form.splits, tiles)
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
    dim = view.head_dim
    shared = 4 * dim**2 if fresh and view.spec.k_feedback else 0
    if fresh and view.means is not None:  # a row a warp, and the same in FP16
        shared += _MERGE_WARPS * (4 * dim + 2 * half_stride(dim))
    shape, coding = Shape.of(view, out.shape[1]), Coding.of(view.spec)
    kernel = _merge_kernel(shape, coding, rows, shared, out.device.index)
    slices = math.ceil(group / rows)
    kv_rot, slots, shares = fresh or (None, None, None)
    args = MergeArgs(
        out=pointer(out),
        lse=pointer(lse),
        o=pointer(part.o),
        ml=pointer(part.ml),
        plan=pointer(part.plan),
        r_v=pointer(view.params.r_v),
        kv_rot=pointer(kv_rot),
        slots=pointer(slots),
        codes=CodeArgs.of(view),
        columns=part.columns,
        max_q=max_q,
        tokens=tokens,
        slices=slices,
        fresh=len(slots) if fresh else 0,
        mean=MeanArgs.of(view, shares),
    )
    share = max(1, 4 * sms // (heads * slices))
    kernel((min(tokens, share), heads, slices + 2 * bool(fresh)), args, _stream(out.device))
    return out
