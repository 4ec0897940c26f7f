"""Our flags on SGLang's command line and in ``sglang.Engine``, and its own arguments resolved."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from ..config import KV_CACHE_DTYPE, OscarError, add_arguments, fold_options, option_names
from .seam import config_of, enabled


def add_cli_args(result: Any, parser: ArgumentParser) -> None:
    """AFTER ServerArgs.add_cli_args."""
    choices: Any = parser._option_string_actions["--kv-cache-dtype"].choices
    if KV_CACHE_DTYPE not in choices:
        choices.append(KV_CACHE_DTYPE)
    add_arguments(parser)


def from_cli_args(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
    """AROUND ServerArgs.from_cli_args; mistakes end the process with their message alone."""
    given = {name: getattr(args, name, None) for name in option_names()}
    with _exit_on_mistake():
        folded = fold_options({"kv_cache_dtype": args.kv_cache_dtype, **given})
        server_args = original(cls, Namespace(**{**vars(args), **folded}))
    server_args._oscar_cli = True  # an underscore name is bookkeeping to SGLang: kept, not a field
    return server_args


def resolve(original: Callable[..., Any], self: Any) -> None:
    """AROUND ServerArgs.resolve_once, in the launching process, before any weight is loaded.

    What int2 decides is declared before SGLang's own steps, which then build on it; what they
    decided is checked after the last of them.
    """
    if getattr(self, "_resolution_finished", False) or not _asks_for_int2(self):
        original(self)
        return
    with _exit_on_mistake(getattr(self, "_oscar_cli", False)):
        from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

        from .registration import verify
        from .startup import choose, explain, finish_arguments

        verify()
        view = resolving_view(self)
        chosen = choose(view, config_of(self))
        declare_resolution(self, "oscar", **chosen.arguments)
        try:
            original(self)
        except Exception as error:
            explain(self, view, error)
            raise
        config = finish_arguments(self, view, config_of(self), chosen)
        declare_resolution(self, "oscar", kv_cache_dtype=config.dtype)


def _asks_for_int2(server_args: Any) -> bool:
    with _exit_on_mistake(getattr(server_args, "_oscar_cli", False)):
        return enabled(server_args)


class _exit_on_mistake:
    """End the process with an ``OscarError``'s message where a traceback would bury it."""

    def __init__(self, active: bool = True) -> None:
        self.active = active

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if self.active and isinstance(error, OscarError):
            sys.exit(f"oscar: {error}")
