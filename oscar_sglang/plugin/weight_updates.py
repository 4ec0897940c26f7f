"""New weights in a running server: is the calibration still theirs, and what to do about it.

A calibration belongs to the weights that it was measured on. After ``/update_weights_from_*`` it is
*stale* until it is measured again, which needs an idle engine and an empty cache: codes that were
written with the old rotations mean nothing under new ones. Where that is not so yet (memory still
released, a weight-update session open, requests kept), it happens as soon as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..artifact.file import Artifact, Fingerprint
from ..events import log_event
from ..pool.memory_pool import oscar_pool
from .seam import config_of

logger = logging.getLogger(__name__)

_END = "the weight update to end"
_FLAG = "--oscar-on-weight-update"


def around_update(original: Callable, self: Any, recv_req: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.update_weights_from_disk and _from_ipc: all weights."""
    if (pool := _pool(self)) is None:
        return original(self, recv_req)
    if _policy(self) == "refuse":
        return _refusal(recv_req)
    pool.calibration.waiting_for = _END  # SGLang flushes the cache on the way
    try:
        out = original(self, recv_req)
    finally:
        _changed(pool)
    pool.calibration.weight_updates += 1
    return _with_note(out, renew(self))


def around_part(original: Callable, self: Any, recv_req: Any) -> Any:
    """AROUND update_weights_from_tensor and _from_distributed: some weights, many times between
    begin_weight_update and end_weight_update."""
    if (pool := _pool(self)) is None:
        return original(self, recv_req)
    if _policy(self) == "refuse":
        return _refusal(recv_req)
    if self._session is not None:  # else SGLang refuses it
        _changed(pool)
    return original(self, recv_req)


def around_begin(original: Callable, self: Any, recv_req: Any) -> Any:
    """AROUND begin_weight_update."""
    if _pool(self) is not None and _policy(self) == "refuse":
        return _refusal(recv_req)
    return original(self, recv_req)


def around_end(original: Callable, self: Any, recv_req: Any) -> Any:
    """AROUND end_weight_update; weights may also have been written past SGLang (RDMA)."""
    pool = _pool(self)
    if pool is None or self._session is None:
        return original(self, recv_req)
    _changed(pool)
    out = original(self, recv_req)
    pool.calibration.weight_updates += 1
    return _with_note(out, renew(self))


def after_flush(result: bool, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER Scheduler.flush_cache."""
    pool = oscar_pool(self.token_to_kv_pool_allocator.get_kvcache())
    if result and pool is not None:
        if pool.parking:
            pool.parking.clear()
        renew(self.weight_updater)


def renew(updater: Any) -> str:
    """Measure a stale calibration again if that is wanted and possible; a note for the client."""
    pool = _pool(updater)
    state = pool.calibration
    if not state.stale or state.waiting_for == _END:
        return ""
    if _policy(updater) == "keep":
        note = f"int2 keeps calibration {state.artifact} of the old weights ({_FLAG} keep)."
        logger.warning("oscar: STALE CALIBRATION: %s", note)
        return note
    state.waiting_for = _obstacle(updater, pool)
    if state.waiting_for:
        note = f"int2 will be recalibrated; it waits for {state.waiting_for}."
        logger.warning("oscar: STALE CALIBRATION: %s", note)
        return note
    return _recalibrate(updater, pool)


def _pool(updater: Any) -> Any:
    return oscar_pool(updater.tp_worker.model_runner.token_to_kv_pool)


def _with_note(out: Any, note: str) -> Any:
    if note:
        out.message = f"{out.message} {note}"
    return out


def _policy(updater: Any) -> str:
    policy = config_of(updater.tp_worker.model_runner.server_args).on_weight_update
    assert policy is not None  # chosen at start-up
    return policy


def _refusal(recv_req: Any) -> Any:
    from sglang.srt.managers import io_struct

    kind = type(recv_req).__name__.replace("Input", "Output")
    message = (
        "the int2 KV cache is calibrated for the weights that the server was started with, and "
        f"{_FLAG} refuse was given; start it with recalibrate (default) or keep"
    )
    logger.error("oscar: weight update refused: %s", message)
    return getattr(io_struct, kind)(success=False, message=message)


def _changed(pool: Any) -> None:
    from .recalibrate import needs_data

    state = pool.calibration
    state.waiting_for = ""
    state.stale = needs_data(pool.segments.spec.name)


def _obstacle(updater: Any, pool: Any) -> str:
    """What has to happen before a stale calibration can be renewed, "" if nothing."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS

    scheduler = updater.scheduler
    if updater._session is not None:
        return "/end_weight_update"
    if updater.offload_tags & {GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS}:
        return "/resume_memory_occupation"
    if not scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        return "the running requests to end, and /flush_cache"
    if scheduler.token_to_kv_pool_allocator.available_size() < pool.size:
        return "/flush_cache"
    return ""


def _recalibrate(updater: Any, pool: Any) -> str:
    import torch
    from sglang.srt.runtime_context import get_schedule

    from ..calibration.errors import CalibrationError
    from .recalibrate import TOKENS, gather_and_fit

    state, started, counters = pool.calibration, time.monotonic(), replace(pool.counters)
    chunk = get_schedule().chunked_prefill_size
    logger.info("oscar: recalibrating codec %s for the new weights", pool.segments.spec.name)
    try:
        found = gather_and_fit(
            updater.tp_worker.model_runner,
            pool,
            updater.tp_cpu_group,
            longest=chunk if chunk and chunk > 0 else TOKENS,
        )
    except (CalibrationError, torch.OutOfMemoryError) as error:
        state.waiting_for = "the next /flush_cache: the last attempt failed"
        note = f"int2 could not be recalibrated and keeps the one of the old weights: {error}."
        logger.error("oscar: STALE CALIBRATION: %s", note)
        return note
    finally:
        pool.forget_rows()  # the tokens that it ran were nobody's
        pool.counters = counters
    pool.replace_params(found.params)
    state.artifact, state.source, state.stale = _id(pool), "recalibrated", False
    state.recalibrations += 1
    seconds = time.monotonic() - started
    for warning in found.warnings:
        logger.warning("oscar: recalibration: %s", warning)
    log_event(
        logger,
        "recalibrated",
        id=state.artifact,
        codec=pool.segments.spec.name,
        tokens=found.tokens,
        sequence=found.length,
        seconds=f"{seconds:.1f}",
    )
    return f"int2 was recalibrated in {seconds:.1f} s (calibration {state.artifact})."


def _id(pool: Any) -> str:
    """Of this rank's parameters as they are."""
    kind: Fingerprint = replace(
        pool.setup.fingerprint, kv_heads=pool.head_num, weights=f"of {pool.calibration.artifact}"
    )
    params = [type(p)(*(None if t is None else t.cpu() for t in p)) for p in pool.segments.params]
    return Artifact(kind, pool.segments.spec.name, {}, params).id
