"""How many tokens and request rows fit: the 2-bit cache's side of SGLang's memory profile."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from .config import OscarConfig
from .kernels.codec import CODECS
from .kernels.layout import HistoryLayout, MemoryPlan, WindowLayout

logger = logging.getLogger(__name__)

# Without --max-running-requests the windows may take this share of the cache's memory.
_WINDOW_SHARE = 1 / 8
_MAX_DEFAULT_ROWS = 256
# On a GPU the prefix of a turn is best materialised in one piece: 128k tokens are 0.5 GB at 8 heads
# of 128. Time to first token on a 100k prefix, H200: 4 pieces 149 ms; 1 piece 124 ms, in a run that
# shared the GPU with another process.
_SCRATCH_TOKENS = {"cpu": 4096, "cuda": 131072}


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
) -> MemoryPlan:
    """Plan of one rank. ``budget_bytes``: what SGLang found for the whole KV cache.

    ``max_running_requests`` None: as many request rows as ``_WINDOW_SHARE`` of the budget pays.
    """
    history = HistoryLayout(kv_heads, head_dim)
    windows = WindowLayout(config.sink_tokens, config.recent_tokens)
    if max_running_requests is None:
        row = layers * windows.tokens * kv_heads * 2 * head_dim * itemsize
        affordable = int(budget_bytes * _WINDOW_SHARE) // row
        max_running_requests = max(1, min(affordable, _MAX_DEFAULT_ROWS))
        logger.info(
            "oscar: --max-running-requests %d chosen (windows cost %.1f MB per request row)",
            max_running_requests,
            row / 2**20,
        )
    on_cpu = device == "cpu"
    return MemoryPlan(
        layers=layers,
        history=history,
        windows=windows,
        rows=max_running_requests + 1,  # row 0 is SGLang's padding row
        sink_cache_rows=config.sink_cache_tokens or 2 * config.sink_tokens * max_running_requests,
        scratch_tokens=config.scratch_tokens
        or min(_SCRATCH_TOKENS["cpu" if on_cpu else "cuda"], context_length),
        itemsize=itemsize,
        scratch_itemsize=4 if on_cpu else itemsize,
        codec_params=CODECS[config.codec].params,
    )


def plan_for(kvc: Any, config: OscarConfig, budget_bytes: int) -> MemoryPlan:
    """``make_plan`` from SGLang's ``KVCacheConfigurator``."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    requested = get_schedule().max_running_requests
    plan = make_plan(
        config,
        layers=kvc.layer_info.num_effective_layers,
        kv_heads=kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size),
        head_dim=kvc.model_config.head_dim,
        itemsize=kvc.model_dtype.itemsize,
        budget_bytes=budget_bytes,
        max_running_requests=requested and max(1, requested // kvc.ps.attn_dp_size),
        device=kvc.device,
        context_length=kvc.model_config.context_len,
    )
    if kvc.device == "cpu":
        return plan
    return replace(plan, workspace_bytes=decode_attention(kvc, plan).num_bytes)


def decode_attention(kvc: Any, plan: MemoryPlan) -> Any:
    """The kernels' decode attention for this rank; its buffers are allocated on first use."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    from .kernels.decode import DecodeAttention

    return DecodeAttention(
        heads=kvc.model_config.num_attention_heads // get_parallel().attn_tp_size,
        kv_heads=plan.history.kv_heads,
        head_dim=plan.history.head_dim,
        dtype=kvc.model_dtype,
        windows=plan.windows,
        page_size=get_schedule().page_size,
        max_batch=plan.rows - 1,
        device=kvc.device,
    )
