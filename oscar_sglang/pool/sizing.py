"""How many tokens and request rows fit: the 2-bit cache's side of SGLang's memory profile."""

from __future__ import annotations

import logging
import math

from ..config import DEFAULT_CODEC, OscarConfig
from ..kernels.codec import CODECS
from ..kernels.layout import MemoryPlan, WindowLayout, stored_head_dim

logger = logging.getLogger(__name__)

# Without --max-running-requests, what every running request costs (its exact windows and its share
# of the sink cache) may take this share of the cache's memory, or half of it for the first few.
_WINDOW_SHARE = 1 / 8
_FEW_REQUESTS, _MAX_DEFAULT_REQUESTS = 8, 256
# With --oscar-prefix-window park as many rows again keep the rings of requests that left, at most
# this share of the memory: enough for a session per running request that waits for its next turn.
_PARKED_SHARE = 1 / 32
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
    hybrid: bool = False,
) -> MemoryPlan:
    """Plan of one rank. ``budget_bytes``: what SGLang found for the whole KV cache. ``head_dim``:
    the model's. ``widths``: bits of each layer's K and V, if the artifact says so.

    ``max_running_requests`` None: chosen (``default_requests``).
    """
    spec, channels = CODECS[config.codec or DEFAULT_CODEC], stored_head_dim(head_dim)
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
    parked = 0
    if config.prefix_window == "park" and not hybrid:  # a hybrid's rows hold states, too
        most = int(budget_bytes * _PARKED_SHARE) // (windows.tokens * exact_row)
        parked = config.parked_rows or min(max_running_requests, most)
    on_cpu = device == "cpu"
    floats, tables = sum(math.prod(shape) for shape in spec.tensors(channels).values()), 0
    if not on_cpu:  # what the kernels derive from these
        floats += spec.meta.kernel_floats(channels)
        tables = spec.meta.table_bytes(channels, context_length + ROW_SLACK)
    sink_rows = config.sink_cache_tokens or default_sink_rows(
        config.sink_tokens, max_running_requests, budget_bytes, exact_row, max_total_tokens
    )
    return MemoryPlan(
        layers=layers,
        history=spec.layout(kv_heads, channels),
        windows=windows,
        rows=max_running_requests + 1 + parked,  # row 0 is SGLang's padding row
        parked_rows=parked,
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
