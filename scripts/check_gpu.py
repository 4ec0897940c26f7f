"""Everything that only a GPU can show, step by step: tests, agreement, soaks, speed.

python -m scripts.check_gpu --out results --model QWEN3_NANO   (--list: the steps, their limits)

A step that fails, or runs past its limit, is stopped with all that it started, and the next one
begins; steps.json is rewritten after each, so a run that is cut short has reported what it did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from scripts.lib.endurance import device_name
from scripts.lib.provenance import header

ROOT = Path(__file__).resolve().parents[1]

TAIL = 15  # lines of a step's log that are shown


class Step(NamedTuple):
    """``command`` runs in the checkout, after this Python; {out}, {model}, {commit}, {workers} are
    filled in. ``seconds`` is a limit with room, by what it took on an H200 host of 16 cores."""

    seconds: int
    command: str

    def argv(self, args: argparse.Namespace) -> list[str]:
        values = {name: getattr(args, name) for name in ("out", "model", "commit", "workers")}
        return [sys.executable, *(word.format(**values) for word in self.command.split())]

    @property
    def needs_model(self) -> bool:
        return "{model}" in self.command


# Sessions with shared prefixes on a pool that is too small, SGLang's forced retraction on top,
# every fourth step checked against the ownership tags.
SOAK = (
    "-m scripts.agent_sim --model {model} --log-dir {out} --commit {commit} --sessions 12 --turns 6"
    " --systems 4 --system-tokens 512 --turn-tokens 16 160 --answer-tokens 8 48 --concurrency 8"
    " --tokens tests/data/nano_tokens.npz --retract-every 50 --seconds 90"
)
TAGGED = (
    " -- --kv-cache-dtype int2 --max-total-tokens 6000 --max-running-requests 16"
    " --schedule-conservativeness 0 --oscar-debug-tags --oscar-debug-tags-every 4"
)

# The first ones matter most; speed comes last, when nothing else may run on the machine.
STEPS = {
    "kernels": Step(500, "-m pytest -q -rf -n {workers} tests/kernels"),
    "tags": Step(120, "-m pytest -q -rf tests/serving/test_gpu_backend.py"),
    "doctor": Step(120, "-m oscar_sglang.cli doctor --model {model}"),
    "demo": Step(240, "-m scripts.demo --model {model} --log {out}/demo-server.log"),
    "memory-saver": Step(
        300, "-m scripts.check_memory_saver --model {model} --log {out}/memory-saver-server.log"
    ),
    "models": Step(
        500,
        "-m scripts.check_models --real {model} --jobs {workers} --log-dir {out} --commit {commit}"
        " --reference scripts/results/nano-answers-cpu.npz --json {out}/models.json",
    ),
    "soak": Step(300, SOAK + " --page-sizes 16 --out {out}/soak-tags.json" + TAGGED),
    "soak-omni": Step(
        300,
        SOAK + " --page-sizes 128 --out {out}/soak-tags-omni.json" + TAGGED + " --oscar-codec omni",
    ),
    "bench": Step(300, "-m scripts.bench_kernels --out {out}/kernels.json --commit {commit}"),
    "profile": Step(
        300,
        "-m scripts.profile_serving --log-dir {out} --json {out}/profile.json --commit {commit}",
    ),
}


def run(command: list[str], seconds: float, log: Path) -> int | None:
    """Exit code, None past ``seconds``: then the command is killed and what it has started with it,
    because a server that stayed would hold the GPU's memory."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                root = psutil.Process(process.pid)
                family = [*root.children(recursive=True), root]
                for member in family:
                    member.kill()
                psutil.wait_procs(family, timeout=30)
                process.wait()


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--out", type=Path, default=Path("check_gpu"), help="folder for results and logs"
    )
    model = os.environ.get("OSCAR_NANO_MODEL")
    p.add_argument("--model", type=Path, default=model, help="folder of the qwen3-nano test model")
    p.add_argument("--only", type=lambda text: text.split(","), help="steps, comma-separated")
    p.add_argument("--workers", type=int, default=12, help="of tests and servers at a time")
    p.add_argument("--commit", help="of the code, where git does not know it")
    p.add_argument("--list", action="store_true", help="show the steps and stop")
    args = p.parse_args()
    args.out = args.out.absolute()
    args.model = args.model and args.model.absolute()
    args.only = args.only or [n for n, step in STEPS.items() if args.model or not step.needs_model]
    if unknown := set(args.only) - set(STEPS):
        p.error(f"--only: {', '.join(sorted(unknown))}: not among {', '.join(STEPS)}")
    if not args.model and (lacking := [n for n in args.only if STEPS[n].needs_model]):
        p.error(f"--model is missing, which {', '.join(lacking)} needs")
    return args


def show(rows: dict[str, dict]) -> None:
    table = Table("step", "result", "seconds")
    for name, row in rows.items():
        table.add_row(name, row["result"], str(row["seconds"]))
    Console().print(table)


def main() -> int:
    args = parse()
    if args.list:
        for name, step in STEPS.items():
            print(f"{name:12} {step.seconds:4} s  {step.command}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    head = header(device_name(), args.commit)
    args.commit, rows = head["commit"], {}
    for name in args.only:
        print(f"== {name}", flush=True)
        log, started = args.out / f"{name}.log", time.monotonic()
        code = run(STEPS[name].argv(args), STEPS[name].seconds, log)
        said = {None: "past its limit", 0: "passed"}.get(code, f"failed (exit {code})")
        rows[name] = {"result": said, "seconds": round(time.monotonic() - started)}
        print(*log.read_text(errors="replace").splitlines()[-TAIL:], sep="\n", flush=True)
        (args.out / "steps.json").write_text(json.dumps({**head, "steps": rows}, indent=1) + "\n")
    show(rows)
    return int(any(row["result"] != "passed" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
