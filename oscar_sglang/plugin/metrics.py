"""Our numbers in SGLang's own reports: /metrics, the decode log and /server_info.

Everything is host arithmetic on what the scheduler knows, done when SGLang itself reports (each
prefill, every ``--decode-log-interval`` decode steps, when idle), never per step. The only numbers
counted on the device are fetched by a copy that nobody waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from ..kernels.layout import WindowLayout
from ..kernels.reference import first_exact
from ..pool.hybrid import attention_pool
from ..watch.dump import after_server_info
from .lifecycle import ring_start

logger = logging.getLogger(__name__)

# Name under /server_info -> documentation. /metrics shows each as "oscar:NAME".
GAUGES = {
    "history_tokens": "Tokens held in 2 bits: running requests and prefix cache.",
    "window_tokens": "Exact (BF16) sink and recent tokens of running requests.",
    "tokens_capacity": "Tokens the 2-bit cache can hold.",
    "scratch_tokens": "Prefix tokens that fit the prefill scratch.",
    "calibration_stale": "1 while the calibration is of weights that were replaced.",
    "scratch_tokens_peak": "Most prefix tokens that were in the prefill scratch at once.",
}
COUNTERS = {
    "demoted_tokens": "Tokens written in 2 bits.",
    "materialised_tokens": "Cached prefix tokens read back by prefills.",
    "sink_hits": "Sink tokens of cached prefixes restored exactly.",
    "sink_misses": "Sink tokens of cached prefixes restored from 2 bits.",
    "weight_updates": "Updates of the model's weights.",
    "recalibrations": "Calibrations measured in the running server.",
    "requests_on_prefix": "Requests that started on a cached prefix.",
    "windows_found": "Exact windows of cached prefixes that were taken over.",
    "windows_missed": "Exact windows of cached prefixes that were gone.",
}
SEGMENT_BYTES = "Bytes allocated for a part of the 2-bit cache."


class DeviceCounts:
    """A small device tensor read without waiting: every read shows what the copy started by an
    earlier read has brought, and starts the next one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.values = [0] * len(tensor)
        self.done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.host = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def read(self) -> list[int]:
        if not self.tensor.is_cuda:
            return self.tensor.tolist()
        if self.done is not None and not self.done.query():
            return self.values
        if self.done is not None:
            self.values = self.host.tolist()
        self.host.copy_(self.tensor, non_blocking=True)
        self.done = torch.cuda.Event()
        self.done.record()
        return self.values


def window_tokens(
    requests: Iterable[tuple[int, int]], windows: WindowLayout, block: int = 1
) -> int:
    """Exact tokens of requests given as (first position in the ring, tokens in the cache)."""
    rows = torch.tensor([*requests], dtype=torch.int64, device="cpu").view(-1, 2)
    recent_start, length = rows.unbind(1)
    exact = first_exact(length, recent_start, windows.n_sink, windows.n_recent, block)
    sink = length.clamp_max(windows.n_sink)
    return int((sink + length - torch.minimum(length, exact)).sum())


def _running(scheduler: Any) -> list[tuple[int, int]]:
    """(first position in the ring, tokens in the cache) of every request that owns a row."""
    found, rows = {}, scheduler.req_to_token_pool
    for batch in (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug):
        for req in batch.reqs if batch is not None else ():
            if req.kv.holds_kv:
                row = req.kv.req_pool_idx
                found[row] = (ring_start(rows, row), req.kv.kv_committed_len)
    return list(found.values())


class Reporter:
    """What one scheduler reports. ``labels``: those of SGLang's collector, None without metrics."""

    def __init__(self, scheduler: Any, collector: Any) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.pool = attention_pool(self.allocator.get_kvcache())
        self.counts = DeviceCounts(self.pool.device_counters)
        self.seen: tuple = ()
        self.published = dict.fromkeys(COUNTERS, 0)
        self.gauges: dict[str, Any] = {}
        if collector is not None:
            self._register(collector)

    def _register(self, collector: Any) -> None:
        import prometheus_client  # after SGLang has set PROMETHEUS_MULTIPROC_DIR

        labels = list(collector.labels)

        def gauge(name: str, text: str, *more: str) -> Any:
            kind = collector._gauge_cls or prometheus_client.Gauge
            return kind("oscar:" + name, text, [*labels, *more], multiprocess_mode="mostrecent")

        self.labels = collector.labels
        self.gauges = {name: gauge(name, text) for name, text in GAUGES.items()}
        self.segments = gauge("segment_bytes", SEGMENT_BYTES, "segment")
        kind = collector._counter_cls or prometheus_client.Counter
        self.counters = {n: kind("oscar:" + n, text, labels) for n, text in COUNTERS.items()}

    def state(self, exact: bool = False) -> dict[str, Any]:
        """The ``oscar`` block of /server_info; ``exact`` waits for the device."""
        counts = self.pool.device_counters.tolist() if exact else self.counts.read()
        return {
            **self.pool.stats(counts),
            "history_tokens": self.pool.size - self.allocator.available_size(),
            "window_tokens": window_tokens(
                _running(self.scheduler), self.pool.windows, self.pool.segments.spec.block
            ),
        }

    def publish(self, state: dict[str, Any]) -> None:
        """Set the gauges of /metrics and move its counters up to ``state``."""
        if not self.gauges:
            return
        for name, gauge in self.gauges.items():
            gauge.labels(**self.labels).set(state[name])
        for part, size in state["bytes"].items():
            self.segments.labels(**self.labels, segment=part).set(size)
        for name, counter in self.counters.items():
            # A delayed copy may show less than an exact read published before.
            if (more := state[name] - self.published[name]) > 0:
                counter.labels(**self.labels).inc(more)
                self.published[name] = state[name]

    def log(self, state: dict[str, Any]) -> None:
        hits, misses = state["sink_hits"], state["sink_misses"]
        rate = f"{hits / (hits + misses):.0%}" if hits + misses else "none yet"
        logger.info(
            "oscar: #history token: %d of %d at %.2f bits, #window token: %d, sink cache hits: %s",
            state["history_tokens"],
            state["tokens_capacity"],
            state["bits_per_element"],
            state["window_tokens"],
            rate,
        )


def reporter_of(metrics: Any) -> Reporter | None:
    """The reporter beside SGLang's ``SchedulerMetricsReporter``; None without an int2 pool."""
    return getattr(metrics, "oscar", None)


def after_init(result: Any, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER SchedulerMetricsReporter._init_metrics: the scheduler is ready, graphs are captured."""
    from .seam import enabled

    if not enabled(self.scheduler):
        return
    collector = self.metrics_collector if self.current_scheduler_metrics_enabled else None
    reporter = self.oscar = Reporter(self.scheduler, collector)
    reporter.pool.ready()
    reporter.publish(reporter.state(exact=True))


def after_report(result: Any, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER SGLang's report functions: follow them when they really reported something."""
    if (reporter := reporter_of(self)) is None:
        return
    decode = self.last_decode_stats_tic
    idle = reporter.gauges and self.metrics_collector.last_log_time
    now = (decode, self.last_prefill_stats_tic, idle)
    if now == reporter.seen:
        return
    decoded = reporter.seen and decode != reporter.seen[0]
    reporter.seen = now
    log = decoded and self.is_stats_logging_rank
    if log or reporter.gauges:
        state = reporter.state()
        reporter.publish(state)
        if log:
            reporter.log(state)


def after_reset(result: Any, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER reset_metrics, i.e. /flush_cache: the gauges must not show the old cache."""
    if reporter := reporter_of(self):
        reporter.publish(reporter.state(exact=True))


def after_internal_state(result: Any, self: Any, *_args: Any, **_kwargs: Any) -> Any:
    """AFTER Scheduler.get_internal_state: the block of /server_info, and the same in /metrics."""
    if reporter := reporter_of(self.metrics_reporter):
        state = reporter.state(exact=True)
        reporter.publish(state)
        if dumped := after_server_info(self):
            state["dumped"] = dumped
        result.internal_state["oscar"] = state
    return result
