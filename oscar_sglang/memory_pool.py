"""The KV pool SGLang sees: its own allocator's slots, our three stores behind them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from .hybrid import attention_pool
from .kernels.codec import CodecSpec, LayerParams
from .kernels.layout import MemoryPlan, WindowLayout
from .kernels.reference import Segments
from .kernels.stores import HistoryStore, SinkCache, WindowStore, nbytes
from .memory_log import block
from .varlen import workspace_bytes

logger = logging.getLogger(__name__)


@dataclass
class PoolSetup:
    """Everything the pool needs beyond SGLang's own arguments."""

    plan: MemoryPlan
    spec: CodecSpec  # what all layers share
    specs: list[CodecSpec]
    params: list[LayerParams]
    artifact_id: str
    layer_ids: tuple[int, ...]  # the model's layers that have K and V, in the order of ``params``
    context: int  # tokens that a request's row of ``req_to_token`` holds
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


def oscar_pool(kv_cache: Any) -> OscarKVPool | None:
    """Our pool behind SGLang's, None if that is another."""
    pool = attention_pool(kv_cache)
    return pool if isinstance(pool, OscarKVPool) else None


class OscarKVPool(MHATokenToKVPool):
    """2-bit history for every slot, exact windows for running requests.

    Slots, pages, eviction and the radix tree stay SGLang's. There are no dense K and V buffers:
    whatever asks for one is told so instead of reading something else.
    """

    def __init__(self, *args, setup: PoolSetup, **kwargs) -> None:
        self.setup = setup
        self.index = {layer_id: i for i, layer_id in enumerate(setup.layer_ids)}
        self.counters = Counters()
        self.tags: Any = None  # of --oscar-debug-tags, set by the attention backend
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        plan, setup = self.setup.plan, self.setup
        layouts = [spec.layout(self.head_num, self.head_dim) for spec in setup.specs]
        assert layouts == plan.layouts and self.layer_num == plan.layers
        layout = plan.history  # windows are the same in every layer
        self.k_buffer = self.v_buffer = ()
        self.k_scale_buffer = self.v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self._kv_buffer_descs = []
        device, layers, dtype = self.device, self.layer_num, self.dtype
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.segments = Segments(
                spec=setup.spec,
                specs=setup.specs,
                params=[p.to(device) for p in setup.params],
                history=HistoryStore(layouts, layers, self.size + self.page_size, device),
                windows=WindowStore(plan.windows, layout, layers, plan.rows, dtype, device),
                sinks=SinkCache(layout, layers, plan.sink_cache_rows, dtype, device),
                context=setup.context,
            )
            shape = (2, plan.scratch_tokens, self.head_num, self.head_dim)
            on_cpu = torch.device(device).type == "cpu"
            scratch_dtype = torch.float32 if on_cpu else dtype
            self.scratch = torch.zeros(shape, dtype=scratch_dtype, device=device)
            # Sink-cache hits, misses, requests on a prefix: counted by kernels on a GPU.
            self.device_counters = torch.zeros(3, dtype=torch.int64, device=device)
            self.decode_attention = setup.decode_attention
            if self.decode_attention is not None:
                self.decode_attention.allocate()

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
        }
        return {
            "codec": self.setup.spec.name,
            "artifact": self.setup.artifact_id,
            "tokens_capacity": self.size,
            "bytes_per_token": plan.bytes_per_token,
            "bf16_bytes_per_token": plan.bf16_bytes_per_token,
            "bits_per_element": plan.bits_per_element,
            "effective_bits": {n: plan.effective_bits(n) for n in (2048, 8192, 32768, 131072)},
            "break_even_tokens": plan.break_even(),
            "sink_tokens": plan.windows.n_sink,
            "recent_tokens": plan.windows.n_recent,
            "prefix_window": "recompute" if self.setup.reprefill_tail else "reuse",
            "bytes": parts,
            "bytes_total": sum(parts.values()),
            "planned_bytes": self.planned_bytes(),
            **({"debug_tags": self.tags.stats()} if self.tags else {}),
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
