"""THE patch surface: every touch on SGLang is one row of ``HOOKS`` (or the backend registry).

SGLang only logs a plugin or hook that fails and would then serve a BF16 cache, so ``verify``
checks, in every process that is about to use int2, that each row is really in place.

One long file on purpose: a hook's function, why it is there and until when are read together when
SGLang changes, and what a hook does beyond choosing is in other modules.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from .config import (
    ATTENTION_BACKEND,
    DISABLE_VARIABLE,
    KV_CACHE_DTYPE,
    OscarConfig,
    OscarError,
    add_arguments,
    disabled,
    option_names,
)

logger = logging.getLogger(__name__)

SGLANG_VERSION = "0.5.17"

_cli_options: ContextVar[dict[str, Any] | None] = ContextVar("oscar_cli_options", default=None)


@dataclass(frozen=True)
class Hook:
    """One patched function: ``kind`` is SGLang's HookType name, ``until`` when it can go."""

    target: str
    kind: str
    function: Callable
    why: str
    until: str


def enabled(obj: Any) -> bool:
    """Whether int2 was asked for. ``obj`` is a ServerArgs or anything holding ``server_args``."""
    return getattr(getattr(obj, "server_args", obj), "kv_cache_dtype", None) == KV_CACHE_DTYPE


def config_of(server_args: Any) -> OscarConfig:
    config = getattr(server_args, "oscar_config", None)
    if config is None:
        raise OscarError(
            "these ServerArgs were copied without their oscar options; pass the options again "
            "(Ray and data-parallel copies are not supported yet)"
        )
    return config


# -- command line and arguments ----------------------------------------------------------------


def _add_cli_args(result: Any, parser: Any) -> None:
    choices = parser._option_string_actions["--kv-cache-dtype"].choices
    if KV_CACHE_DTYPE not in choices:
        choices.append(KV_CACHE_DTYPE)
    add_arguments(parser)


def _from_cli_args(original: Callable, cls: type, args: Any) -> Any:
    token = _cli_options.set({name: getattr(args, name, None) for name in option_names()})
    try:
        return original(cls, args)
    except OscarError as error:
        sys.exit(f"oscar: {error}")
    finally:
        _cli_options.reset(token)


def _init_server_args(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    options = {k: kwargs.pop(k) for k in list(kwargs) if k.startswith("oscar_")}
    options = {**(_cli_options.get() or {}), **options}
    if kwargs.get("kv_cache_dtype") != KV_CACHE_DTYPE:
        if given := [k for k, v in options.items() if v is not None]:
            raise OscarError(
                f"{', '.join(given)} given without --kv-cache-dtype {KV_CACHE_DTYPE}; add it "
                "or drop them"
            )
        return original(self, *args, **kwargs)

    from .startup import finish_arguments, prepare_arguments

    check_version()
    verify()
    config = OscarConfig.from_options(options)
    original(self, *args, **prepare_arguments(kwargs, config))
    self.override("oscar", oscar_config=finish_arguments(self, config))


# -- pool --------------------------------------------------------------------------------------


def plan_of(kvc: Any) -> Any:
    """The rank's ``MemoryPlan``; kept on its ModelConfig, as KVCacheConfigurator has slots."""
    return kvc.model_config.oscar_plan


def _set_plan(kvc: Any, plan: Any) -> None:
    kvc.model_config.oscar_plan = plan


def _kv_cache_dtype(original: Callable, **kwargs: Any) -> Any:
    if kwargs["server_args_kv_cache_dtype"] != KV_CACHE_DTYPE:
        return original(**kwargs)
    check_version()
    verify()
    return None, kwargs["model_dtype"]


def _available_bytes(result: int, self: Any, *_args: Any, **_kwargs: Any) -> int | None:
    if not enabled(self):
        return None
    from .sizing import plan_for

    plan = plan_for(self, config_of(self.server_args), result)
    _set_plan(self, plan)
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


def _cell_size(original: Callable, self: Any, kvc: Any, num_layers: int) -> int:
    if not enabled(kvc):
        return original(self, kvc, num_layers)
    from .sizing import tag_bytes

    return plan_of(kvc).bytes_per_token + tag_bytes(config_of(kvc.server_args), kvc.device)


def _max_num_reqs(original: Callable, self: Any, token_capacity: int) -> int:
    if not enabled(self):
        return original(self, token_capacity)
    plan = plan_of(self)
    requests = min(original(self, token_capacity), plan.rows - 1)
    _set_plan(self, replace(plan, rows=requests + 1))
    return requests


def _build_pool(original: Callable, self: Any, **kwargs: Any) -> Any:
    if not enabled(self):
        return original(self, **kwargs)
    from .memory_pool import OscarKVPool, oscar_pool
    from .startup import pool_setup

    kwargs["mha_pool_class"] = functools.partial(OscarKVPool, setup=pool_setup(self))
    pool = original(self, **kwargs)
    if oscar_pool(pool) is None:
        raise OscarError(f"SGLang built a {type(pool).__name__} instead of the int2 pool")
    return pool


def _clear_requests(original: Callable, self: Any) -> None:
    generation = self.req_generation.clone()
    original(self)
    self.req_generation.copy_(generation)


# -- run time ----------------------------------------------------------------------------------


def _fused_store(original: Callable, forward_batch: Any) -> bool:
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    from .memory_pool import oscar_pool

    return oscar_pool(get_token_to_kv_pool()) is None and original(forward_batch)


def _reprefill_tail(original: Callable, self: Any) -> int:
    """Tokens at the end of a prompt that are computed even if they are cached."""
    from .hybrid import attention_pool

    allocator = getattr(self, "token_to_kv_pool_allocator", None)  # None: a simulated tree
    setup = getattr(attention_pool(allocator and allocator.get_kvcache()), "setup", None)
    return max(original(self), getattr(setup, "reprefill_tail", 0))


def _support_triton(original: Callable, backend: str) -> bool:
    return original("torch_native" if backend == ATTENTION_BACKEND and _on_cpu() else backend)


def _last_loc(original: Callable, req_to_token: Any, rows: Any, prefix_lens: Any) -> Any:
    if req_to_token.device.type != "cpu":
        return original(req_to_token, rows, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, rows, prefix_lens)


def _on_cpu() -> bool:
    from sglang.srt.utils import is_cpu

    return is_cpu()


def _lazy(module: str, name: str) -> Callable:
    """A function of a module that imports torch: loaded when SGLang first calls it."""

    def hook(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f".{module}", __package__), name)(*args, **kwargs)

    return hook


_ARGS = "sglang.srt.server_args.ServerArgs."
_KVC = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter."

HOOKS = (
    Hook(
        _ARGS + "add_cli_args",
        "AFTER",
        _add_cli_args,
        why="--kv-cache-dtype has a closed choice list; plugins have no place for flags",
        until="SGLang lets plugins add flags",
    ),
    Hook(
        _ARGS + "from_cli_args",
        "AROUND",
        _from_cli_args,
        why="it drops flags that are not ServerArgs fields",
        until="SGLang lets plugins add flags",
    ),
    Hook(
        _ARGS + "__init__",
        "AROUND",
        _init_server_args,
        why="the one point that the command line and Engine(...) share, before weights load",
        until="SGLang has a validation hook for plugins",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype",
        "AROUND",
        _kv_cache_dtype,
        why="closed if-chain over dtype names",
        until="SGLang has a KV dtype registry",
    ),
    Hook(
        _KVC + "_profile_available_bytes",
        "AFTER",
        _available_bytes,
        why="windows, sink cache and scratch are paid before tokens are counted",
        until="pools can declare a fixed cost",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "AROUND",
        _cell_size,
        why="bytes per token are derived from the dtype's item size",
        until="pools can declare their bytes per token",
    ),
    Hook(
        _KVC + "resolve_max_num_reqs",
        "AROUND",
        _max_num_reqs,
        why="every request row owns exact windows, so rows are part of the memory plan",
        until="pools can declare a cost per request",
    ),
    *(
        Hook(
            _KVC + name,
            "AROUND",
            _build_pool,
            why=f"the pool class{whose} is chosen in a closed if-chain",
            until="SGLang has a pool registry",
        )
        for name, whose in (
            ("_build_mha_kv_pool", ""),
            ("_build_hybrid_linear_kv_pool", " of a hybrid model's attention layers"),
        )
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.clear",
        "AROUND",
        _clear_requests,
        why="/flush_cache resets req_generation to 0, so a later request could look like the "
        "one that held its row before",
        until="req_generation is monotonic",
    ),
    Hook(
        "sglang.srt.utils.common.support_triton",
        "AROUND",
        _support_triton,
        why="backends it does not know by name count as able to launch Triton, also on a CPU",
        until="the backend answers for itself",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        "AROUND",
        _last_loc,
        why="same decision by name, in another place",
        until="the backend answers for itself",
    ),
    *(
        Hook(
            f"sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.{name}",
            "AROUND",
            _lazy("cpu_paging", name),
            why="page sizes above 1 launch Triton kernels, also on a CPU",
            until="SGLang's paged allocator has a form for the CPU",
        )
        for name in ("alloc_extend", "alloc_decode")
    ),
    Hook(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        "AROUND",
        _fused_store,
        why="Qwen3-MoE and others store K and V while they apply RoPE, if the pool says bfloat16",
        until="SGLang asks the pool",
    ),
    *(
        Hook(
            f"sglang.srt.mem_cache.{tree}.swa_reprefill_tail_tokens",
            "AROUND",
            _reprefill_tail,
            why="--oscar-prefix-window recompute: where SGLang caps a match for its own rings",
            until="a pool can ask for it",
        )
        for tree in ("base_prefix_cache.BasePrefixCache", "unified_radix_cache.UnifiedRadixCache")
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "AFTER",
        _lazy("metrics", "after_internal_state"),
        why="/server_info shows tokens and bytes per segment",
        until="SGLang lets pools report their state",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc",
        "AROUND",
        _lazy("metrics", "remember_prefix"),
        why="exact tokens of a request are counted from where its ring begins",
        until="SGLang keeps the first prefix length of a request",
    ),
    Hook(
        _REPORTER + "_init_metrics",
        "AFTER",
        _lazy("metrics", "after_init"),
        why="our gauges are registered beside SGLang's",
        until="SGLang lets pools report their state",
    ),
    *(
        Hook(
            _REPORTER + name,
            "AFTER",
            _lazy("metrics", "after_report"),
            why="our gauges and log line at SGLang's own interval",
            until="SGLang lets pools report their state",
        )
        for name in ("report_prefill_stats", "report_decode_stats", "_maybe_log_idle_metrics")
    ),
    Hook(
        _REPORTER + "reset_metrics",
        "AFTER",
        _lazy("metrics", "after_reset"),
        why="/flush_cache empties the cache without any report",
        until="SGLang lets pools report their state",
    ),
)


def check_version() -> None:
    import sglang

    if sglang.__version__ != SGLANG_VERSION:
        raise OscarError(
            f"--kv-cache-dtype int2 is built for sglang {SGLANG_VERSION}, found "
            f"{sglang.__version__}; pip install sglang=={SGLANG_VERSION}, or drop the flag"
        )


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``; SGLang applies the hooks afterwards.

    With another SGLang only the argument hooks go in: they refuse int2 with a message.
    """
    if disabled():
        # int2 and --oscar-* are then unknown to SGLang's own parser: refused, not served in BF16.
        logger.warning("oscar: switched off by %s, the plugin does nothing", DISABLE_VARIABLE)
        return
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = HOOKS
    if sglang.__version__ != SGLANG_VERSION:
        hooks = tuple(h for h in HOOKS if h.target.startswith(_ARGS))
    else:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import add_attention_backend_choices

        register_attention_backend(ATTENTION_BACKEND)(_create_backend)
        add_attention_backend_choices([ATTENTION_BACKEND])
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def _create_backend(runner: Any) -> Any:
    if not enabled(runner):
        raise OscarError(
            f"--attention-backend {ATTENTION_BACKEND} is chosen by --kv-cache-dtype "
            f"{KV_CACHE_DTYPE}; give that instead"
        )
    from .memory_pool import oscar_pool

    if oscar_pool(runner.token_to_kv_pool) is None:
        raise OscarError(
            f"SGLang built a {type(runner.token_to_kv_pool).__name__} for this model, which int2 "
            "does not support; drop --kv-cache-dtype int2"
        )
    if runner.device == "cpu":
        from .attention_backend import OscarAttnBackend

        return OscarAttnBackend(runner)
    from .gpu_backend import OscarGpuBackend

    backend = OscarGpuBackend(runner)
    backend.check_kernels()
    return backend


def missing_hooks() -> list[str]:
    """Targets of ``HOOKS`` that are not in place in this process."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [
        h.target
        for h in HOOKS
        if h.target not in HookRegistry._patched
        or all(f is not h.function for _, f, _ in HookRegistry._hooks[h.target])
    ]
    if ATTENTION_BACKENDS.get(ATTENTION_BACKEND) is not _create_backend:
        missing.append(f"attention backend {ATTENTION_BACKEND}")
    return missing


def verify() -> None:
    """Stop instead of serving BF16: every hook must be in place."""
    if missing := missing_hooks():
        raise OscarError(
            f"{len(missing)} of {len(HOOKS) + 1} hooks are not in place ({', '.join(missing)}); "
            f"reinstall oscar-sglang and sglang=={SGLANG_VERSION}, or drop --kv-cache-dtype int2"
        )
