"""GPU memory, planned and real, and a soak: nothing may be lost or grow over many requests."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import time
from typing import Any

import psutil

from scripts.lib.server import Server
from scripts.lib.shapes import tokens
from scripts.lib.traffic import ask, finish

GB = 2**30
POOL_LOG = re.compile(r"(Load weight|Memory pool) end\..*?avail mem=([\d.]+) GB")
ABORTED = 0.1  # share of the soak's requests
PREFIXES = 16


def _gpu() -> Any:
    """NVML's handle of the first visible GPU, None without one."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return pynvml.nvmlDeviceGetHandleByIndex(int(first))


def device_name() -> str:
    if (gpu := _gpu()) is None:
        return "CPU"
    import pynvml

    return pynvml.nvmlDeviceGetName(gpu)


def gpu_used(settled: bool = False) -> int | None:
    """Bytes in use on the GPU; ``settled`` waits until a killed server has given its back."""
    if (gpu := _gpu()) is None:
        return None
    import pynvml

    used = pynvml.nvmlDeviceGetMemoryInfo(gpu).used
    for _ in range(20 * settled):
        time.sleep(0.25)
        before, used = used, pynvml.nvmlDeviceGetMemoryInfo(gpu).used
        if abs(used - before) < 2**20:
            break
    return used


def memory(server: Server, used_before: int | None) -> dict:
    """What the cache holds, and predicted against real bytes.

    ``pool_device_gb`` is what the device lost between SGLang's "Load weight end" and "Memory pool
    end" (its resolution is 0.01 GB); the plan is the int2 pool's own. ``accounted_gb`` is all that
    the server names, against NVML's ``server_device_gb``: the rest is the CUDA context, libraries
    and activations.
    """
    state = server.internal_state()
    usage = state["memory_usage"]
    free = dict(POOL_LOG.findall(server.log.read_text(errors="replace")))
    pool = float(free["Load weight"]) - float(free["Memory pool"])
    graphs = sum(usage["graph"].values())
    row = {
        "tokens_held": usage["token_capacity"],
        "weights_gb": usage["weight"],
        "cache_gb": usage["kvcache"],
        "graphs_gb": round(graphs, 3),
        "pool_device_gb": round(pool, 2),
        "page_size": state["page_size"],
        "attention_backend": state["attention_backend"],
        "max_running_requests": state["effective_max_running_requests_per_dp"],
        "chunked_prefill_size": state["chunked_prefill_size"],
        "conditions": {},
    }
    if used_before is not None:
        row["server_device_gb"] = round((gpu_used() - used_before) / GB, 3)
        row["accounted_gb"] = round(usage["weight"] + usage["kvcache"] + graphs, 3)
    if "oscar" in state:
        planned = state["oscar"]["planned_bytes"]
        total = sum(planned.values())
        row["planned_gb"] = {name: round(size / GB, 4) for name, size in planned.items()}
        row["planned_total_gb"] = round(total / GB, 4)
        row["allocated_over_planned"] = round(state["oscar"]["bytes_total"] / total, 5)
        row["device_over_planned"] = round(pool * GB / total, 4)
    return row


def _rss(server: Server) -> int:
    """Host memory of the server's processes."""
    root = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])


def soak(server: Server, args: argparse.Namespace) -> dict:
    """Requests of mixed lengths, half of them on shared prefixes, a tenth hung up on mid-stream.

    The first fifth warms up; growth is counted from there. Then nothing may be in use, and after a
    flush every slot must be free.
    """
    rng = random.Random(11)
    prefixes = [tokens(rng.randrange(64, args.soak_longest), 400 + i) for i in range(PREFIXES)]
    aborted = 0

    def prompt(number: int) -> list[int]:
        length = int(2 ** rng.uniform(3, args.soak_longest.bit_length() - 1))
        head = rng.choice(prefixes) if rng.random() < 0.5 else []
        return head + tokens(length, 500_000 + number)

    async def abandon(ids: list[int]) -> None:
        """The client leaves while its request waits, is prefilled or streams."""
        nonlocal aborted
        try:
            await asyncio.wait_for(ask(server, ids, args.soak_long_answer), rng.uniform(0, 1))
        except asyncio.TimeoutError:
            aborted += 1

    def part(first: int, last: int) -> int:
        """Number of the requests [first, last) that were answered."""
        answered: list[Any] = []
        queue = iter(range(first, last))

        async def worker() -> None:
            for number in queue:
                ids = prompt(number)
                if rng.random() < ABORTED:
                    await abandon(ids)
                else:
                    answered.append(await ask(server, ids, rng.randint(1, args.soak_answer)))

        workers = [worker() for _ in range(args.soak_concurrency)]
        if finish(server, workers, answered, args.soak_seconds).cut:
            raise RuntimeError(f"soak: {len(answered)} requests in {args.soak_seconds} s")
        return len(answered)

    started, warm = time.monotonic(), args.soak // 5
    completed = part(0, warm)
    gpu, rss = gpu_used(), _rss(server)
    completed += part(warm, args.soak)
    server.abort_all()
    in_use = server.load()["num_used_tokens"]
    server.flush()
    row = {
        "batch": args.soak_concurrency,
        "requests": args.soak,
        "completed": completed,
        "aborted": aborted,
        "seconds": round(time.monotonic() - started, 1),
        "tokens_in_use_after": in_use,
        "slots_lost": server.load()["num_used_tokens"],
        "rss_growth_mb": round((_rss(server) - rss) / 2**20, 1),
        "conditions": {"longest": args.soak_longest},
    }
    if "oscar" in server.internal_state():
        row["history_tokens_after_flush"] = server.state()["history_tokens"]
    if gpu is not None:
        row["gpu_growth_mb"] = round((gpu_used() - gpu) / 2**20, 1)
    return row
