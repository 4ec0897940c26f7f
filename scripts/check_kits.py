"""Run SGLang's own server test kits against a stock and an int2 server: what differs is a bug.

    python -m scripts.check_kits --model DIR [--kits NAME,...] [--json OUT] [-- SERVER FLAGS]
    python -m scripts.check_kits --list          the kits, and why the others are left out

The kits are in SGLang's wheel (``sglang.test.kits``). Both servers get the same flags; a kit that
needs other flags gets a pair of servers of its own (``lib/kits.py``). A test may fail in both, as
the questions about capitals do for a small model. On a CPU the load is smaller (``Kit.small``).
Exit status 1 if a test passes on the one and not on the other. With --json each kit is written as
it ends, and a run with --caches int2 completes one of stock under the same flags.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oscar_sglang.launch_server import enter_cpu_mode, has_gpu
from scripts.lib.endurance import device_name
from scripts.lib.kits import KITS, LEFT_OUT, SETUPS, Kit, test_case
from scripts.lib.provenance import header
from scripts.lib.server import Server
from scripts.lib.shapes import CACHES as GPU

CACHES = {
    "stock": GPU["bf16"] if has_gpu() else ["--attention-backend", "torch_native"],
    "int2": GPU["int2"],
}
MESSAGE = 300  # characters of a failure that are kept


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", type=Path, help="folder of a model with a tokenizer")
    p.add_argument("--caches", type=lambda text: text.split(","), default=list(CACHES))
    p.add_argument("--kits", type=lambda text: text.split(","), help="class names [all]")
    p.add_argument("--tests", type=lambda text: text.split(","), help="only these methods")
    p.add_argument("--limit", type=float, default=300, help="seconds of a test [300]")
    p.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()))
    p.add_argument("--json", type=Path, help="results; those of other kits in it are kept")
    p.add_argument("--commit", help="of the code, where git does not know it")
    p.add_argument("--list", action="store_true", help="show the kits and stop")
    own = sys.argv[1:]
    stop = own.index("--") if "--" in own else len(own)
    args = p.parse_args(own[:stop])
    args.flags, names = own[stop + 1 :], [k.name for k in KITS]
    if unknown := set(args.caches) - set(CACHES):
        p.error(f"--caches: {unknown.pop()} is none of {', '.join(CACHES)}")
    if unknown := set(args.kits or ()) - set(names):
        p.error(f"--kits: {unknown.pop()} is none of {', '.join(names)}")
    if not args.list and (args.model is None or not args.model.is_dir()):
        p.error("--model DIR is missing, or no folder")
    return args


def run_test(case: unittest.TestCase, limit: float) -> tuple[str, str]:
    """("passed" | "failed" | "timeout" | "skipped", why); what it prints is dropped."""
    result = unittest.TestResult()
    thread = threading.Thread(target=case.run, args=(result,), daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        return "timeout", f"after {limit:g} s"
    problems = [*result.failures, *result.errors]
    if problems:
        return "failed", problems[0][1].strip().splitlines()[-1][:MESSAGE]
    if result.skipped:
        return "skipped", result.skipped[0][1][:MESSAGE]
    return "passed", ""


def settle(server: Server) -> str:
    """Why the server is not as it was before the test, "" if it is: nothing in use, cache empty."""
    if server.process.poll() is not None:
        return f"server ended with {server.process.returncode}"
    try:
        server.abort_all()
        server.flush()
        used = server.load()["num_used_tokens"]
    except (OSError, TimeoutError) as error:
        return f"server does not settle: {error}"
    return f"{used} tokens stay in use" if used else ""


def run_kit(kit: Kit, server: Server, args: argparse.Namespace) -> dict[str, dict]:
    """Results by test."""
    try:
        made = test_case(kit, server, str(args.model), small=not has_gpu())
    except ImportError as error:
        return {"(import)": {"result": "skipped", "why": f"needs a package: {error}"}}
    names = unittest.defaultTestLoader.getTestCaseNames(made)
    names = [n for n in names if not args.tests or n in args.tests]
    found = {n: {"result": "not run", "why": "the server had ended", "seconds": 0} for n in names}
    for name in names:
        began = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            result, why = run_test(made(name), args.limit)
        if result == "timeout":  # what the test still sends would disturb the next
            server.kill()
        elif problem := settle(server):
            result, why = "failed", f"{problem} {why}".strip()
        seconds = round(time.monotonic() - began, 1)
        found[name] = {"result": result, "why": why, "seconds": seconds}
        print(f"  {kit.name}.{name}: {result} ({seconds} s) {why}", flush=True)
        if server.process.poll() is not None:
            break
    return found


def run_setup(name: str, cache: str, kits: list[Kit], args: argparse.Namespace) -> Iterator:
    """(kit, results by test) of one server; of a new one where a test has ended the last."""
    setup, kits = SETUPS[name], list(kits)
    flags = [*CACHES[cache], *args.flags, *setup.flags, *(setup.int2 if cache == "int2" else ())]
    while kits:
        log = args.log_dir / f"kits-{name}-{cache}-{len(kits)}.log"
        print(f"{cache}: {shlex.join(flags)}", flush=True)
        with Server(args.model, log, *flags, env=setup.env, timeout=900) as server:
            while kits and server.process.poll() is None:
                kit = kits.pop(0)
                yield kit, run_kit(kit, server, args)


class Results:
    """Rows of this run, and of other kits in the file, written as they come."""

    def __init__(self, args: argparse.Namespace, chosen: list[Kit]) -> None:
        self.args, self.rows, self.earlier = args, {}, []
        if args.json and args.json.exists():
            data = json.loads(args.json.read_text())
            self.rows = {r["kit"]: r for r in data["rows"]}
            self.earlier = [*data.get("earlier_commands", []), data["command"]]
        for kit in chosen:
            about = {"kit": kit.name, "model": args.model.name, "setup": kit.setup}
            about["flags"] = shlex.join(args.flags)
            row = self.rows.get(kit.name, {})
            if not row.items() >= about.items():  # what was run otherwise is no comparison
                row = self.rows[kit.name] = {**about, "tests": {}}
            for cache in args.caches:
                row["tests"].pop(cache, None)
        self.header = header(device_name(), args.commit)

    def add(self, kit: Kit, cache: str, tests: dict[str, dict]) -> None:
        self.rows[kit.name]["tests"][cache] = tests
        if self.args.json:
            self.args.json.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict:
        rows = [r for r in self.rows.values() if r["tests"]]
        return {
            **self.header,
            "earlier_commands": self.earlier,
            "baselines": ["stock: SGLang's own cache, the same tests"],
            "left_out": LEFT_OUT,
            "differences": differences(rows),
            "rows": rows,
        }


def differences(rows: list[dict]) -> list[str]:
    """Tests whose result is not the same in both."""
    found = []
    for row in rows:
        stock, int2 = (row["tests"].get(c, {}) for c in CACHES)
        for test in sorted({*stock, *int2}):
            a, b = (r.get(test, {}).get("result", "missing") for r in (stock, int2))
            if a != b:
                found.append(f"{row['kit']}.{test}: stock {a}, int2 {b}")
    return found


def counts(tests: dict[str, dict]) -> str:
    """ "5 passed, 1 failed" """
    results = [t["result"] for t in tests.values()]
    return ", ".join(f"{results.count(r)} {r}" for r in dict.fromkeys(sorted(results)[::-1]))


def show(rows: list[dict], console: Console) -> None:
    table = Table("kit", *CACHES, "differs")
    for row in rows:
        cells = [counts(row["tests"].get(cache, {})) for cache in CACHES]
        table.add_row(row["kit"], *cells, "\n".join(differences([row])) or "-")
    console.print(table)


def main() -> int:
    args, console = parse(), Console(width=None if sys.stdout.isatty() else 160)
    if args.list:
        for kit in KITS:
            console.print(f"{kit.name:32} server: {kit.setup}", highlight=False)
        for name, why in LEFT_OUT.items():
            console.print(f"{name:32} left out: {why}", highlight=False, soft_wrap=True)
        return 0
    if not has_gpu():
        enter_cpu_mode()  # before anything imports sglang
    args.log_dir.mkdir(parents=True, exist_ok=True)
    chosen = [k for k in KITS if not args.kits or k.name in args.kits]
    results = Results(args, chosen)
    for setup in dict.fromkeys(k.setup for k in chosen):
        for cache in args.caches:
            for kit, tests in run_setup(
                setup, cache, [k for k in chosen if k.setup == setup], args
            ):
                results.add(kit, cache, tests)
    data = results.as_dict()
    show(data["rows"], console)
    return int(bool(data["differences"]))


if __name__ == "__main__":
    sys.exit(main())
