"""Serving speed of BF16, FP8 and 2-bit caches on one GPU, same memory fraction, one run.

    python -m scripts.bench_serving [--shape qwen3-8b] [--caches bf16,fp8,int2]
                                    [--scenarios memory,prefill,decode,ttft,job,agents]
                                    [--soak 2000] [--json OUT] [--commit HASH]

Random (dummy) weights of the named shape at full depth: latency and memory are those of the real
model, its text is not. Each cache gets a server of its own with SGLang's best default backend
(FlashAttention-3 on a Hopper; page size 64 for FP8, which is slow at SGLang's default of 1) and the
traffic of SGLang's own benchmark client. Scenarios:

    memory   tokens held; planned and real GPU memory
    prefill  tokens per second of a fresh 8k prompt
    decode   time per output token, batch x context, every prompt a full prefix hit of one document
    ttft     time to the first token of turns of 128, 16 and 1 tokens on a cached 100k prefix
    job      questions about more documents than BF16 and FP8 hold ("shared"), and one stream per
             document that fits ("hot"); with --job-mem-fraction, to be short
    agents   multi-turn sessions with a shared system prompt; same fraction
    soak     many mixed requests with aborts: slots lost, memory growth

Results are merged into --json after every scenario; a second run replaces what it measures again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.lib import endurance, latency, serving_options, throughput
from scripts.lib.provenance import header
from scripts.lib.server import Server
from scripts.lib.serving_rows import add_speedups, merge
from scripts.lib.shapes import (
    CACHES,
    SHAPES,
    UNCHECKED,
    common_arguments,
    model_folder,
)

LOADED = ("job", "agents")  # scenarios that run with --job-mem-fraction


class Results:
    """Rows of this run and of earlier ones, written to the JSON file as they come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.servers, self.rows, self.earlier = args, {}, [], []
        if args.json and args.json.exists():
            data = json.loads(args.json.read_text())
            self.rows, self.servers = merge(data["rows"], []), data.get("servers", {})
            self.earlier = [*data.get("earlier_commands", []), data["command"]]
        self.header = header(endurance.device_name(), args.commit)

    def add(self, row: dict, scenario: str, cache: str, mem_fraction: str) -> None:
        args = self.args
        row = {"cache": cache, "model": args.shape, "scenario": scenario, **row}
        layers = args.layers or SHAPES[args.shape]["num_hidden_layers"]
        row["conditions"] |= {"layers": layers, "mem_fraction": mem_fraction}
        row |= {key: self.header[key] for key in ("commit", "date")}
        self.rows = add_speedups(merge(self.rows, [row]))
        print(json.dumps(next(r for r in self.rows if r.items() >= row.items())), flush=True)
        if args.json:
            args.json.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict:
        return {
            **self.header,
            "earlier_commands": self.earlier,
            "weights": "dummy (random): speed only",
            "servers": self.servers,
            "rows": self.rows,
        }


def measure(
    server: Server, scenario: str, args: argparse.Namespace, rows: list[dict], used: int | None
) -> Iterator[dict]:
    """Rows of one scenario; ``used``: bytes on the GPU before the server was there."""
    match scenario:
        case "memory":
            yield endurance.memory(server, used)
        case "prefill" | "decode" | "ttft":
            yield from getattr(latency, scenario)(server, args)
        case "job":
            yield from throughput.job(server, args, rows)
        case "agents":
            yield throughput.agents(server, args, "radix", args.agents_sessions)
        case "soak":
            yield endurance.soak(server, args)


def run(
    results: Results, folder: Path, cache: str, mem_fraction: str, scenarios: list[str]
) -> None:
    """One server and the scenarios that it is asked for."""
    args = results.args
    flags = args.flags.get(cache, CACHES[cache]) + args.server_flags
    flags = [*common_arguments(mem_fraction), *flags]
    results.servers[f"{args.shape} {cache} {mem_fraction}"] = shlex.join(flags)
    log = args.log_dir / f"server-{args.shape}-{cache}-{mem_fraction}.log"
    used = endurance.gpu_used(settled=True)
    started = time.monotonic()
    with Server(folder, log, *flags, env=UNCHECKED, timeout=400) as server:
        print(f"{cache}: server started in {time.monotonic() - started:.0f} s", flush=True)
        # The int2 option that changes hit rates and first tokens.
        oscar = server.internal_state().get("oscar", {})
        option = {k: v for k, v in oscar.items() if k == "prefix_window"}
        for scenario in scenarios:
            started = time.monotonic()
            for row in measure(server, scenario, args, results.rows, used):
                results.add(row | option, scenario, cache, mem_fraction)
            print(f"{cache}: {scenario} took {time.monotonic() - started:.0f} s", flush=True)
    if "agents" in scenarios and args.agents_no_radix:
        log = log.with_stem(log.stem + "-no-radix")
        flags.append("--disable-radix-cache")
        with Server(folder, log, *flags, env=UNCHECKED, timeout=400) as server:
            row = throughput.agents(server, args, "no-radix", args.agents_no_radix)
            results.add(row | option, "agents", cache, mem_fraction)


def main() -> int:
    args = serving_options.finish(serving_options.parser(__doc__.splitlines()[0]))
    folder, results = model_folder(args.shape, args.layers), Results(args)
    for cache in args.caches:
        servers: dict[str, list[str]] = {}  # by memory fraction, one where both are the same
        for scenario in args.scenarios:
            fraction = args.job_mem_fraction if scenario in LOADED else args.mem_fraction
            servers.setdefault(fraction, []).append(scenario)
        for fraction, scenarios in servers.items():
            run(results, folder, cache, fraction, scenarios)
    lost = [r["cache"] for r in results.rows if r.get("slots_lost") or r.get("tokens_in_use_after")]
    if lost:
        print("slots were lost:", *lost)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
