"""Serve one model of every kind with a BF16 and with a 2-bit cache and compare their answers.

    python -m scripts.check_models [--only NAME,...] [--real DIR] [--jobs 8]
                                   [--json OUT] [--commit HASH] [--log-dir DIR]

Models of two layers with random weights, made on the spot (``lib/model_kinds.py``), and with --real
(default $OSCAR_NANO_MODEL) one with real weights. Each kind gets up to four servers of its own:

    exact    SGLang's cache
    wide     int2, windows and sink cache that hold everything: any difference is a mistake in how
             the cache is wired to the model
    default  int2, default windows: the error of 2 bits, bounded
    eager    the same without CUDA graphs: must be what the graphs compute (GPU only)

All get the same requests (``lib/forced_decode.py``): a ragged batch with lengths around every
boundary of the windows, prefix hits, a second turn on generated tokens, and an answer that goes
around the ring of recent tokens. Compared are the distributions of every decoded token; differences
are KL divergences, in units of that between answers to different prompts.

--save-reference FILE keeps the answers of "default" on the --real model, --reference FILE compares
with them: made with --device cpu, they say that a GPU answers as the PyTorch reference does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from oscar_sglang.artifact import file as art
from oscar_sglang.launch_server import has_gpu
from scripts.lib.endurance import device_name
from scripts.lib.forced_decode import compare, spread, traffic
from scripts.lib.model_kinds import KINDS, Kind, text_ids, vocabulary
from scripts.lib.provenance import header
from scripts.lib.reference_answers import load, save
from scripts.lib.server import Server
from scripts.lib.shapes import UNCHECKED

ROOT = Path(__file__).resolve().parents[1]
REAL = "real"
TOKENS, RECENT = 8192, 1024  # of the pool; of the wide windows
TOP = 255  # tokens of a distribution beside the forced one: all of a tiny model's
RUNS = {
    "exact": [],
    "wide": [
        *("--oscar-recent-tokens", str(RECENT)),
        *("--oscar-sink-cache-tokens", str(TOKENS + 64), "--oscar-prefix-window", "reuse"),
    ],
    "default": [],
    "eager": ["--disable-cuda-graph"],
}
ALL = ["fresh", "hit", "turn", "long", "again"]
EXACT = ["fresh", "hit", "long", "again"]  # a turn may exceed the wide sinks, and read codes
# (run, compared with, cases, limit of the worst request, in units of the spread)
COMPARISONS = (
    ("wide", "exact", EXACT, {"cuda": 5e-3, "cpu": 1e-6}),
    ("default", "exact", ALL, {"cuda": 0.3, "cpu": 0.3}),
    ("eager", "default", ALL, {"cuda": 5e-3, "cpu": 1e-6}),
    ("default", "reference", ALL, {"cuda": 5e-3, "cpu": 1e-6}),
)


def artifact_of(folder: Path) -> Path:
    """Beside the folder: SGLang takes every .safetensors in it for weights."""
    return folder.with_name(folder.name + ".int2.safetensors")


def serve(name: str, kind: Kind, run: str, folder: Path, args: argparse.Namespace) -> dict:
    """The answers of one server: case -> answers, or {"error": ...}."""
    on_gpu = args.device == "cuda"
    flags = ["--device", args.device, "--dtype", "bfloat16" if on_gpu else "float32"]
    flags += ["--max-total-tokens", str(TOKENS), "--max-running-requests", "8"]
    flags += ["--context-length", "2048", "--mem-fraction-static", "0.5", "--skip-tokenizer-init"]
    flags += ["--cuda-graph-max-bs-decode", "8"] if on_gpu else []
    flags += kind.flags(folder)
    if run == "exact":
        flags += kind.exact if on_gpu else ["--attention-backend", "torch_native"]
    else:
        flags += ["--kv-cache-dtype", "int2", "--oscar-artifact", str(artifact_of(folder))]
        flags += kind.int2 if on_gpu else []
    flags += RUNS[run]
    if run == "wide":
        flags += ["--oscar-sink-tokens", str(kind.sinks)]
    log = args.log_dir / f"check-{name}-{run}.log"
    ids = text_ids(folder, vocabulary(folder), ROOT / "LICENSE")
    started = time.monotonic()
    try:
        with Server(folder, log, *flags, env=UNCHECKED, timeout=400) as server:
            ready = time.monotonic()
            answers = traffic(server, ids, TOP, kind.adapters)
            if run != "exact":
                assert server.state()["tokens_capacity"] >= TOKENS
    except Exception as error:
        lines = str(error).strip().splitlines()
        print(f"{name} {run}: FAILED, see {log}: {lines[-1] if lines else error!r}", flush=True)
        return {"error": "\n".join(lines[-30:]) or repr(error)}
    seconds = [round(t, 1) for t in (ready - started, time.monotonic() - ready)]
    print(f"{name} {run}: started in {seconds[0]} s, answered in {seconds[1]} s", flush=True)
    return answers


def judge(kind: Kind, found: dict[str, dict], device: str) -> dict:
    """The row of one kind from the answers of its runs."""
    errors = {run: answers["error"] for run, answers in found.items() if "error" in answers}
    row = {"errors": errors, "comparisons": [], "ok": not errors}
    if "exact" in errors:
        row["stock"] = "SGLang itself does not serve it here"
        return row
    row["spread"] = unit = spread(found["exact"])
    hit, again = ({"hit": found["exact"][case]} for case in ("hit", "again"))
    row["stock_noise"] = compare(hit, again, ["hit"])["worst"] / unit
    for run, base, cases, limits in COMPARISONS:
        if {run, base} <= found.keys() - errors.keys():
            figures = compare(found[base], found[run], cases)
            ratio, limit = figures["worst"] / unit, limits[device]
            # A comparison that could not fail, or a hit that was none, proves nothing.
            hits = all(found[run][case]["cached"][0] for case in kind.hits)
            ok = ratio <= limit and hits
            row["comparisons"].append(
                {"run": run, "with": base, "ratio": ratio, "limit": limit, "ok": ok}
                | {"prefix_hits": hits}
                | figures
            )
            row["ok"] &= ok
    return row


def check(args: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """Kinds and their rows, each as soon as its servers are done."""
    kinds = {name: kind for name, kind in KINDS.items() if name in args.only}
    if REAL in args.only:
        kinds[REAL] = Kind(lambda folder: None)
    for name, kind in list(kinds.items()):
        if args.device == "cpu" and kind.gpu:
            print(f"{name}: needs a GPU ({kind.gpu}), left out", flush=True)
            del kinds[name]
    folders = {name: args.work / name for name in kinds}
    if REAL in kinds:
        folders[REAL].mkdir()
        for file in args.real.iterdir():
            (folders[REAL] / file.name).symlink_to(file.resolve())
    for name, kind in kinds.items():
        kind.make(folders[name])
        # Calibrated or not: the same codes everywhere are what is compared.
        made = art.data_free(art.Fingerprint.of(folders[name]), "feedback")
        made.save(artifact_of(folders[name]))
    with ThreadPoolExecutor(args.jobs) as pool:
        tasks = {
            (name, run): pool.submit(serve, name, kind, run, folders[name], args)
            for name, kind in kinds.items()
            for run in args.runs
        }
        for name, kind in kinds.items():
            answers = {run: tasks[name, run].result() for run in args.runs}
            if name == REAL and args.save_reference and "error" not in answers["default"]:
                save(args.save_reference, answers["default"])
            if name == REAL and args.reference:
                answers["reference"] = load(args.reference)
            yield name, judge(kind, answers, args.device)


def report(name: str, row: dict) -> None:
    for c in row["comparisons"]:
        verdict = "ok" if c["ok"] else "FAILED" if c["prefix_hits"] else "FAILED (no hit)"
        print(
            f"{name:15} {c['run']:8} against {c['with']:9} {c['ratio']:.1e} of the spread "
            f"(limit {c['limit']:.0e}, {c['worst_request']}), KL mean {c['mean']:.1e} "
            f"max {c['max']:.1e}, top-1 {c['top1']:.1%}: {verdict}",
            flush=True,
        )
    for run, error in row["errors"].items():
        print(f"{name:15} {run:8} FAILED: {error.splitlines()[-1]}", flush=True)


def head(args: argparse.Namespace) -> dict:
    device = device_name() if args.device == "cuda" else "CPU"
    return header(device, args.commit, ("torch", "triton", "sglang", "transformers"))


def write(args: argparse.Namespace, rows: dict[str, dict], seconds: float) -> None:
    """The results so far; kinds of an earlier run that this one leaves out are kept."""
    old = json.loads(args.json.read_text())["models"] if args.json.exists() else {}
    result = {
        **head(args),
        "baselines": "stock SGLang, BF16 cache, same server flags (run exact)",
        "weights": "random, but for the model called real",
        "seconds": round(seconds),
        "models": old | rows,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def parse() -> argparse.Namespace:
    on_gpu = has_gpu()
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", type=lambda text: text.split(","), help="kinds, comma-separated")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if on_gpu else "cpu")
    p.add_argument("--runs", type=lambda text: text.split(","), help=", ".join(RUNS))
    p.add_argument("--real", type=Path, default=os.environ.get("OSCAR_NANO_MODEL"))
    p.add_argument("--reference", type=Path, help="answers to compare the real model's with")
    p.add_argument("--save-reference", type=Path, help="where to keep the real model's answers")
    p.add_argument("--jobs", type=int, default=8 if on_gpu else 2, help="servers at a time")
    p.add_argument("--json", type=Path)
    p.add_argument("--commit", help="of the code, where git does not know it")
    p.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()))
    args = p.parse_args()
    names = [*KINDS, *([REAL] if args.real else [])]
    args.only = args.only or names
    args.runs = args.runs or [r for r in RUNS if args.device == "cuda" or r != "eager"]
    if unknown := {*args.only} - {*names} | {*args.runs} - {*RUNS}:
        p.error(f"{', '.join(sorted(unknown))}: unknown, or --real is missing")
    if "exact" not in args.runs:
        p.error("--runs needs exact: everything is measured against it")
    if args.save_reference and not (REAL in args.only and "default" in args.runs):
        p.error("--save-reference needs --real DIR and the run default")
    return args


def main() -> int:
    args = parse()
    args.log_dir.mkdir(parents=True, exist_ok=True)
    started, rows = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="check_models_") as work:
        args.work = Path(work)
        for name, row in check(args):
            rows[name] = row | {key: head(args)[key] for key in ("commit", "date")}
            report(name, row)
            if args.json:
                write(args, rows, time.monotonic() - started)
    failed = [name for name, row in rows.items() if not row["ok"]]
    print("failed: " + ", ".join(failed) if failed else "every kind agrees", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
