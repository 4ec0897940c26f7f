"""A rank's memory: dtype, bytes a token, request rows and the pool, where SGLang decides them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..config import OscarError, config_of_dtype
from .seam import config_of, enabled, plan_of, set_plan

logger = logging.getLogger(__name__)


def kv_cache_dtype(original: Callable, **kwargs: Any) -> Any:
    """AROUND configure_kv_cache_dtype: (resolved name or None, dtype that readers see)."""
    if config_of_dtype(kwargs["server_args_kv_cache_dtype"]) is None:
        return original(**kwargs)
    from ..hooks import verify

    verify()
    return None, kwargs["model_dtype"]


def available_bytes(result: int, self: Any, *_args: Any, **_kwargs: Any) -> int | None:
    """AFTER KVCacheConfigurator._profile_available_bytes: less what does not grow with tokens."""
    if not enabled(self):
        return None
    from ..pool.sizing import plan_for

    plan = plan_for(self, config_of(self.server_args), result)
    set_plan(self, plan)
    remaining = result - plan.fixed_bytes
    gib = 2**30
    if remaining <= 0:
        raise OscarError(
            f"exact windows of {plan.rows - 1} running requests, sink cache and scratch need "
            f"{plan.fixed_bytes / gib:.2f} GB, but only {result / gib:.2f} GB are free for the KV "
            "cache; lower --max-running-requests or --oscar-recent-tokens, or raise "
            "--mem-fraction-static"
        )
    if remaining < result / 2:
        logger.warning(
            "oscar: %.2f of %.2f GB go to exact windows, sink cache and scratch; lower "
            "--max-running-requests (%d) to hold more tokens",
            plan.fixed_bytes / gib,
            result / gib,
            plan.rows - 1,
        )
    return remaining


def cell_size(original: Callable, self: Any, kvc: Any, num_layers: int) -> int:
    """AROUND DefaultPoolConfigurator._compute_cell_size: bytes a token."""
    if not enabled(kvc):
        return original(self, kvc, num_layers)
    from ..pool.sizing import tag_bytes

    return plan_of(kvc).bytes_per_token + tag_bytes(config_of(kvc.server_args), kvc.device)


def max_num_reqs(original: Callable, self: Any, token_capacity: int) -> int:
    """AROUND KVCacheConfigurator.resolve_max_num_reqs: no more rows than were paid for."""
    if not enabled(self):
        return original(self, token_capacity)
    plan = plan_of(self)
    requests = min(original(self, token_capacity), plan.rows - 1)
    set_plan(self, replace(plan, rows=requests + 1))
    return requests


def build_pool(original: Callable, self: Any, **kwargs: Any) -> Any:
    """AROUND KVCacheConfigurator._build_mha_kv_pool and _build_hybrid_linear_kv_pool."""
    if not enabled(self):
        return original(self, **kwargs)
    from ..hooks import hooks_in_place
    from ..pool.memory_pool import OscarKVPool, oscar_pool
    from .startup import pool_setup

    kwargs["mha_pool_class"] = functools.partial(OscarKVPool, setup=pool_setup(self))
    pool = original(self, **kwargs)
    ours = oscar_pool(pool)
    if ours is None:
        raise OscarError(f"SGLang built a {type(pool).__name__} instead of the int2 pool")
    ours.log_memory(hooks_in_place())
    return pool
