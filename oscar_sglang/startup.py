"""From SGLang's arguments to a checked configuration, an artifact and the pool's set-up."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from .config import ATTENTION_BACKEND, DEFAULT_CODEC, OscarConfig, OscarError
from .events import log_event
from .refusals import refuse_model, refuse_options, refuse_page_size

logger = logging.getLogger(__name__)

_GPU_PAGE_SIZE = 16


def prepare_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse what contradicts int2 and fill in what int2 decides, before SGLang resolves them."""
    refuse_options(_Namespace(kwargs))
    kwargs = dict(kwargs, attention_backend=ATTENTION_BACKEND)
    on_cpu = kwargs.get("device") == "cpu"
    if kwargs.get("page_size") is None:
        kwargs["page_size"] = 1 if on_cpu else _GPU_PAGE_SIZE
    refuse_page_size(kwargs["page_size"], "cpu" if on_cpu else "cuda")
    return kwargs


class _Namespace:
    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def finish_arguments(server_args: Any, config: OscarConfig) -> OscarConfig:
    """Check the resolved arguments and the model, then find or make the artifact.

    Runs in the launching process, before any weight is loaded for serving.
    """
    refuse_options(server_args)
    refuse_page_size(server_args.page_size, server_args.device)
    if config.debug_tags_every is not None and server_args.device == "cpu":
        raise OscarError(
            "--oscar-debug-tags checks every step on a CPU; drop --oscar-debug-tags-every"
        )
    refuse_model(server_args.get_model_config())
    return config.with_artifact(*_find_artifact(server_args, config))


def model_dir(server_args: Any) -> Path:
    """The model's local folder; a hub name is downloaded to the cache SGLang itself uses."""
    path = Path(server_args.model_path)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(server_args.model_path, revision=server_args.revision))


def _find_artifact(server_args: Any, config: OscarConfig) -> tuple[Path, str]:
    """The artifact's file and its codec."""
    from . import artifact as art

    folder = model_dir(server_args)
    codec = config.codec or DEFAULT_CODEC
    try:
        fingerprint = art.Fingerprint.of(folder)
        if config.artifact != "auto":
            path = Path(config.artifact).expanduser()
            found = art.load(path)
            art.check(found, fingerprint, config.codec)
            return path, found.codec
        if server_args.load_format == "dummy":
            logger.warning("oscar: dummy weights, so data-free (Hadamard) codec parameters")
            return _save_temporary(art.data_free(fingerprint, codec)), codec
        from .calibration import CalibrationError, ensure_artifact

        try:
            made, path, created = ensure_artifact(folder, codec)
        except CalibrationError as error:
            raise OscarError(f"{error}; or give --oscar-artifact FILE") from error
        how = "calibrated" if created else "found"
        log_event(logger, "artifact", how=how, file=path or "none", id=made.id, codec=codec)
        return path or _save_temporary(made), codec
    except (art.ArtifactError, art.FingerprintError) as error:
        raise OscarError(str(error)) from error


def _save_temporary(artifact: Any) -> Path:
    path = Path(tempfile.mkdtemp(prefix="oscar_sglang_")) / "artifact.safetensors"
    artifact.save(path)
    return path


def pool_setup(kvc: Any) -> Any:
    """The pool's set-up in a scheduler process, from SGLang's ``KVCacheConfigurator``."""
    from sglang.srt.runtime_context import get_parallel

    from . import artifact as art
    from .hooks import config_of, plan_of
    from .memory_pool import PoolSetup
    from .sizing import decode_attention, with_workspace

    config = config_of(kvc.server_args)
    artifact = art.load(Path(config.artifact))
    parallel = get_parallel()
    params = art.shard(artifact, parallel.attn_tp_rank, parallel.attn_tp_size)
    layers, plan, attention = kvc.layer_info, plan_of(kvc), None
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
    )
    if kvc.device != "cpu":
        attention = decode_attention(kvc, plan)
        plan = with_workspace(kvc, plan, attention)
    return PoolSetup(
        plan=plan,
        codec=config.codec,
        params=params[layers.start_layer : layers.end_layer],
        artifact_id=artifact.id,
        reprefill_tail=config.recent_tokens if config.prefix_window == "recompute" else 0,
        decode_attention=attention,
    )
