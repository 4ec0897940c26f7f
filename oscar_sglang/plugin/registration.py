"""The rows of ``hooks.py`` put in place, and the check that they are.

SGLang only logs a plugin or hook that fails and would then serve a BF16 cache, so ``verify``
checks, in every process that is about to use int2, that each row is really in place.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

from .. import hooks
from ..config import (
    ATTENTION_BACKEND,
    DISABLE_VARIABLE,
    KV_CACHE_DTYPE,
    OscarError,
    disabled,
    fold_options,
)
from ..pool.sglang_types import ModelRunner
from .ledger import Sources, problems, same_release
from .seam import config_of, enabled

logger = logging.getLogger(__name__)


def found_problems(sources: Sources) -> list[str]:
    """Rows that ``sources`` does not have as they are here, a sentence each."""
    return problems(hooks.HOOKS, hooks.READS, sources)


@functools.cache
def unfit() -> str | None:
    """Why the installed SGLang cannot serve int2, or None.

    The pinned version is known to fit; of a newer one the rows decide, and an older one is refused.
    """
    import sglang

    version = sglang.__version__
    if same_release(version, hooks.SGLANG_VERSION) == 0:
        return None
    advice = (
        f"pip install sglang=={hooks.SGLANG_VERSION}, or drop --kv-cache-dtype {KV_CACHE_DTYPE}"
    )
    built = f"--kv-cache-dtype {KV_CACHE_DTYPE} is built for sglang {hooks.SGLANG_VERSION}"
    if same_release(version, hooks.SGLANG_VERSION) < 0:
        return f"{built}, found the older {version}; {advice}"
    if broken := found_problems(Sources.installed()):
        return f"{built}; {version} has changed what it relies on: {'; '.join(broken)}. {advice}"
    return None


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``; SGLang applies the hooks afterwards.

    With an SGLang that does not fit only the argument hooks go in: they refuse int2 with a message.
    """
    if disabled():
        # int2 and --oscar-* are then unknown to SGLang's own parser: refused, not served in BF16.
        logger.warning("oscar: switched off by %s, the plugin does nothing", DISABLE_VARIABLE)
        return
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted = hooks.HOOKS
    if unfit():
        wanted = tuple(h for h in hooks.HOOKS if ".ServerArgs." in h.target)
    else:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import add_attention_backend_choices

        register_attention_backend(ATTENTION_BACKEND)(_create_backend)
        add_attention_backend_choices([ATTENTION_BACKEND])
        if sglang.__version__ != hooks.SGLANG_VERSION:
            logger.warning(
                "oscar: tested with sglang %s; %s has all that int2 relies on, but was not tested",
                hooks.SGLANG_VERSION,
                sglang.__version__,
            )
    for hook in wanted:
        HookRegistry.register(hook.target, hook.call, HookType[hook.kind])
    if _launches():
        _take_engine_keywords()


def _launches() -> bool:
    """Whether an ``Engine`` may be made here: worker processes need not import it."""
    return multiprocessing.parent_process() is None


def _take_engine_keywords() -> None:
    """``Engine(oscar_...=...)``: its arguments' class is an attribute, which no hook replaces."""
    from sglang.srt.entrypoints.engine import Engine

    if not hasattr(Engine.server_args_class, "__wrapped__"):
        Engine.server_args_class = engine_arguments(Engine.server_args_class)


def engine_arguments(server_args_class: type) -> Callable[..., Any]:
    """What ``Engine.server_args_class`` becomes: takes ``oscar_*`` keywords too."""

    @functools.wraps(server_args_class, updated=())
    def make(**kwargs: Any) -> Any:
        return server_args_class(**fold_options(kwargs))

    return staticmethod(make)


def _create_backend(runner: ModelRunner) -> Any:
    if not enabled(runner):
        raise OscarError(
            f"--attention-backend {ATTENTION_BACKEND} is chosen by --kv-cache-dtype "
            f"{KV_CACHE_DTYPE}; give that instead"
        )
    config = config_of(runner.server_args)
    if runner.device == "cpu":
        from ..pool.cpu_backend import OscarAttnBackend

        backend: Any = OscarAttnBackend(runner)
    else:
        from ..health.selftest import check_backend
        from ..pool.gpu_backend import OscarGpuBackend

        backend = OscarGpuBackend(runner)
        check_backend(backend.decode_attention, backend.views)
    if config.debug_tags:
        from ..watch.debug_tags import watch_reads, watch_steps

        if runner.device == "cpu":
            watch_reads(backend)
        else:
            watch_steps(backend, config.debug_tags_every)
    return backend


def missing_hooks() -> list[str]:
    """Targets of ``HOOKS``, and entries of registries, that are not in place in this process."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [
        h.target
        for h in hooks.HOOKS
        if h.target not in HookRegistry._patched
        or all(f is not h.call for _, f, _ in HookRegistry._hooks[h.target])
    ]
    if ATTENTION_BACKENDS.get(ATTENTION_BACKEND) is not _create_backend:
        missing.append(f"attention backend {ATTENTION_BACKEND}")
    return missing


def hooks_in_place() -> tuple[int, int]:
    """How many are in place, and how many there should be (with the attention backend)."""
    total = len(hooks.HOOKS) + 1
    return total - len(missing_hooks()), total


def verify() -> None:
    """Stop instead of serving BF16: the SGLang must fit, every hook must be in place."""
    if reason := unfit():
        raise OscarError(reason)
    if missing := missing_hooks():
        raise OscarError(
            f"{len(missing)} of {len(hooks.HOOKS) + 1} hooks are not in place "
            f"({', '.join(missing)}); reinstall oscar-sglang and sglang=={hooks.SGLANG_VERSION}, "
            "or drop --kv-cache-dtype int2"
        )
