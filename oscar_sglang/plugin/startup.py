"""From SGLang's arguments to a checked configuration, an artifact and the pool's set-up."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..artifact.header import ArtifactError, read_header
from ..artifact.kept import keep, save_temporary
from ..calibration.warn import UNFIT
from ..config import ATTENTION_BACKEND, DEFAULT_CODEC, OscarConfig, OscarError, portable_kernels
from ..events import log_event
from ..kernels.codec import CODECS
from ..kernels.codec_omni import chosen
from ..pool.hybrid import attention_layer_ids, is_hybrid
from ..pool.varlen import choose_library
from .model_folder import model_folder
from .refusals import refuse_model, refuse_options, refuse_page_size, refuse_unknown

logger = logging.getLogger(__name__)

_GPU_PAGE_SIZE = 16


def prepare_arguments(view: Any, config: OscarConfig) -> dict[str, Any]:
    """Refuse what contradicts int2; what int2 decides, before SGLang resolves the rest of it.

    ``view``: SGLang's live view of its arguments.
    """
    refuse_unknown(view)
    refuse_options(view)
    codec, page_size = _codec_of(config), view.page_size
    if page_size is None:
        block = CODECS[codec].block
        page_size = block if block > 1 else 1 if view.device == "cpu" else _GPU_PAGE_SIZE
    refuse_page_size(page_size, codec)
    return {"attention_backend": ATTENTION_BACKEND, "page_size": page_size}


def _codec_of(config: OscarConfig) -> str:
    """The codec that will be served, as far as it can be known before the model is looked at."""
    if config.codec is not None:
        return config.codec
    if config.artifact == "auto":
        if config.bits is not None:
            return "position"
        return "omni" if config.omni_options else DEFAULT_CODEC
    try:
        return read_header(Path(config.artifact).expanduser()).codec
    except ArtifactError as error:
        raise OscarError(str(error)) from error


def finish_arguments(server_args: Any, view: Any, config: OscarConfig) -> OscarConfig:
    """Check the resolved arguments and the model, then find or make the artifact."""
    from sglang.srt.arg_groups.overrides import model_config_of

    refuse_options(view)
    portable_kernels()  # refuses what it does not know
    refuse_page_size(view.page_size, _codec_of(config))
    if config.debug_tags_every is not None and view.device == "cpu":
        raise OscarError(
            "--oscar-debug-tags checks every step on a CPU; drop --oscar-debug-tags-every"
        )
    model = model_config_of(server_args)
    refuse_model(model, view.tp_size)
    library = choose_library(config.prefill_attention, torch.device(view.device))
    config = replace(config, prefill_attention=library)
    config = config.with_prefix_window(is_hybrid(model)).with_weight_update(_codec_of(config))
    return config.with_artifact(*_find_artifact(view, model, config))


def _find_artifact(view: Any, model: Any, config: OscarConfig) -> tuple[Path, str]:
    """The artifact's file and its codec. ``model``: SGLang's ModelConfig."""
    from ..artifact import file as art

    codec = _codec_of(config)
    try:
        with model_folder(view, model) as folder:
            if config.artifact != "auto":
                path = Path(config.artifact).expanduser()
                beside = path.resolve().parent == Path(view.model_path).resolve()
                if beside and path.suffix == ".safetensors":
                    raise OscarError(
                        f"{path}: SGLang takes every .safetensors file in the model's folder for "
                        "weights; move the artifact to another folder"
                    )
                found = art.load(path)
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
            from ..calibration import CalibrationError, ensure_artifact

            try:
                made, path, created = ensure_artifact(
                    folder, codec, config.omni_options, bits=config.bits
                )
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
        elif (held := chosen(artifact.options)[name]) != value:
            holds = f"codec omni with {name} {held}"
        else:
            continue
        raise OscarError(
            f"{path}: holds {holds}, asked for --oscar-omni-{name} {value}; drop the flag, or drop "
            "--oscar-artifact"
        )


def reprefill_tail(config: OscarConfig, hybrid: bool) -> int:
    """Last tokens of a prompt computed even if cached, unless their window is found. A hybrid
    model's prefixes end where a state was kept, seldom that many tokens earlier: there "park" only
    takes what it finds."""
    wanted = config.prefix_window == "recompute" or (config.prefix_window == "park" and not hybrid)
    return config.recent_tokens if wanted else 0


def pool_setup(kvc: Any) -> Any:
    """The pool's set-up in a scheduler process, from SGLang's ``KVCacheConfigurator``."""
    from sglang.srt.runtime_context import get_parallel

    from ..artifact import file as art
    from ..pool.memory_pool import PoolSetup
    from ..pool.sizing import ROW_SLACK, decode_attention, with_workspace
    from .seam import config_of, plan_of

    config = config_of(kvc.server_args)
    artifact = art.load(Path(config.artifact))
    parallel = get_parallel()
    params = art.shard(artifact, parallel.attn_tp_rank, parallel.attn_tp_size)
    layer_ids, plan, attention = attention_layer_ids(kvc), plan_of(kvc), None
    log_event(
        logger,
        "pool",
        codec=config.codec,
        artifact=artifact.id,
        rank=f"{parallel.attn_tp_rank}/{parallel.attn_tp_size}",
        bytes_per_token=plan.bytes_per_token,
        bf16_bytes_per_token=plan.bf16_bytes_per_token,
        sink=plan.windows.n_sink,
        recent=plan.windows.n_recent,
        request_rows=plan.rows,
        scratch_tokens=plan.scratch_tokens,
        sink_cache_rows=plan.sink_cache_rows,
        prefix_window=config.prefix_window,
        **(
            {f"omni_{n}": value for n, value in chosen(artifact.options).items()}
            if config.codec == "omni"
            else {}
        ),
    )
    if kvc.device != "cpu":
        attention = decode_attention(kvc, plan)
        plan = with_workspace(kvc, plan, attention)
    return PoolSetup(
        plan=plan,
        spec=artifact.spec,
        specs=artifact.specs,
        params=params,
        artifact_id=artifact.id,
        fingerprint=artifact.fingerprint,
        data_free="data_hash" not in artifact.provenance and artifact.spec.needs_data,
        layer_ids=tuple(layer_ids),
        context=kvc.model_config.context_len + ROW_SLACK,
        prefix_window=config.prefix_window,
        reprefill_tail=reprefill_tail(config, kvc.mambaish_config is not None),
        decode_attention=attention,
        prefill_attention=config.prefill_attention,
    )
