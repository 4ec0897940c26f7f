"""From SGLang's arguments to a checked configuration and an artifact."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..artifact import file as art
from ..artifact.kept import keep, save_temporary
from ..calibration.warn import UNFIT
from ..config import ATTENTION_BACKEND, DEFAULT_CODEC, OscarConfig, OscarError, portable_kernels
from ..events import log_event
from ..kernels.codec import CODECS
from ..pool.hybrid import is_hybrid
from ..pool.varlen import choose_library
from .model_folder import model_folder
from .refusals import refuse_model, refuse_options, refuse_page_size, refuse_unknown

logger = logging.getLogger(__name__)

_GPU_PAGE_SIZE = 16


@dataclass(frozen=True)
class Chosen:
    """What int2 decides before SGLang resolves its arguments.

    artifact    the one that --oscar-artifact names, None for "auto"
    codec       the one that will be served
    page_size   as asked for, or int2's own
    """

    artifact: art.Artifact | None
    codec: str
    page_size: int

    @property
    def arguments(self) -> dict[str, Any]:
        """SGLang's, by name."""
        return {"attention_backend": ATTENTION_BACKEND, "page_size": self.page_size}


def choose(view: Any, config: OscarConfig) -> Chosen:
    """Refuse what contradicts int2, and choose what SGLang's own steps then build on.

    ``view``: SGLang's live view of its arguments.
    """
    refuse_unknown(view)
    refuse_options(view)
    try:
        named = config.artifact != "auto"
        artifact = art.load(Path(config.artifact).expanduser()) if named else None
    except art.ArtifactError as error:
        raise OscarError(str(error)) from error
    codec, page_size = _codec_of(config, artifact), view.page_size
    if page_size is None:
        block = CODECS[codec].block
        page_size = block if block > 1 else 1 if view.device == "cpu" else _GPU_PAGE_SIZE
    refuse_page_size(page_size, codec)
    return Chosen(artifact, codec, page_size)


def _codec_of(config: OscarConfig, artifact: art.Artifact | None) -> str:
    if config.codec is not None:
        return config.codec
    if artifact is not None:
        return artifact.codec
    if config.bits is not None:
        return "position"
    return "omni" if config.omni_options else DEFAULT_CODEC


def explain(server_args: Any, view: Any, error: Exception) -> None:
    """Refuse the model instead of ``error``, which stopped SGLang's resolution, if int2 does so:
    SGLang's steps for some models know no attention backend that is called as ours is."""
    from sglang.srt.arg_groups.overrides import model_config_of

    try:
        model = model_config_of(server_args)
    except Exception:  # then SGLang's error is about the model's files
        return
    try:
        refuse_model(model, view.tp_size)
    except OscarError as refusal:
        raise refusal from error


def finish_arguments(
    server_args: Any, view: Any, config: OscarConfig, chosen: Chosen
) -> OscarConfig:
    """Check the resolved arguments and the model, then find or make the artifact."""
    from sglang.srt.arg_groups.overrides import model_config_of

    refuse_options(view)
    portable_kernels()  # refuses what it does not know
    refuse_page_size(view.page_size, chosen.codec)
    if config.debug_tags_every is not None and view.device == "cpu":
        raise OscarError(
            "--oscar-debug-tags checks every step on a CPU; drop --oscar-debug-tags-every"
        )
    model = model_config_of(server_args)
    refuse_model(model, view.tp_size)
    library = choose_library(config.prefill_attention, torch.device(view.device))
    config = replace(config, prefill_attention=library)
    config = config.with_prefix_window(is_hybrid(model)).with_weight_update(chosen.codec)
    return config.with_artifact(*_find_artifact(view, model, config, chosen))


def _find_artifact(view: Any, model: Any, config: OscarConfig, chosen: Chosen) -> tuple[Path, str]:
    """The artifact's file and its codec. ``model``: SGLang's ModelConfig."""
    codec = chosen.codec
    try:
        with model_folder(view, model) as folder:
            if (found := chosen.artifact) is not None:
                path = Path(config.artifact).expanduser()
                beside = path.resolve().parent == Path(view.model_path).resolve()
                if beside and path.suffix == ".safetensors":
                    raise OscarError(
                        f"{path}: SGLang takes every .safetensors file in the model's folder for "
                        "weights; move the artifact to another folder"
                    )
                art.check(found, art.Fingerprint.of(folder), config.codec)
                _check_omni(path, found, config)
                if config.bits is not None:
                    raise OscarError(
                        f"{path}: which layers have 4 bits was chosen when it was calibrated; drop "
                        "--oscar-bits, or calibrate with: oscar-sglang calibrate --codec position "
                        f"--bits {config.bits} --model DIR --out FILE"
                    )
                _warn(found, model.context_len)
                return path, found.codec
            if view.load_format == "dummy":
                logger.warning("oscar: dummy weights, so data-free (Hadamard) codec parameters")
                fingerprint = art.Fingerprint.of(folder)
                return keep(art.data_free(fingerprint, codec, config.omni_options)), codec
            from ..calibration import CalibrationError, Plan, ensure_artifact

            plan = Plan(folder, codec_options=config.omni_options, bits=config.bits)
            try:
                made, path, created = ensure_artifact(plan, codec)
            except CalibrationError as error:
                raise OscarError(f"{error}; or give --oscar-artifact FILE") from error
        how = "calibrated" if created else "found"
        log_event(logger, "artifact", how=how, file=path or "none", id=made.id, codec=codec)
        _warn(made, model.context_len)
        return path or save_temporary(made), codec
    except (art.ArtifactError, art.FingerprintError) as error:
        raise OscarError(str(error)) from error


def _warn(artifact: Any, served: int) -> None:
    """Say so when the model is not fit for the codec, or when requests may be longer than what it
    was fitted for."""
    found = artifact.provenance.get("warnings")
    for warning in found if isinstance(found, list) else ():
        if UNFIT in str(warning):
            logger.warning("oscar: %s", warning)
    fitted = artifact.options.get("context")
    if fitted is not None and served > fitted:
        logger.warning(
            "oscar: the artifact is fitted for contexts of %d tokens, this server takes %d: beyond "
            "%d error grows; calibrate with --context %d, or serve with --context-length %d",
            fitted,
            served,
            fitted,
            served,
            fitted,
        )


def _check_omni(path: Path, artifact: Any, config: OscarConfig) -> None:
    """Refuse ``--oscar-omni-*`` that the artifact was not made with."""
    for name, value in config.omni_options.items():
        if artifact.codec != "omni":
            holds = f"codec {artifact.codec}"
        elif (held := artifact.spec.meta.chosen(artifact.options)[name]) != value:
            holds = f"codec omni with {name} {held}"
        else:
            continue
        raise OscarError(
            f"{path}: holds {holds}, asked for --oscar-omni-{name} {value}; drop the flag, or drop "
            "--oscar-artifact"
        )
