"""Request rows, slots and cached prefixes: where SGLang hands them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from .hybrid import attention_pool
from .memory_pool import oscar_pool

# Request row -> first position in its ring, for each of SGLang's ReqToTokenPools. On the host: what
# the device holds would have to be waited for.
_ring_starts: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()


def fused_store(original: Callable, forward_batch: Any) -> bool:
    """AROUND models.utils.enable_fused_set_kv_buffer."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return oscar_pool(get_token_to_kv_pool()) is None and original(forward_batch)


def last_loc(original: Callable, req_to_token: Any, rows: Any, prefix_lens: Any) -> Any:
    """AROUND allocation.get_last_loc: the slot of each request's last cached token."""
    if req_to_token.device.type != "cpu":
        return original(req_to_token, rows, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, rows, prefix_lens)


def reprefill_tail(original: Callable, self: Any, req: Any = None) -> int:
    """AROUND swa_reprefill_tail_tokens: last tokens of a prompt computed even if cached."""
    allocator = getattr(self, "token_to_kv_pool_allocator", None)  # None: a simulated tree
    setup = getattr(attention_pool(allocator and allocator.get_kvcache()), "setup", None)
    return max(original(self, req), getattr(setup, "reprefill_tail", 0))


def remember_prefix(original: Callable, self: Any, reqs: list) -> Any:
    """AROUND ReqToTokenPool.alloc: where the ring of a request that gets a row begins."""
    fresh = [req for req in reqs if not req.kv.holds_kv]
    rows = original(self, reqs)
    if rows is not None:
        starts = _ring_starts.setdefault(self, {})
        for req in fresh:
            starts[req.kv.req_pool_idx] = req.prefix_len
    return rows


def ring_start(rows: Any, row: int) -> int:
    """First position in the ring of request row ``row`` of SGLang's ReqToTokenPool ``rows``."""
    return _ring_starts[rows][row]
