"""Simulate agent sessions on a server and compare each with itself run alone.

    python -m scripts.agent_sim --model DIR --log-dir LOGS --out r.json --sessions 30 --turns 20 \\
        --page-sizes 16 --concurrency 8 -- --kv-cache-dtype int2 --max-total-tokens 12000

starts a server for every page size, with the flags after ``--``, and runs every concurrency on it.
``--port PORT`` instead of ``--model`` uses a server that is running, idle, on this machine; its
prefix cache is flushed. A small ``--max-total-tokens`` makes eviction, and with
``--schedule-conservativeness 0.01`` retraction (SGLang then admits requests without room for their
answers); ``--retract-every N`` makes SGLang retract requests every N-th step. Prompts are pieces
of ``--tokens FILE.npz`` (arrays of token ids), else random ids below ``--vocab``; a trained model
needs text, because its answers to random ids hardly depend on them.
Where exact sink rows get lost in a small sink cache, hits of equal length differ, too: give
``--oscar-sink-cache-tokens`` as many as slots to have only rounding left there.

The report: sessions that differ and the KL at their first differing token (``lib/agents.py`` says
what a tie, a drift and corruption are), GPU and host memory and slots in use before and after,
retractions and errors in the server's log, what ``--oscar-debug-tags`` checked. Exit status 1 if a
session is corrupt or was not compared within ``--seconds``, a slot was not given back, the log has
an error, or GPU memory grew by more than --growth-mb.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import psutil

from scripts.lib.agents import Workload, simulate
from scripts.lib.endurance import device_name, gpu_used
from scripts.lib.provenance import header
from scripts.lib.server import Client, Server

ERRORS = (
    "memory leak detected",
    "double free",
    "use-after-free",
    "hit an exception",
    "OwnershipError",
)
RETRACTED = re.compile(r"(pool is full|Testing retract)\S*.*#retracted_reqs: (\d+)")
MB = 2**20


def parse() -> argparse.Namespace:
    d = Workload()
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="a running server")
    where.add_argument("--model", type=Path, help="model folder to serve; server flags after --")
    p.add_argument("--log-dir", type=Path, default=Path("."), help="for server logs")
    p.add_argument("--page-sizes", type=int, nargs="+", help="with --model; default: int2's own")
    p.add_argument("--concurrency", type=int, nargs="+", default=[8], help="sessions at a time")
    for name in ("sessions", "turns", "systems", "system_tokens", "vocab", "top", "seed"):
        p.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(d, name))
    for name in ("turn_tokens", "answer_tokens"):
        p.add_argument("--" + name.replace("_", "-"), type=int, nargs=2, default=getattr(d, name))
    p.add_argument("--hangups", type=float, default=d.hangups, help="share of abandoned requests")
    p.add_argument("--retract-every", type=int, metavar="N", help="with --model: SGLang's own test")
    p.add_argument("--seconds", type=float, help="begin no comparison later than this after a run")
    p.add_argument("--tokens", type=Path, help="token archive that prompts are cut from")
    p.add_argument("--growth-mb", type=float, default=64, help="GPU memory that may be added")
    p.add_argument("--commit", help="of the code, where git does not know it")
    p.add_argument("--out", type=Path, help="write the report as JSON")
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    args = p.parse_args(own[:cut])
    args.flags = own[cut + 1 :]
    if args.port and (args.flags or args.page_sizes or args.retract_every):
        p.error("server flags, --page-sizes and --retract-every need --model")
    return args


def gpu_mb() -> float | None:
    """Memory in use on the GPU, by NVML or else by nvidia-smi."""
    if (used := gpu_used()) is not None:
        return round(used / MB, 1)
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0])


def usage(client: Client) -> dict:
    """What the idle server holds; host memory of a server that we started."""
    client.abort_all()
    client.flush()
    state = client.internal_state().get("oscar", {})
    names = ("history_tokens", "tokens_capacity", "debug_tags")
    used = {k: state[k] for k in names if k in state}
    if "tokens_capacity" in used:
        used["available_tokens"] = used["tokens_capacity"] - used["history_tokens"]
    if (gpu := gpu_mb()) is not None:
        used["gpu_mb"] = gpu
    if isinstance(client, Server):
        root = psutil.Process(client.process.pid)
        family = [root, *root.children(recursive=True)]
        used["rss_mb"] = round(sum(p.memory_info().rss for p in family) / MB, 1)
    return used


def run(
    client: Client, work: Workload, concurrency: int, text: list[int] | None, seconds: float | None
) -> dict:
    """One workload. A few sessions go first: they compile kernels and fill allocators."""
    say = print if sys.stdout.isatty() else lambda _: None
    simulate(client, replace(work, sessions=min(concurrency, 8), turns=2), concurrency, text=text)
    before, begin = usage(client), time.perf_counter()
    result = simulate(client, work, concurrency, say, text, seconds)
    result["seconds"] = round(time.perf_counter() - begin, 1)
    after = usage(client)
    growth = {
        f"{k}_growth": round(after[k] - before[k], 1) for k in ("gpu_mb", "rss_mb") if k in after
    }
    return result | {"before": before, "after": after, **growth}


def servers(args: argparse.Namespace) -> Iterator[tuple[Client, dict]]:
    """Each server to test, and what is known about it."""
    if args.port:
        yield Client(args.port), {}
        return
    args.log_dir.mkdir(parents=True, exist_ok=True)
    for page in args.page_sizes or [None]:
        flags = [*args.flags, *(["--page-size", str(page)] if page else [])]
        log = args.log_dir / f"server-page-{page or 'default'}.log"
        with Server(args.model, log, *flags, env=retraction(args)) as server:
            yield server, {"page_size": server.internal_state()["page_size"], "flags": flags}


def retraction(args: argparse.Namespace) -> dict[str, str]:
    every = args.retract_every
    return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(every)} if every else {}


def problems(result: dict, growth_mb: float) -> list[str]:
    """What makes a run a failure, in words."""
    before, after = result["before"], result["after"]
    found = [f"{result['corrupt']} corrupt turns"] if result["corrupt"] else []
    if result["compared_sessions"] < (wanted := result["workload"]["sessions"]):
        found.append(f"{result['compared_sessions']} of {wanted} sessions compared in time")
    if after.get("history_tokens"):
        found.append(f"{after['history_tokens']} slots not given back")
    if after.get("tokens_capacity") != before.get("tokens_capacity"):
        found.append("the capacity changed")
    grew = after.get("gpu_mb", 0) - before.get("gpu_mb", 0)
    if grew > growth_mb:
        found.append(f"GPU memory grew by {grew:.0f} MB")
    return found + [f"log: {e}" for e in result.get("log", {}).get("errors", ())]


def from_log(client: Client) -> dict:
    if not isinstance(client, Server):
        return {}
    text = client.log.read_text(errors="replace")
    found = {"pool is full": 0, "Testing retract": 0}
    for why, requests in RETRACTED.findall(text):
        found[why] += int(requests)
    full, forced = found.values()
    errors = [e for e in ERRORS if e in text]
    return {"log": {"retractions": full, "forced_retractions": forced, "errors": errors}}


def main() -> int:
    args = parse()
    text = None
    if args.tokens:
        with np.load(args.tokens) as z:
            text = np.concatenate([z[k].ravel() for k in z.files]).tolist()
    values = {f.name: getattr(args, f.name) for f in fields(Workload)}
    work = Workload(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    report = header(device_name(), args.commit)
    report |= {"baselines": ["the same session alone on an empty cache"], "runs": []}
    for client, about in servers(args):
        for concurrency in args.concurrency:
            result = about | run(client, work, concurrency, text, args.seconds) | from_log(client)
            result["problems"] = problems(result, args.growth_mb)
            report["runs"].append(result)
            short = {k: v for k, v in result.items() if k not in ("workload", "differences")}
            print(json.dumps(short, indent=1), flush=True)
            if args.out:
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(r["problems"] for r in report["runs"]))


if __name__ == "__main__":
    sys.exit(main())
