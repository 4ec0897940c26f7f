"""Request rows, slots and cached prefixes: where SGLang hands them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ..pool.memory_pool import oscar_pool
from ..pool.parking import parking_of
from .weight_updates import renew

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
    """AROUND swa_reprefill_tail_tokens: last tokens of a prompt computed even if cached; none for a
    turn of a session that goes on in the row it had, whose ring is as it was left."""
    session = getattr(self, "session", None)  # of UnifiedRadixCache
    if session is not None and session.will_lend_record(req):
        return original(self, req)
    allocator = getattr(self, "token_to_kv_pool_allocator", None)  # None: a simulated tree
    pool = oscar_pool(allocator and allocator.get_kvcache())
    if pool is None:
        return original(self, req)
    tail = pool.setup.reprefill_tail
    if tail and pool.parking and req is not None:
        tail = pool.parking.tail(req)
    return max(original(self, req), tail)


def refuse_beams(original: Callable, self: Any, req: Any, recv_req: Any) -> str | None:
    """AROUND BeamCoordinator.validate_and_init, which gives a message for the client."""
    if oscar_pool(self.token_to_kv_pool_allocator.get_kvcache()) is None:
        return original(self, req, recv_req)
    return (
        "Beam search is not supported with --kv-cache-dtype int2: beams exchange their tokens' "
        "slots, but not the exact windows of their request rows. Use n > 1 with sampling."
    )


def after_resume(result: Any, self: Any, recv_req: Any) -> None:
    """AFTER SchedulerWeightUpdaterManager.resume_memory_occupation: the pool's rows came back as
    anything. SGLang has emptied the prefix cache before it let go of them."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    pool = oscar_pool(self.tp_worker.model_runner.token_to_kv_pool)
    if pool is not None and (not recv_req.tags or GPU_MEMORY_TYPE_KV_CACHE in recv_req.tags):
        pool.forget_rows()
        renew(self)


def take_rows(original: Callable, self: Any, reqs: list) -> Any:
    """AROUND ReqToTokenPool.alloc: which rows, and where the ring of each begins."""
    fresh = [req for req in reqs if not req.kv.holds_kv]
    parking = parking_of(self)
    if parking:
        parking.take(self.free_slots, fresh)
    rows = original(self, reqs)
    if rows is not None:
        starts = _ring_starts.setdefault(self, {})
        for req in fresh:
            row = req.kv.req_pool_idx
            starts[row] = int(parking.low[row]) if parking else req.prefix_len
    return rows


def leave_row(original: Callable, self: Any, req: Any) -> None:
    """AROUND ReqToTokenPool.free: what the request leaves in its ring. What a session or a request
    with embeddings of its own leaves is nobody else's."""
    if parking := parking_of(self):
        row = req.kv.req_pool_idx
        # A session gives its row back as a slot without tokens.
        whole = getattr(req, "input_embeds", ()) is None and not req.skip_radix_cache_insert
        if whole:
            parking.leave(req, _ring_starts[self][row])
        else:
            parking.forget(row)
    original(self, req)


def ring_start(rows: Any, row: int) -> int:
    """First position in the ring of request row ``row`` of SGLang's ReqToTokenPool ``rows``."""
    return _ring_starts[rows][row]
