"""What ``oscar-sglang doctor`` finds: is this machine, and this model, ready for int2?

Every check stands alone and reports instead of raising: an operator with a broken installation
wants the whole list.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import DISABLE_VARIABLE, OscarError, disabled
from ..plugin.ledger import Sources, changes, hook_problem, imports, problems, read_problem
from ..plugin.model_folder import NamedModel

OK, NOTE, FAIL = "ok", "note", "fail"


@dataclass(frozen=True)
class Check:
    """One line of the table. ``detail`` of a failure says what to do."""

    name: str
    status: str
    detail: str


def examine(model: NamedModel | None = None, artifact: Path | None = None) -> Iterator[Check]:
    """All checks in order; each group is skipped where the one it needs has failed."""
    yield from versions()
    yield kill_switch()
    yield from device()
    try:
        import sglang  # noqa: F401
    except ImportError as error:
        yield Check(
            "sglang",
            FAIL,
            f"cannot be imported ({error}); pip install '.[sglang]' in this package's checkout",
        )
    else:
        yield from hooks()
        yield from options()
        if model:
            served = served_model(model)
            yield served
            if served.status == FAIL and model.on_a_hub:
                model = None  # whose weights need not be fetched
    if model or artifact:
        yield fits(model, artifact)


def versions() -> Iterator[Check]:
    from ..hooks import SGLANG_VERSION
    from ..plugin.registration import unfit

    yield Check("oscar-sglang", OK, f"{__version__}, Python {platform.python_version()}")
    for name in ("sglang", "torch", "transformers"):
        found = _version(name)
        if found is None:
            pin = f"=={SGLANG_VERSION}" if name == "sglang" else ""
            yield Check(name, FAIL, f"not installed; pip install {name}{pin}")
        elif name == "sglang" and (reason := unfit()):
            yield Check(name, FAIL, reason)
        elif name == "sglang" and found != SGLANG_VERSION:
            yield Check(name, NOTE, f"{found}: fits, but all tests are from {SGLANG_VERSION}")
        else:
            yield Check(name, OK, found)
    triton = _version("triton")
    yield Check("triton", OK if triton else NOTE, triton or "not installed; a GPU needs it")


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
    from ..kernels import nvrtc

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
    """Each row of the ledger as the installed SGLang has it, then whether SGLang's plugin loader
    puts the hooks in place."""
    from ..hooks import HOOKS
    from ..plugin.registration import missing_hooks

    yield from surface(Sources.installed())
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


def surface(sources: Sources) -> Iterator[Check]:
    """The whole patch surface, held against one SGLang's source."""
    from ..hooks import HOOKS, READS

    for hook in HOOKS:
        problem = hook_problem(hook, sources)
        detail = f"({', '.join(hook.takes)})"
        yield Check(f"hook {hook.name}", FAIL if problem else OK, problem or detail)
    for read in READS:
        problem = read_problem(read, sources)
        name = read.owner.removesuffix(".*").rpartition(".")[2]
        detail = f"{len(read.attributes)} attributes, by {read.by}"
        yield Check(f"reads {name}", FAIL if problem else OK, problem or detail)
    gone = problems((), (), sources)
    yield Check("imports", FAIL if gone else OK, "; ".join(gone) or f"{len(imports())} names")


def port(path: Path) -> Iterator[Check]:
    """``doctor --sglang``: what another SGLang, a wheel or a folder, changes for the plugin.

    Only its source text is read: nothing of it need be installed.
    """
    from ..hooks import HOOKS, SGLANG_VERSION

    try:
        other = Sources(path)
    except (ValueError, OSError) as error:
        yield Check("sglang", FAIL, str(error))
        return
    yield Check("sglang", NOTE, f"{other.version}, compared with what {SGLANG_VERSION} offers")
    yield from surface(other)
    try:
        pinned = Sources.installed()
    except ValueError:
        yield Check("bodies", NOTE, f"install sglang {SGLANG_VERSION} to compare code as well")
        return
    if pinned.version != SGLANG_VERSION:
        yield Check("bodies", NOTE, f"sglang {pinned.version} is installed, not {SGLANG_VERSION}")
    elif changed := changes(HOOKS, pinned, other):
        yield Check("bodies", NOTE, f"to be read again: {', '.join(changed)}")
    else:
        yield Check("bodies", OK, "every hooked function is the same to the letter")


def options() -> Iterator[Check]:
    """Settings of the environment that int2 would refuse."""
    from types import SimpleNamespace

    from ..plugin.refusals import refuse_options

    yield _refusal("environment", refuse_options, SimpleNamespace())


def served_model(model: NamedModel) -> Check:
    from sglang.srt.configs.model_config import ModelConfig

    from ..plugin.refusals import refuse_model

    try:
        config = ModelConfig(
            model.name, revision=model.revision, model_override_args=model.overrides or "{}"
        )
    except Exception as error:  # whatever transformers or SGLang make of a strange folder
        return Check("model", FAIL, f"SGLang cannot read {model.name}: {error}".splitlines()[0])
    return _refusal(f"model {', '.join(config.hf_config.architectures)}", refuse_model, config)


def _refusal(name: str, refuse: Any, argument: Any) -> Check:
    try:
        refuse(argument)
    except OscarError as error:
        return Check(name, FAIL, f"refused: {error}")
    return Check(name, OK, "nothing that int2 would refuse")


def fits(model: NamedModel | None, file: Path | None) -> Check:
    """Whether the artifact is sound and, with a model, made for it."""
    try:
        with model.folder() if model else nullcontext() as folder:
            return _fits(folder, file)
    except OscarError as error:
        return Check("artifact", FAIL, str(error))


def _fits(model: Path | None, file: Path | None) -> Check:
    from ..artifact import file as art
    from ..calibration.auto import artifact_path
    from ..config import DEFAULT_CODEC

    try:
        fingerprint = art.Fingerprint.of(model) if model else None
        if file is None and fingerprint:
            file = artifact_path(fingerprint, DEFAULT_CODEC)
            if not file.exists():
                return Check("artifact", NOTE, f"none yet; the first start calibrates into {file}")
        assert file is not None, "neither a model nor an artifact"
        artifact = art.load(file)
        if fingerprint:
            art.check(artifact, fingerprint)
    except (art.ArtifactError, art.FingerprintError) as error:
        return Check("artifact", FAIL, str(error))
    fit = "fits the model" if model else "sound (give --model to see whether it fits)"
    return Check("artifact", OK, f"codec {artifact.codec}, id {artifact.id}, {fit}")
