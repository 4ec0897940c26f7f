"""The KV pool SGLang sees: its own allocator's slots, our three stores behind them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from .kernels.codec import CODECS, LayerParams
from .kernels.layout import HistoryLayout, MemoryPlan
from .kernels.reference import Segments
from .kernels.stores import HistoryStore, SinkCache, WindowStore, nbytes

logger = logging.getLogger(__name__)
_GB = 1 << 30


@dataclass
class PoolSetup:
    """Everything the pool needs beyond SGLang's own arguments."""

    plan: MemoryPlan
    codec: str
    params: list[LayerParams]
    artifact_id: str
    decode_attention: Any = None  # kernels.decode.DecodeAttention, on a GPU


@dataclass
class Counters:
    """Since start-up; read by ``/server_info``."""

    demoted_tokens: int = 0
    materialised_tokens: int = 0
    # Exact tokens of the last batch's requests; None on a GPU, where counting would synchronise.
    window_tokens: int | None = None


class OscarKVPool(MHATokenToKVPool):
    """2-bit history for every slot, exact windows for running requests.

    Slots, pages, eviction and the radix tree stay SGLang's. There are no dense K and V buffers:
    whatever asks for one is told so instead of reading something else.
    """

    def __init__(self, *args, setup: PoolSetup, **kwargs) -> None:
        self.setup = setup
        self.counters = Counters()
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        plan, setup = self.setup.plan, self.setup
        layout = HistoryLayout(
            self.head_num, self.head_dim, plan.history.k_meta, plan.history.v_meta
        )
        assert layout == plan.history and self.layer_num == plan.layers
        self.k_buffer = self.v_buffer = ()
        self.k_scale_buffer = self.v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self._kv_buffer_descs = []
        device, layers, dtype = self.device, self.layer_num, self.dtype
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.segments = Segments(
                spec=CODECS[setup.codec],
                params=[
                    LayerParams(*(None if t is None else t.to(device) for t in p))
                    for p in setup.params
                ],
                history=HistoryStore(layout, layers, self.size + self.page_size, device),
                windows=WindowStore(plan.windows, layout, layers, plan.rows, dtype, device),
                sinks=SinkCache(layout, layers, plan.sink_cache_rows, dtype, device),
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
        self._log_memory()

    def part_bytes(self) -> dict[str, int]:
        """Bytes really allocated, part by part."""
        s = self.segments
        return {
            "history": s.history.num_bytes,
            "windows": s.windows.num_bytes,
            "sink_cache": s.sinks.num_bytes,
            "scratch": nbytes(self.scratch),
            "codec": sum(nbytes(*(t for t in p if t is not None)) for p in s.params),
            "workspace": self.decode_attention.num_bytes if self.decode_attention else 0,
        }

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

    def get_kv_size_bytes(self) -> int:
        return sum(self.part_bytes().values())

    def _log_memory(self) -> None:
        plan, parts = self.setup.plan, self.part_bytes()
        sizes = ", ".join(f"{k} {v / _GB:.3f} GB" for k, v in parts.items())
        logger.info(
            "oscar: %d tokens held, %s; total %.3f GB (planned %.3f GB)",
            self.size,
            sizes,
            sum(parts.values()) / _GB,
            sum(self.planned_bytes().values()) / _GB,
        )
        logger.info(
            "oscar: codec %s, artifact %s, %d B/token against %d B in BF16 (%.2fx), %.2f bits; "
            "sink %d, recent %d, %d request rows; a request is smaller than in BF16 from %d tokens",
            self.setup.codec,
            self.setup.artifact_id,
            plan.bytes_per_token,
            plan.bf16_bytes_per_token,
            plan.bf16_bytes_per_token / plan.bytes_per_token,
            plan.history.bits_per_element,
            plan.windows.n_sink,
            plan.windows.n_recent,
            plan.rows,
            plan.break_even(),
        )

    def stats(self) -> dict:
        """The block shown under ``oscar`` in ``/server_info``."""
        plan = self.setup.plan
        hits, misses, on_prefix = self.device_counters.tolist()
        counters = {
            **vars(self.counters),
            "sink_hits": hits,
            "sink_misses": misses,
            "requests_on_prefix": on_prefix,
        }
        return {
            "codec": self.setup.codec,
            "artifact": self.setup.artifact_id,
            "tokens_capacity": self.size,
            "bytes_per_token": plan.bytes_per_token,
            "bf16_bytes_per_token": plan.bf16_bytes_per_token,
            "bits_per_element": plan.history.bits_per_element,
            "effective_bits": {n: plan.effective_bits(n) for n in (2048, 8192, 32768, 131072)},
            "break_even_tokens": plan.break_even(),
            "sink_tokens": plan.windows.n_sink,
            "recent_tokens": plan.windows.n_recent,
            "bytes": self.part_bytes(),
            "planned_bytes": self.planned_bytes(),
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
