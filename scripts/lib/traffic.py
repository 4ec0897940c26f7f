"""Requests to a server through the client of SGLang's own serving benchmark, and their figures.

``ask`` is ``async_request_sglang_generate`` on token ids: streaming, greedy, a fixed number of
output tokens. Latencies are those a client sees, so they contain HTTP and JSON (tens of
milliseconds for a 100k prompt), the same for every cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.lib.server import Client

BLOCK = 8  # tokens whose latencies are averaged: a chunk of HTTP may bring several at once
MIN_BLOCKS = 3  # per stream, below which a median says little


@contextlib.contextmanager
def absent_datasets() -> Iterator[None]:
    """SGLang's clients and tests import Hugging Face's `datasets` for workloads of their own; a
    server needs no such thing, so where it is not installed an empty one is there meanwhile."""
    if importlib.util.find_spec("datasets") is not None:
        yield
        return
    standin = types.ModuleType("datasets")
    standin.__spec__ = importlib.util.spec_from_loader("datasets", None)
    standin.load_dataset = None
    sys.modules["datasets"] = standin
    try:
        yield
    finally:
        del sys.modules["datasets"]


@functools.cache
def sglang_client() -> types.ModuleType:
    """``sglang.benchmark.serving``, set up once."""
    from oscar_sglang.launch_server import enter_cpu_mode, has_gpu

    if not has_gpu():
        enter_cpu_mode()
    with absent_datasets():
        from sglang.benchmark import serving
    serving.set_global_args(
        argparse.Namespace(
            temperature=0.0,
            top_p=1.0,
            top_logprobs_num=0,
            token_ids_logprob=None,
            return_logprob=False,
            return_routed_experts=False,
            logprob_start_len=-1,
            disable_ignore_eos=False,
            disable_stream=False,
            cache_report=True,
        )
    )
    return serving


async def ask(client: Client, ids: list[int], new_tokens: int) -> Any:
    """SGLang's ``RequestFuncOutput`` of one request; raises where it was not fully answered."""
    serving = sglang_client()
    request = serving.RequestFuncInput(
        prompt=ids,
        api_url=f"http://127.0.0.1:{client.port}/generate",
        prompt_len=len(ids),
        output_len=new_tokens,
        model="",
        lora_name="",
        image_data=None,
        extra_request_body={},
    )
    output = await serving.async_request_sglang_generate(request)
    if not output.success or output.output_len != new_tokens or not output.ttft:
        found = f"{output.output_len} of {new_tokens} tokens, first after {output.ttft} s"
        raise RuntimeError(f"request of {len(ids)} tokens: {found}; {output.error}")
    return output


def answer_ids(output: Any) -> list[int]:
    """The generated ids: the benchmark's tokenizer calls a token by its number."""
    return [int(word) for word in output.generated_text.split()]


def ask_one(client: Client, ids: list[int], new_tokens: int = 1) -> Any:
    return asyncio.run(ask(client, ids, new_tokens))


def ask_together(client: Client, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    """One request per prompt, all at once."""

    async def run() -> list[Any]:
        return await asyncio.gather(*(ask(client, ids, new_tokens) for ids in prompts))

    return asyncio.run(run())


@dataclass
class Finished:
    """Requests answered in ``seconds``, the time from the start to the last answer; ``cut`` where
    the rest was abandoned at the time limit."""

    outputs: list[Any]
    seconds: float
    cut: bool


def finish(client: Client, work: Iterable[Coroutine], outputs: list, seconds: float) -> Finished:
    """Run ``work``, which appends to ``outputs``, for at most ``seconds``."""

    async def run() -> bool:
        tasks = [asyncio.ensure_future(w) for w in work]
        done, pending = await asyncio.wait(
            tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
        return bool(pending)

    cut = asyncio.run(run())
    if cut:
        client.abort_all()
    if not outputs:
        raise RuntimeError(f"nothing was answered in {seconds} s")
    start = min(o.start_time for o in outputs)
    return Finished(outputs, max(o.start_time + o.latency for o in outputs) - start, cut)


def closed_loop(
    client: Client, requests: Iterable[tuple[list[int], int]], concurrency: int, seconds: float
) -> Finished:
    """(ids, new tokens) in this order, so many at a time."""
    outputs: list[Any] = []
    queue: Iterator = iter(requests)

    async def worker() -> None:
        for ids, new_tokens in queue:
            outputs.append(await ask(client, ids, new_tokens))

    return finish(client, [worker() for _ in range(concurrency)], outputs, seconds)


def steady_itl(outputs: list[Any]) -> list[np.ndarray]:
    """Each stream's inter-token latencies, in seconds, while every stream was decoding."""
    begin = max(o.start_time + o.ttft for o in outputs)
    end = min(o.start_time + o.ttft + sum(o.itl) for o in outputs)
    kept = []
    for o in outputs:
        itl = np.asarray(o.itl)
        times = o.start_time + o.ttft + np.cumsum(itl)
        kept.append(itl[(times - itl >= begin - 1e-9) & (times <= end + 1e-9)])
    return kept


def blocks(itl: np.ndarray) -> np.ndarray:
    """Means over successive blocks."""
    whole = len(itl) // BLOCK * BLOCK
    return itl[:whole].reshape(-1, BLOCK).mean(1)


def tpot_figures(runs: list[list[Any]]) -> dict[str, float]:
    """TPOT in milliseconds over several runs of concurrent streams: the median over blocks of
    tokens, the mean, and the 99th percentile of single inter-token latencies."""
    streams = [itl * 1e3 for outputs in runs for itl in steady_itl(outputs)]
    means, every = np.concatenate([blocks(itl) for itl in streams]), np.concatenate(streams)
    if len(means) < MIN_BLOCKS * len(streams):
        raise RuntimeError(f"only {len(every)} tokens while all streams ran: ask for more tokens")
    return {
        "tpot_ms": round(float(np.median(means)), 3),
        "tpot_mean_ms": round(float(every.mean()), 3),
        "tpot_p99_ms": round(float(np.percentile(every, 99)), 3),
        "samples": len(every),
    }


class _Words:
    """The tokenizer that SGLang's metrics count output with."""

    @staticmethod
    def encode(text: str, add_special_tokens: bool = False) -> list[str]:
        return text.split()


def load_figures(finished: Finished) -> dict[str, Any]:
    """Throughput, latencies and hit rate, as ``sglang.bench_serving`` computes them."""
    outputs = finished.outputs
    metrics, _ = sglang_client().calculate_metrics(
        None, outputs, finished.seconds, _Words(), "sglang"
    )
    cached = sum(o.cached_tokens for o in outputs) / sum(o.prompt_len for o in outputs)
    return {
        "requests": metrics.completed,
        "seconds": round(finished.seconds, 2),
        "cut": finished.cut,
        "requests_per_s": round(metrics.request_throughput, 4),
        "output_tokens_per_s": round(metrics.output_throughput, 2),
        "ttft_ms": round(float(metrics.median_ttft_ms), 2),
        "ttft_p99_ms": round(float(metrics.p99_ttft_ms), 2),
        "tpot_ms": round(float(metrics.median_tpot_ms), 3),
        "tpot_p99_ms": round(float(metrics.p99_tpot_ms), 3),
        "cache_hit_rate": round(cached, 4),
    }
