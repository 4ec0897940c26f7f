"""What SGLang's objects carry of ours: read and written here only."""

from __future__ import annotations

from typing import Any

from ..config import OscarConfig, OscarError, config_of_dtype


def kv_cache_dtype(server_args: Any) -> str:
    """--kv-cache-dtype as resolved so far; what SGLang resolves lies beside the fields."""
    from sglang.srt.arg_groups.overrides import resolution_result

    found: str = resolution_result(server_args, "kv_cache_dtype")
    return found


def enabled(obj: Any) -> bool:
    """Whether int2 was asked for. ``obj`` is a ServerArgs or anything holding ``server_args``."""
    return config_of_dtype(kv_cache_dtype(getattr(obj, "server_args", obj))) is not None


def config_of(server_args: Any) -> OscarConfig:
    """Our options, which travel inside the value of --kv-cache-dtype (``config.py``)."""
    config = config_of_dtype(kv_cache_dtype(server_args))
    if config is None:
        raise OscarError("these ServerArgs do not ask for int2")
    return config
