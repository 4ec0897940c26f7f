"""What ``oscar-sglang doctor`` finds: is this machine, and this model, ready for int2?

Every check stands alone and reports instead of raising: an operator with a broken installation
wants the whole list.
"""

from __future__ import annotations

import inspect
import pkgutil
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__
from .config import DISABLE_VARIABLE, OscarError, disabled

OK, NOTE, FAIL = "ok", "note", "fail"

# Parameters each hook relies on, as they are in the pinned SGLang. __init__ is a dataclass's.
SIGNATURES = {
    "ServerArgs.add_cli_args": ("parser",),
    "ServerArgs.from_cli_args": ("args",),
    "ServerArgs.__init__": None,
    "configure_kv_cache_dtype": ("server_args_kv_cache_dtype", "model", "model_dtype", "..."),
    "KVCacheConfigurator._profile_available_bytes": ("self", "pre_model_load_memory"),
    "DefaultPoolConfigurator._compute_cell_size": ("self", "kvc", "num_layers"),
    "KVCacheConfigurator.resolve_max_num_reqs": ("self", "token_capacity"),
    "KVCacheConfigurator._build_mha_kv_pool": (
        *("self", "max_total_num_tokens", "mha_pool_class", "..."),
    ),
    "KVCacheConfigurator._build_hybrid_linear_kv_pool": (
        *("self", "max_total_num_tokens", "req_to_token_pool", "mha_pool_class"),
    ),
    "ReqToTokenPool.clear": ("self",),
    "support_triton": ("backend",),
    "get_last_loc": ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    "PagedTokenToKVPoolAllocator.alloc_extend": (
        *("self", "prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc"),
        *("extend_num_tokens", "num_new_pages"),
    ),
    "PagedTokenToKVPoolAllocator.alloc_decode": ("self", "seq_lens", "seq_lens_cpu", "last_loc"),
    "BasePrefixCache.swa_reprefill_tail_tokens": ("self",),
    "UnifiedRadixCache.swa_reprefill_tail_tokens": ("self",),
    "Scheduler.get_internal_state": ("self", "recv_req"),
    "ReqToTokenPool.alloc": ("self", "reqs"),
    "enable_fused_set_kv_buffer": ("forward_batch",),
    "SchedulerMetricsReporter._init_metrics": ("self", "tp_rank", "pp_rank", "dp_rank"),
    "SchedulerMetricsReporter.report_prefill_stats": ("self", "..."),
    "SchedulerMetricsReporter.report_decode_stats": ("self", "..."),
    "SchedulerMetricsReporter._maybe_log_idle_metrics": ("self",),
    "SchedulerMetricsReporter.reset_metrics": ("self",),
}


@dataclass(frozen=True)
class Check:
    """One line of the table. ``detail`` of a failure says what to do."""

    name: str
    status: str
    detail: str


def examine(model: Path | None = None, artifact: Path | None = None) -> Iterator[Check]:
    """All checks in order; each group is skipped where the one it needs has failed."""
    yield from versions()
    yield kill_switch()
    yield from device()
    try:
        import sglang  # noqa: F401
    except ImportError as error:
        yield Check(
            "sglang", FAIL, f"cannot be imported ({error}); pip install oscar-sglang[sglang]"
        )
    else:
        yield from hooks()
        yield from options()
        if model:
            yield served_model(model)
    if model or artifact:
        yield fits(model, artifact)


def versions() -> Iterator[Check]:
    from .hooks import SGLANG_VERSION

    yield Check("oscar-sglang", OK, f"{__version__}, Python {platform.python_version()}")
    for name, wanted in (("sglang", SGLANG_VERSION), ("torch", None), ("transformers", None)):
        found = _version(name)
        if found is None:
            yield Check(name, FAIL, f"not installed; pip install {name}" + _pin(wanted))
        elif wanted and found != wanted:
            yield Check(
                name, FAIL, f"{found}, built for {wanted}; pip install {name}{_pin(wanted)}"
            )
        else:
            yield Check(name, OK, found)
    triton = _version("triton")
    yield Check("triton", OK if triton else NOTE, triton or "not installed; a GPU needs it")


def _pin(version: str | None) -> str:
    return f"=={version}" if version else ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def kill_switch() -> Check:
    if disabled():
        return Check("plugin", FAIL, f"switched off by {DISABLE_VARIABLE}; unset it to use int2")
    groups = metadata.entry_points(group="sglang.srt.plugins")
    if not any(e.value.startswith("oscar_sglang.") for e in groups):
        return Check("plugin", FAIL, "no entry point sglang.srt.plugins; reinstall oscar-sglang")
    return Check("plugin", OK, "installed, found by SGLang's launchers")


def device() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check(
            "GPU", NOTE, "none: int2 serves on the CPU (python -m oscar_sglang.launch_server)"
        )
        yield Check("kernels", NOTE, "not tested: they need a GPU")
        return
    major, minor = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    detail = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {memory:.0f} GiB"
    if major < 8:
        yield Check("GPU", FAIL, f"{detail}; the kernels need sm_80 or newer")
        return
    yield Check("GPU", OK, detail)
    from .kernels import nvrtc

    if nvrtc.available():
        yield Check("NVRTC", OK, ".".join(map(str, nvrtc.version())))
    else:
        yield Check("NVRTC", FAIL, "no libnvrtc; it comes with torch's CUDA wheels")
    yield from kernels(("CUDA", "Triton") if nvrtc.available() else ("Triton",))


def kernels(forms: tuple[str, ...]) -> Iterator[Check]:
    """Compile the kernels and compare them with the reference (``selftest``)."""
    from . import selftest

    for form in forms:
        name = f"{form} kernels"
        try:
            found = selftest.compare("cuda", triton_only=form == "Triton")
        except Exception as error:  # whatever compilers and drivers come up with
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Check(name, FAIL, f"do not compile or run here: {text}")
        else:
            yield Check(name, OK if found.sound else FAIL, str(found))


def hooks() -> Iterator[Check]:
    """Each target as SGLang has it, then whether SGLang's plugin loader puts ours in place."""
    from .hooks import HOOKS, missing_hooks

    for hook in HOOKS:
        name = short(hook.target)
        yield Check(f"hook {name}", *signature(hook.target, SIGNATURES[name]))
    if disabled():
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()
    missing = missing_hooks()
    if missing:
        yield Check(
            "hooks in place", FAIL, f"missing: {', '.join(missing)}; reinstall both packages"
        )
    else:
        yield Check("hooks in place", OK, f"{len(HOOKS)} hooks and the attention backend")


def short(target: str) -> str:
    """``Class.method`` or ``function`` of a dotted path."""
    *_, owner, name = target.split(".")
    return f"{owner}.{name}" if owner[0].isupper() else name


def signature(target: str, expected: tuple[str, ...] | None) -> tuple[str, str]:
    """Status and detail of one target; "..." in ``expected``: more may follow."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        return FAIL, f"target is gone: {error}"
    if expected is None:
        return OK, "found"
    found = tuple(inspect.signature(function).parameters)
    cut = expected[:-1] if expected[-1] == "..." else expected
    if found[: len(cut)] != cut or (cut == expected and len(found) != len(cut)):
        return FAIL, f"takes ({', '.join(found)}), expected ({', '.join(expected)})"
    return OK, f"({', '.join(found)})"


def options() -> Iterator[Check]:
    """Settings of the environment that int2 would refuse."""
    from types import SimpleNamespace

    from .refusals import refuse_options

    yield _refusal("environment", refuse_options, SimpleNamespace())


def served_model(model: Path) -> Check:
    from sglang.srt.configs.model_config import ModelConfig

    from .refusals import refuse_model

    try:
        config = ModelConfig(str(model))
    except Exception as error:  # whatever transformers or SGLang make of a strange folder
        return Check("model", FAIL, f"SGLang cannot read {model}: {error}".splitlines()[0])
    return _refusal(f"model {', '.join(config.hf_config.architectures)}", refuse_model, config)


def _refusal(name: str, refuse: Any, argument: Any) -> Check:
    try:
        refuse(argument)
    except OscarError as error:
        return Check(name, FAIL, f"refused: {error}")
    return Check(name, OK, "nothing that int2 would refuse")


def fits(model: Path | None, file: Path | None) -> Check:
    """Whether the artifact is sound and, with a model, made for it."""
    from . import artifact as art
    from .calibration.auto import artifact_path
    from .config import DEFAULT_CODEC

    try:
        fingerprint = art.Fingerprint.of(model) if model else None
        if file is None:
            file = artifact_path(fingerprint, DEFAULT_CODEC)
            if not file.exists():
                return Check("artifact", NOTE, f"none yet; the first start calibrates into {file}")
        artifact = art.load(file)
        if fingerprint:
            art.check(artifact, fingerprint)
    except (art.ArtifactError, art.FingerprintError) as error:
        return Check("artifact", FAIL, str(error))
    fit = "fits the model" if model else "sound (give --model to see whether it fits)"
    return Check("artifact", OK, f"codec {artifact.codec}, id {artifact.id}, {fit}")
