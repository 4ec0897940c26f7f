"""The KV pool SGLang sees: its own allocator's slots, our three stores behind them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from ..artifact.fingerprint import Fingerprint
from ..config import OscarError
from ..kernels.codec import CodecSpec, LayerParams
from ..kernels.layout import MemoryPlan, WindowLayout, stored_head_dim
from ..kernels.reference import Segments
from ..kernels.stores import HistoryStore, SinkCache, WindowStore, nbytes
from .hybrid import attention_pool
from .memory_log import block
from .parking import Parking
from .varlen import workspace_bytes
from .watching import Watch

logger = logging.getLogger(__name__)


@dataclass
class PoolSetup:
    """Everything the pool needs beyond SGLang's own arguments."""

    plan: MemoryPlan
    spec: CodecSpec  # what all layers share
    specs: list[CodecSpec]
    params: list[LayerParams]
    artifact_id: str
    fingerprint: Fingerprint  # of the model that the artifact was calibrated on
    layer_ids: tuple[int, ...]  # the model's layers that have K and V, in the order of ``params``
    context: int  # tokens that a request's row of ``req_to_token`` holds
    data_free: bool = False  # the artifact's parameters are of no data
    prefix_window: str = "reuse"  # of config.PREFIX_WINDOWS
    reprefill_tail: int = 0  # last tokens of a prompt computed even if cached
    decode_attention: Any = None  # kernels.decode.DecodeAttention, on a GPU
    prefill_attention: str | None = None  # its library, on a GPU


@dataclass
class Counters:
    """Since start-up, counted on the host by the attention backends."""

    demoted_tokens: int = 0
    materialised_tokens: int = 0
    scratch_tokens_peak: int = 0

    def extend(self, fresh: int, prefix: int, in_scratch: int) -> None:
        """An extend batch: new and cached tokens, and how many of these the scratch would hold
        at once if it were large enough."""
        self.demoted_tokens += fresh
        self.materialised_tokens += prefix
        self.scratch_tokens_peak = max(self.scratch_tokens_peak, in_scratch)


@dataclass
class Calibration:
    """Which calibration the pool has, and whether its weights are the model's.

    artifact        its id
    source          "artifact", "data-free" or "recalibrated"
    stale           the weights have changed since
    waiting_for     why a stale one has not been renewed, "" if nothing stands in the way
    """

    artifact: str
    source: str
    stale: bool = False
    waiting_for: str = ""
    weight_updates: int = 0
    recalibrations: int = 0

    def stats(self) -> dict[str, Any]:
        """Its part of ``oscar`` in /server_info."""
        return {
            "artifact": self.artifact,
            "calibration": self.source,
            "calibration_stale": int(self.stale),
            "calibration_waits_for": self.waiting_for,
            "weight_updates": self.weight_updates,
            "recalibrations": self.recalibrations,
        }


def oscar_pool(kv_cache: Any) -> OscarKVPool | None:
    """Our pool behind SGLang's, None if that is another."""
    pool = attention_pool(kv_cache)
    return pool if isinstance(pool, OscarKVPool) else None


def served_pool(kv_cache: Any) -> OscarKVPool:
    """``oscar_pool`` where SGLang must have built one."""
    pool = oscar_pool(kv_cache)
    if pool is None:
        raise OscarError(
            f"SGLang built a {type(kv_cache).__name__} for this model, which int2 does not "
            "support; drop --kv-cache-dtype int2"
        )
    return pool


class OscarKVPool(MHATokenToKVPool):
    """2-bit history for every slot, exact windows for running requests.

    Slots, pages, eviction and the radix tree stay SGLang's. There are no dense K and V buffers:
    whatever asks for one is told so instead of reading something else.
    """

    def __init__(self, *args, setup: PoolSetup, **kwargs) -> None:
        self.setup = setup
        self.index = {layer_id: i for i, layer_id in enumerate(setup.layer_ids)}
        self.counters = Counters()
        self.watch = Watch()
        # Called with a layer's index, q, k, v and output of an extend, while recalibrating.
        self.observer: Callable[..., None] | None = None
        self.calibration = Calibration(
            setup.artifact_id, "data-free" if setup.data_free else "artifact"
        )
        self.parking: Parking | None = None
        super().__init__(*args, **kwargs)
        if setup.prefix_window == "park":
            plan = setup.plan
            self.parking = Parking(plan.rows, plan.windows.n_recent, self.page_size)

    def _create_buffers(self) -> None:
        plan, setup = self.setup.plan, self.setup
        of_setup = (setup.layer_ids, setup.params, setup.specs)
        counts = (self.layer_num, plan.layers, *map(len, of_setup))
        if len(set(counts)) > 1:
            raise OscarError(
                "layers of SGLang's pool, of the memory plan, of the model's attention and of the "
                f"artifact differ: {', '.join(map(str, counts))}; drop --kv-cache-dtype int2 (and "
                "please report it)"
            )
        channels = stored_head_dim(self.head_dim)
        layouts = [spec.layout(self.head_num, channels) for spec in setup.specs]
        assert layouts == plan.layouts
        layout = plan.history  # windows are the same in every layer
        self.k_buffer = self.v_buffer = ()
        self.k_scale_buffer = self.v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self._kv_buffer_descs: list = []
        device, layers, dtype = self.device, self.layer_num, self.dtype
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            history = HistoryStore(layouts, layers, self.size + self.page_size, device)
            windows = WindowStore(plan.windows, layout, layers, plan.rows, dtype, device)
            sinks = SinkCache(layout, layers, plan.sink_cache_rows, dtype, device)
            shape = (2, plan.scratch_tokens, self.head_num, channels)
            on_cpu = torch.device(device).type == "cpu"
            scratch_dtype = torch.float32 if on_cpu else dtype
            self.scratch = torch.zeros(shape, dtype=scratch_dtype, device=device)
            self.decode_attention = setup.decode_attention
            if self.decode_attention is not None:
                self.decode_attention.allocate()
        # What is made in that region comes back empty, or as anything, from a release and a resume
        # (--enable-memory-saver): rows may, but not constants and what says which rows are valid.
        windows.recent_start, windows.written = (
            windows.recent_start.clone(),
            windows.written.clone(),
        )
        sinks.tag = sinks.tag.clone()
        params = [p.to(device) for p in setup.params]
        self.segments = Segments(
            spec=setup.spec,
            specs=setup.specs,
            params=params,
            history=history,
            windows=windows,
            sinks=sinks,
            context=setup.context,
        )
        # Sink-cache hits, misses, requests on a prefix: counted by kernels on a GPU.
        self.device_counters = torch.zeros(3, dtype=torch.int64, device=device)

    def forget_rows(self) -> None:
        """What any row holds is gone: no window begins anywhere, no sink is kept."""
        if self.parking:
            self.parking.clear()
        self.segments.windows.recent_start.zero_()
        self.segments.windows.written.zero_()
        self.segments.sinks.tag.fill_(-1)
        if self.segments.sinks.tag.is_cuda:  # read next on another stream
            torch.cuda.synchronize()

    def replace_params(self, params: list[LayerParams]) -> None:
        """Other values in the same tensors, whose addresses captured CUDA graphs have. Codes and
        windows written before mean nothing afterwards."""
        for old, new in zip(self.segments.params, params, strict=True):
            for a, b in zip(old, new, strict=True):
                if a is not None and b is not None:
                    a.copy_(b)
        if (grids := self.segments.grids) is not None:
            grids.copy_(torch.stack([p.grid for p in self.segments.params if p.grid is not None]))
        if self.segments.sinks.tag.is_cuda:
            torch.cuda.synchronize()

    def part_bytes(self) -> dict[str, int]:
        """Bytes really allocated, part by part."""
        s = self.segments
        return {
            "history": s.history.num_bytes,
            "windows": s.windows.num_bytes,
            "sink_cache": s.sinks.num_bytes,
            "scratch": nbytes(self.scratch),
            "codec": sum(nbytes(*(t for t in p if t is not None)) for p in s.params)
            + self._derived_bytes(),
            "workspace": self._workspace_bytes(),
        }

    def _derived_bytes(self) -> int:
        """What the kernels keep besides the artifact's tensors."""
        means = None if self.decode_attention is None else self.segments.means
        return 0 if means is None else nbytes(*means)

    def _workspace_bytes(self) -> int:
        if self.decode_attention is None:
            return 0
        prefill = workspace_bytes(self.setup.prefill_attention)
        return self.decode_attention.num_bytes + prefill

    def planned_bytes(self) -> dict[str, int]:
        plan = self.setup.plan
        return {
            "history": plan.history_bytes(self.size + self.page_size),
            "windows": plan.window_bytes,
            "sink_cache": plan.sink_cache_bytes,
            "scratch": plan.scratch_bytes,
            "codec": plan.codec_bytes,
            "workspace": plan.workspace_bytes,
        }

    def get_kv_size_bytes(self) -> tuple[int, int]:
        total = sum(self.part_bytes().values())
        return total - total // 2, total // 2  # K and V cost the same

    def log_memory(self, hooks: tuple[int, int]) -> None:
        """``hooks``: in place, and in all."""
        setup = self.setup
        for line in block(
            setup.plan,
            self.size,
            self.part_bytes(),
            sum(self.planned_bytes().values()),
            setup.spec.name,
            setup.artifact_id,
            hooks,
        ):
            logger.info("oscar: %s", line)

    @property
    def windows(self) -> WindowLayout:
        return self.setup.plan.windows

    def ready(self) -> None:
        """The server is ready: what graph capture and warm-up ran was no request."""
        self.reset_counters()
        self.watch.ready()

    def reset_counters(self) -> None:
        self.counters = Counters()
        self.device_counters.zero_()

    def stats(self, device_counts: list[int] | None = None) -> dict:
        """The pool's part of ``oscar`` in ``/server_info``.

        ``device_counts``: values of ``device_counters``; without them the device is waited for.
        """
        plan, parts = self.setup.plan, self.part_bytes()
        hits, misses, on_prefix = device_counts or self.device_counters.tolist()
        counters = {
            **vars(self.counters),
            "scratch_tokens": plan.scratch_tokens,
            "sink_hits": hits,
            "sink_misses": misses,
            "requests_on_prefix": on_prefix,
            "windows_found": self.parking.found if self.parking else 0,
            "windows_missed": self.parking.missed if self.parking else 0,
        }
        return {
            "codec": self.setup.spec.name,
            **self.calibration.stats(),
            "tokens_capacity": self.size,
            "bytes_per_token": plan.bytes_per_token,
            "bf16_bytes_per_token": plan.bf16_bytes_per_token,
            "bits_per_element": plan.bits_per_element,
            "effective_bits": {n: plan.effective_bits(n) for n in (2048, 8192, 32768, 131072)},
            "break_even_tokens": plan.break_even(),
            "sink_tokens": plan.windows.n_sink,
            "recent_tokens": plan.windows.n_recent,
            "prefix_window": self.setup.prefix_window,
            "bytes": parts,
            "bytes_total": sum(parts.values()),
            "planned_bytes": self.planned_bytes(),
            **self.watch.stats(),
            **counters,
        }

    def _clear_buffers(self) -> None:
        del self.segments, self.scratch

    def _no_dense_buffers(self, *_args, **_kwargs) -> NoReturn:
        raise RuntimeError(
            "the int2 KV cache has no dense K/V buffers; the feature that asked for them must be "
            "switched off or refused at start-up (please report which one)"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = _no_dense_buffers
    _get_key_buffer = _get_value_buffer = set_kv_buffer = _no_dense_buffers
    get_cpu_copy = load_cpu_copy = move_kv_cache = _no_dense_buffers
    get_contiguous_buf_infos = get_kv_buffer_shape = _no_dense_buffers
