"""Recorded agent sessions against BF16, FP8 and 2-bit caches of one machine, same memory.

    python -m scripts.bench_agents TRACES [--caches bf16,fp8,int2] [--users 8,16,32,48]
                                   [--price 3.5] [--shared-prefix] [--json OUT] [--commit HASH]

TRACES: a folder, .json file or tar archive of recorded sessions (``lib/agent_traces.py`` says which
format; ``github.com/callanjfox/kv-cache-tester`` has 739 of them, Apache-2.0). Users in closed
loop: each replays a session from somewhere in its first two thirds, then others from their start;
a request follows the answer before after the recorded pause, at most --think seconds. After the
warm-up a window is measured. A session's first request, whose prefix nobody had, is left out of
latencies and hit rate. What the next request contains of an answer is what was recorded, not what
the server said, so answers are never hit.

Users at the SLO: the most for whom, and for all smaller numbers asked for, 95% of the requests get
their first token within --slo-ttft and at least --slo-rate tokens per second after it. --price
is what the machine costs an hour, in any currency. --shared-prefix runs SGLang's own
``generated-shared-prefix`` benchmark on each server first. Weights are random (``lib/shapes.py``):
speed only. A run can be done in parts (--caches int2 --users 16): the file's other rows are kept,
if their conditions are the same. ``plot_agents.py`` draws the file.

Without a GPU, to see that it runs: --shape tiny --caches bf16,int2, a small trace, and
--server-flags "--max-total-tokens 8192".
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oscar_sglang.launch_server import has_gpu
from scripts.lib import agent_traces, shared_prefix, trace_load
from scripts.lib.endurance import device_name
from scripts.lib.provenance import header
from scripts.lib.server import Server
from scripts.lib.serving_options import cache_flags, names, numbers
from scripts.lib.shapes import CACHES, SHAPES, UNCHECKED, common_arguments, model_folder
from scripts.lib.shared_prefix import Groups
from scripts.lib.throughput import retractions

CONTEXT = 131_072  # of the servers
CPU = {"bf16": ["--attention-backend", "torch_native"], "int2": CACHES["int2"]}
COLUMNS = {
    "requests/s": "requests_per_s",
    "hit rate": "cache_hit_rate",
    "TTFT p50, s": "ttft_p50_s",
    "TTFT p95, s": "ttft_p95_s",
    "TPOT p50, ms": "tpot_p50_ms",
    "TPOT p95, ms": "tpot_p95_ms",
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    load, slo, groups = trace_load.Load(0), trace_load.Slo(), Groups()
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("traces", type=Path, help="recorded sessions")
    p.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    p.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    p.add_argument("--caches", type=names(CACHES), default=list(CACHES))
    p.add_argument("--users", type=numbers, default=[8, 16, 32, 48], help="at a time, one run each")
    p.add_argument("--mem-fraction", default="0.5")
    p.add_argument("--running", type=int, default=48, help="requests that run at a time [48]")
    for name, text in (
        ("think", "seconds between an answer and the next request, at most"),
        ("warmup", "seconds before the window"),
        ("window", "seconds that are measured"),
        ("drain", "seconds after it for what has begun"),
        ("max-new-tokens", "of an answer, whatever was recorded"),
        ("seed", "of sessions and starts"),
    ):
        default = getattr(load, name.replace("-", "_"))
        p.add_argument("--" + name, type=type(default), default=default, help=f"{text} [{default}]")
    p.add_argument("--slo-ttft", type=float, default=slo.ttft, help=f"seconds [{slo.ttft}]")
    p.add_argument("--slo-rate", type=float, default=slo.tokens_per_s, help="tokens/s of a user")
    p.add_argument("--price", type=float, help="of the machine, per hour: adds price per million")
    p.add_argument("--shared-prefix", action="store_true", help="SGLang's own benchmark as well")
    for field in fields(groups):
        p.add_argument(
            f"--shared-prefix-{field.name.replace('_', '-')}",
            type=type(getattr(groups, field.name)), default=getattr(groups, field.name),
            help=f"[{getattr(groups, field.name)}]",
        )  # fmt: skip
    p.add_argument(
        "--flags", type=cache_flags, action="append", default=[], metavar="CACHE=FLAGS",
        help="server flags of a cache instead of the default ones",
    )  # fmt: skip
    p.add_argument("--server-flags", type=shlex.split, default=[], help="more, for every cache")
    p.add_argument("--json", type=Path, help="results file; other rows in it stay")
    p.add_argument("--commit", help="of the code, where git does not know it")
    p.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()))
    args = p.parse_args(argv)
    args.flags = dict(args.flags)
    args.users.sort()
    if not has_gpu() and (unknown := set(args.caches) - set(CPU) - set(args.flags)):
        p.error(f"--caches {','.join(sorted(unknown))} needs a GPU")
    try:
        args.sessions = agent_traces.load(args.traces, CONTEXT - 1)
    except (OSError, agent_traces.TraceError) as error:
        p.error(str(error))
    if max(args.users) > len(args.sessions):
        p.error(f"--users {max(args.users)}: there are {len(args.sessions)} sessions to replay")
    return args


class Results:
    """Rows as they come, and the file; what it has of other caches and users is kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows, self.shared, self.servers = args, [], [], {}
        self.slo = trace_load.Slo(args.slo_ttft, args.slo_rate)
        self.header, self.earlier = header(device_name(), args.commit), []
        shared = {f.name: getattr(args, f.name) for f in fields(trace_load.Load)[1:]}
        self.loads = [trace_load.Load(users, **shared) for users in args.users]
        self.conditions = {
            "device": self.header["device"],
            "weights": "dummy (random): speed only",
            "model": args.shape,
            "layers": args.layers or SHAPES[args.shape]["num_hidden_layers"],
            "mem_fraction": args.mem_fraction,
            "running": args.running,
            "traces": {
                "file": args.traces.name,
                "sessions": len(args.sessions),
                "requests": sum(len(s.requests) for s in args.sessions),
                "block_sizes": sorted({s.block_size for s in args.sessions}),
            },
            "load": shared,
            "slo": asdict(self.slo),
            "price_per_hour": args.price,
        }
        if args.json and args.json.exists():
            self._keep(json.loads(args.json.read_text()))

    def _keep(self, data: dict) -> None:
        args = self.args
        if other := [k for k, v in self.conditions.items() if data.get(k) != v]:
            sys.exit(f"{args.json} was measured with another {', '.join(other)}: name a new file")
        again = {(cache, users) for cache in args.caches for users in args.users}
        self.rows = [r for r in data["rows"] if (r["cache"], r["users"]) not in again]
        self.shared, self.servers = data["shared_prefix"], data["servers"]
        if args.shared_prefix:
            self.shared = [r for r in self.shared if r["cache"] not in args.caches]
        self.earlier = [*data["earlier_commands"], data["command"]]

    def as_dict(self) -> dict:
        caches = [c for c in CACHES if any(r["cache"] == c for r in self.rows)]
        of = {cache: [r for r in self.rows if r["cache"] == cache] for cache in caches}
        return {
            **self.header,
            "earlier_commands": self.earlier,
            "baselines": [c for c in caches if c != "int2"],
            **self.conditions,
            "servers": self.servers,
            "users_at_slo": {cache: trace_load.users_at_slo(of[cache]) for cache in caches},
            "rows": [r for c in caches for r in sorted(of[c], key=lambda r: r["users"])],
            "shared_prefix": self.shared,
        }

    def write(self) -> None:
        if self.args.json:
            self.args.json.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def add(self, cache: str, row: dict) -> None:
        row = {"cache": cache, **row, "slo": trace_load.keeps(row, self.slo)}
        if self.args.price:
            row |= trace_load.price(row, self.args.price)
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.write()


def measure(cache: str, folder: Path, results: Results) -> None:
    """One server, every number of users on it, each from an empty cache."""
    args = results.args
    flags = args.flags.get(cache, (CACHES if has_gpu() else CPU).get(cache))
    running = str(args.running)
    flags = [*common_arguments(args.mem_fraction), *flags, *args.server_flags]
    flags += ["--max-running-requests", running, "--cuda-graph-max-bs-decode", running]
    results.servers[cache] = {"flags": shlex.join(flags)}
    log = args.log_dir / f"agents-{args.shape}-{cache}.log"
    with Server(folder, log, *flags, env=UNCHECKED, timeout=900) as server:
        held = server.internal_state()["memory_usage"]["token_capacity"]
        results.servers[cache]["tokens_held"] = held
        print(f"{cache}: {held} tokens held", flush=True)
        if args.shared_prefix:
            sizes = {f.name: getattr(args, f"shared_prefix_{f.name}") for f in fields(Groups)}
            row = {"cache": cache, **shared_prefix.run(server, folder, Groups(**sizes), 1800)}
            results.shared.append(row)
            print(json.dumps(row), flush=True)
        for load in results.loads:
            server.flush()
            before = retractions(server)
            row = trace_load.run(server, args.sessions, load)
            results.add(cache, row | {"retractions": retractions(server) - before})


PRICES = {"price per M out": "price_per_m_output", "per M all": "price_per_m_tokens"}


def show(data: dict, console: Console) -> None:
    columns = COLUMNS | (PRICES if data["price_per_hour"] else {})
    table = Table("", "users", *columns, "SLO", title=f"{data['model']}, recorded agent sessions")
    for row in data["rows"] + data["shared_prefix"]:
        cells = ["-" if row.get(k) is None else f"{row[k]:.4g}" for k in columns.values()]
        kept = {True: "yes", False: "no"}.get(row.get("slo"), "")
        table.add_row(row["cache"], str(row.get("users", "shared prefix")), *cells, kept)
    console.print(table)
    for cache, users in data["users_at_slo"].items():
        console.print(f"{cache}: {users} users at the SLO", highlight=False)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.log_dir.mkdir(parents=True, exist_ok=True)
    folder, results = model_folder(args.shape, args.layers), Results(args)
    for cache in args.caches:
        measure(cache, folder, results)
    results.write()
    show(results.as_dict(), Console(width=None if sys.stdout.isatty() else 140))
    return 0


if __name__ == "__main__":
    sys.exit(main())
