"""A rank's memory: dtype, bytes a token, request rows and the pool, where SGLang decides them.

SGLang's ``KVCacheConfigurator`` profiles the memory, asks what a token takes and how many requests
there may be, and builds the pool. One ``Rank`` answers all of it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..artifact import file as art
from ..config import OscarError, config_of_dtype, portable_kernels
from ..events import log_event
from ..pool.hybrid import attention_layer_ids
from ..pool.sglang_types import Configurator
from ..pool.sizing import ROW_SLACK, make_plan
from ..pool.varlen import workspace_bytes
from ..watch.tags import BYTES_PER_SLOT
from .registration import hooks_in_place, verify
from .seam import config_of, enabled

if TYPE_CHECKING:
    from ..kernels.decode import DecodeAttention
    from ..pool.memory_pool import PoolSetup

logger = logging.getLogger(__name__)

# From the memory profile to the pool, by ModelConfig: a KVCacheConfigurator has slots and takes
# neither an attribute nor a weak reference.
_ranks: WeakKeyDictionary[Any, Rank] = WeakKeyDictionary()


class Rank:
    """What int2 sets up on one rank.

    plan       windows, sinks and scratch; ``limit_requests`` is the last to change it
    attention  the kernels' ``DecodeAttention``, None on a CPU; its buffers come with the pool
    """

    def __init__(self, kvc: Configurator, budget_bytes: int) -> None:
        """``budget_bytes``: what SGLang found for the whole KV cache."""
        from sglang.srt.runtime_context import get_parallel, get_schedule

        self.kvc, self.budget_bytes, self.config = kvc, budget_bytes, config_of(kvc.server_args)
        self.artifact = art.load(Path(self.config.artifact))
        self.parallel, schedule = get_parallel(), get_schedule()
        self.layer_ids = attention_layer_ids(kvc)
        requested, model = schedule.max_running_requests, kvc.model_config
        self.plan = make_plan(
            self.config,
            layers=len(self.layer_ids),
            kv_heads=model.get_num_kv_heads(self.parallel.attn_tp_size),
            head_dim=model.head_dim,
            itemsize=kvc.model_dtype.itemsize,
            budget_bytes=budget_bytes,
            max_running_requests=requested and max(1, requested // kvc.attn_dp_size),
            device=kvc.device,
            context_length=model.context_len,
            max_total_tokens=schedule.max_total_tokens,
            widths=self.artifact.widths,
            hybrid=kvc.mambaish_config is not None,
        )
        self.attention: DecodeAttention | None = None
        if kvc.device != "cpu":
            self.attention = self._decode_attention(schedule.page_size)
            workspace = self.attention.num_bytes + workspace_bytes(self.config.prefill_attention)
            self.plan = replace(self.plan, workspace_bytes=workspace)

    def _decode_attention(self, page_size: int) -> DecodeAttention:
        from ..kernels.decode import DecodeAttention

        history = self.plan.history
        return DecodeAttention(
            heads=self.kvc.model_config.num_attention_heads // self.parallel.attn_tp_size,
            kv_heads=history.kv_heads,
            head_dim=history.head_dim,
            dtype=self.kvc.model_dtype,
            windows=self.plan.windows,
            page_size=page_size,
            max_batch=self.plan.rows - 1,
            device=self.kvc.device,
            block=history.block,
            triton_only=portable_kernels(),
        )

    def token_bytes(self) -> int:
        """Bytes for the history of all tokens. OscarError if nothing remains for it."""
        plan, gib = self.plan, 2**30
        remaining = self.budget_bytes - plan.fixed_bytes
        if remaining <= 0:
            raise OscarError(
                f"exact windows of {plan.requests} running requests, sink cache and scratch need "
                f"{plan.fixed_bytes / gib:.2f} GB, but only {self.budget_bytes / gib:.2f} GB are "
                "free for the KV cache; lower --max-running-requests or --oscar-recent-tokens, or "
                "raise --mem-fraction-static"
            )
        if remaining < self.budget_bytes / 2:
            logger.warning(
                "oscar: %.2f of %.2f GB go to exact windows, sink cache and scratch; lower "
                "--max-running-requests (%d) to hold more tokens",
                plan.fixed_bytes / gib,
                self.budget_bytes / gib,
                plan.requests,
            )
        return remaining

    def bytes_per_token(self) -> int:
        """With the records of ``--oscar-debug-tags``, which lie beside the pool."""
        tags = self.config.debug_tags and self.kvc.device != "cpu"
        return self.plan.bytes_per_token + (BYTES_PER_SLOT if tags else 0)

    def limit_requests(self, most: int) -> int:
        """Running requests where SGLang would take ``most``: no more than were paid for."""
        requests = min(most, self.plan.requests)
        self.plan = replace(self.plan, rows=requests + 1 + self.plan.parked_rows)
        return requests

    def reprefill_tail(self) -> int:
        """Last tokens of a prompt computed even if cached, unless their window is found. A hybrid
        model's prefixes end where a state was kept, seldom that many tokens earlier: there "park"
        only takes what it finds."""
        window = self.config.prefix_window
        hybrid = self.kvc.mambaish_config is not None
        wanted = window == "recompute" or (window == "park" and not hybrid)
        return self.config.recent_tokens if wanted else 0

    def pool_setup(self) -> PoolSetup:
        """The pool's set-up; says in the log what it is."""
        from ..pool.memory_pool import PoolSetup

        config, plan, artifact = self.config, self.plan, self.artifact
        rank, ranks = self.parallel.attn_tp_rank, self.parallel.attn_tp_size
        chosen = artifact.spec.meta.chosen(artifact.options)
        log_event(
            logger,
            "pool",
            codec=config.codec,
            artifact=artifact.id,
            rank=f"{rank}/{ranks}",
            bytes_per_token=plan.bytes_per_token,
            bf16_bytes_per_token=plan.bf16_bytes_per_token,
            sink=plan.windows.n_sink,
            recent=plan.windows.n_recent,
            request_rows=plan.rows,
            parked_rows=plan.parked_rows,
            scratch_tokens=plan.scratch_tokens,
            sink_cache_rows=plan.sink_cache_rows,
            prefix_window=config.prefix_window,
            **{f"{config.codec}_{name}": value for name, value in chosen.items()},
        )
        return PoolSetup(
            plan=plan,
            spec=artifact.spec,
            specs=artifact.specs,
            params=art.shard(artifact, rank, ranks),
            artifact_id=artifact.id,
            fingerprint=artifact.fingerprint,
            data_free="data_hash" not in artifact.provenance and artifact.spec.needs_data,
            layer_ids=tuple(self.layer_ids),
            context=self.kvc.model_config.context_len + ROW_SLACK,
            prefix_window=config.prefix_window or "reuse",
            reprefill_tail=self.reprefill_tail(),
            decode_attention=self.attention,
            prefill_attention=config.prefill_attention,
        )


def kv_cache_dtype(original: Callable[..., Any], **kwargs: Any) -> Any:
    """AROUND configure_kv_cache_dtype: (resolved name or None, dtype that readers see).

    Also the first moment at which the model is built and no memory is spent on its cache."""
    if config_of_dtype(kwargs["server_args_kv_cache_dtype"]) is None:
        return original(**kwargs)
    from ..pool.cpu_backend import refuse_kinds

    verify()
    if kwargs["model"] is not None:
        refuse_kinds(kwargs["model"])
    return None, kwargs["model_dtype"]


def available_bytes(result: int, self: Configurator, *_args: Any, **_kwargs: Any) -> int | None:
    """AFTER KVCacheConfigurator._profile_available_bytes: less what does not grow with tokens."""
    if not enabled(self):
        return None
    rank = _ranks[self.model_config] = Rank(self, result)
    return rank.token_bytes()


def cell_size(original: Callable[..., Any], self: Any, kvc: Configurator, num_layers: int) -> int:
    """AROUND DefaultPoolConfigurator._compute_cell_size: bytes a token."""
    if not enabled(kvc):
        size: int = original(self, kvc, num_layers)
        return size
    return _ranks[kvc.model_config].bytes_per_token()


def max_num_reqs(original: Callable[..., Any], self: Configurator, token_capacity: int) -> int:
    """AROUND KVCacheConfigurator.resolve_max_num_reqs: no more rows than were paid for."""
    most: int = original(self, token_capacity)
    return _ranks[self.model_config].limit_requests(most) if enabled(self) else most


def request_rows(original: Callable[..., Any], self: Configurator, *, max_num_reqs: int) -> Any:
    """AROUND KVCacheConfigurator._build_req_to_token_pool: with rows that only keep a ring."""
    rank = _ranks.get(self.model_config) if enabled(self) else None
    return original(self, max_num_reqs=max_num_reqs + (rank.plan.parked_rows if rank else 0))


def build_pool(original: Callable[..., Any], self: Configurator, **kwargs: Any) -> Any:
    """AROUND KVCacheConfigurator._build_mha_kv_pool and _build_hybrid_linear_kv_pool."""
    if not enabled(self):
        return original(self, **kwargs)
    from ..pool.memory_pool import OscarKVPool, oscar_pool

    setup = _ranks.pop(self.model_config).pool_setup()
    kwargs["mha_pool_class"] = functools.partial(OscarKVPool, setup=setup)
    pool = original(self, **kwargs)
    ours = oscar_pool(pool)
    if ours is None:
        raise OscarError(f"SGLang built a {type(pool).__name__} instead of the int2 pool")
    ours.log_memory(hooks_in_place())
    return pool
