"""How many tokens and request rows fit: the 2-bit cache's side of SGLang's memory profile."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..artifact.header import read_header
from ..config import OscarConfig, portable_kernels
from ..kernels.codec import CODECS
from ..kernels.codec_position import table_bytes
from ..kernels.layout import MemoryPlan, WindowLayout, stored_head_dim
from ..kernels.means import floats_per_head
from .hybrid import attention_layer_ids

logger = logging.getLogger(__name__)

# Without --max-running-requests, what every running request costs (its exact windows and its share
# of the sink cache) may take this share of the cache's memory, or half of it for the first few.
_WINDOW_SHARE = 1 / 8
_FEW_REQUESTS, _MAX_DEFAULT_REQUESTS = 8, 256
# Sinks of cached prefixes: two prefixes per running request, or this share of the memory, so that
# few long sessions do not push each other's sinks out.
_SINK_CACHE_SHARE = 1 / 100
# On a GPU the prefix of a turn is best materialised in one piece: 128k tokens are 0.5 GB at 8 heads
# of 128. Time to first token on a 100k prefix, H200: 4 pieces 149 ms; 1 piece 124 ms, in a run that
# shared the GPU with another process.
ROW_SLACK = 16  # SGLang's request rows are a few tokens longer than the context
_SCRATCH_TOKENS = {"cpu": 4096, "cuda": 131072}


def default_requests(budget_bytes: int, request_bytes: int, max_tokens: int | None) -> int:
    """Running requests when the user names no number. ``max_tokens``: --max-total-tokens in units
    of a request's windows, as more requests than that could not even fill their windows."""
    wanted = int(budget_bytes * _WINDOW_SHARE) // request_bytes
    few = min(_FEW_REQUESTS, budget_bytes // 2 // request_bytes)
    most = min(_MAX_DEFAULT_REQUESTS, max_tokens or _MAX_DEFAULT_REQUESTS)
    return max(1, min(max(wanted, few), most))


def default_sink_rows(
    sink_tokens: int, requests: int, budget_bytes: int, row_bytes: int, max_tokens: int | None
) -> int:
    """Rows of the sink cache when the user names no number.

    ``max_tokens``: --max-total-tokens; an eighth of them as sinks is plenty, all of them a limit.
    """
    share = int(budget_bytes * _SINK_CACHE_SHARE) // row_bytes
    if max_tokens is None:
        return max(2 * sink_tokens * requests, share)
    wanted = max(2 * sink_tokens * requests, min(share, max_tokens // 8))
    return min(wanted, max(max_tokens, sink_tokens))


def make_plan(
    config: OscarConfig,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    budget_bytes: int,
    max_running_requests: int | None,
    device: str,
    context_length: int,
    max_total_tokens: int | None = None,
    widths: tuple[tuple[int, int], ...] = (),
) -> MemoryPlan:
    """Plan of one rank. ``budget_bytes``: what SGLang found for the whole KV cache. ``head_dim``:
    the model's. ``widths``: bits of each layer's K and V, if the artifact says so.

    ``max_running_requests`` None: chosen (``default_requests``).
    """
    spec, channels = CODECS[config.codec], stored_head_dim(head_dim)
    windows = WindowLayout(config.sink_tokens, spec.ring_tokens(config.recent_tokens))
    exact_row = layers * kv_heads * 2 * channels * itemsize
    if max_running_requests is None:
        sinks = 0 if config.sink_cache_tokens else 2 * config.sink_tokens
        row = (windows.tokens + sinks) * exact_row
        fit = max_total_tokens and max(1, max_total_tokens // windows.tokens)
        max_running_requests = default_requests(budget_bytes, row, fit)
        logger.info(
            "oscar: --max-running-requests %d chosen (each costs %.1f MB: exact windows, sinks)",
            max_running_requests,
            row / 2**20,
        )
    on_cpu = device == "cpu"
    floats, tables = sum(math.prod(shape) for shape in spec.tensors(channels).values()), 0
    if spec.meta == "position" and not on_cpu:  # what the kernels derive from these
        floats += floats_per_head(channels)
        tables = table_bytes(channels, context_length + ROW_SLACK)
    sink_rows = config.sink_cache_tokens or default_sink_rows(
        config.sink_tokens, max_running_requests, budget_bytes, exact_row, max_total_tokens
    )
    return MemoryPlan(
        layers=layers,
        history=spec.layout(kv_heads, channels),
        windows=windows,
        rows=max_running_requests + 1,  # row 0 is SGLang's padding row
        sink_cache_rows=sink_rows,
        scratch_tokens=config.scratch_tokens
        or min(_SCRATCH_TOKENS["cpu" if on_cpu else "cuda"], context_length),
        itemsize=itemsize,
        scratch_itemsize=4 if on_cpu else itemsize,
        codec_floats=floats,
        table_bytes=tables,
        widths=widths,
        head_dim=head_dim,
    )


def tag_bytes(config: OscarConfig, device: str) -> int:
    """Device bytes a slot that ``--oscar-debug-tags`` takes beside the pool."""
    from ..watch.gpu_tags import BYTES_PER_SLOT

    return BYTES_PER_SLOT if config.debug_tags and device != "cpu" else 0


def plan_for(kvc: Any, config: OscarConfig, budget_bytes: int) -> MemoryPlan:
    """``make_plan`` from SGLang's ``KVCacheConfigurator``."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    requested = get_schedule().max_running_requests
    plan = make_plan(
        config,
        layers=len(attention_layer_ids(kvc)),
        kv_heads=kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size),
        head_dim=kvc.model_config.head_dim,
        itemsize=kvc.model_dtype.itemsize,
        budget_bytes=budget_bytes,
        max_running_requests=requested and max(1, requested // kvc.attn_dp_size),
        device=kvc.device,
        context_length=kvc.model_config.context_len,
        max_total_tokens=get_schedule().max_total_tokens,
        widths=read_header(Path(config.artifact)).widths,
    )
    return with_workspace(kvc, plan, decode_attention(kvc, plan) if kvc.device != "cpu" else None)


def with_workspace(kvc: Any, plan: MemoryPlan, attention: Any) -> MemoryPlan:
    """``plan`` with the buffers of ``decode_attention`` and of prefill attention on this GPU."""
    if attention is None:
        return plan
    from ..plugin.seam import config_of
    from .varlen import workspace_bytes

    prefill = workspace_bytes(config_of(kvc.server_args).prefill_attention)
    return replace(plan, workspace_bytes=attention.num_bytes + prefill)


def decode_attention(kvc: Any, plan: MemoryPlan) -> Any:
    """The kernels' decode attention for this rank; its buffers are allocated on first use."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    from ..kernels.decode import DecodeAttention

    return DecodeAttention(
        heads=kvc.model_config.num_attention_heads // get_parallel().attn_tp_size,
        kv_heads=plan.history.kv_heads,
        head_dim=plan.history.head_dim,
        dtype=kvc.model_dtype,
        windows=plan.windows,
        page_size=get_schedule().page_size,
        max_batch=plan.rows - 1,
        device=kvc.device,
        block=plan.history.block,
        triton_only=portable_kernels(),
    )
