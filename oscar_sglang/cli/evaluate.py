"""``oscar-sglang eval`` and ``report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from .console import numbers, peak_memory, positive, progress_bar, whole, writable

_COLUMNS = ("codec", "context", "bits", "KL", "top-1", "dNLL", "ppl", "agree", "induct", "recall")


def add(commands) -> None:
    p = commands.add_parser(
        "eval",
        help="what 2 bits do to a model, per method, against its exact cache",
        description="Runs every chosen method on the last 129 rows of each document, on a "
        "quantised cache of all that is before them. Interrupted runs continue from --json.",
    )
    add_arg = p.add_argument
    add_arg("--model", required=True, metavar="DIR", type=Path, help="local model directory")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--artifact", metavar="FILE", type=Path, help="judge a calibrated artifact")
    source.add_argument(
        "--calibration",
        default="random",
        metavar="SOURCE",
        help="calibrate on random ids (default; random:N: sequences of N), a text file, or NPZ:KEY",
    )
    add_arg(
        "--codecs",
        metavar="LIST",
        help="all, or names separated by commas; NAME@SINK+RECENT sets windows "
        "(default: the artifact's codec, else feedback)",
    )
    add_arg("--text", nargs="+", default=[], metavar="FILE", type=Path, help="documents")
    add_arg("--tokens", metavar="NPZ", type=Path, help="documents test_*, induction rows induct")
    add_arg("--documents", metavar="KEYS", help="of --tokens, separated by commas (default: all)")
    add_arg("--recall", metavar="JSON", type=Path, help="documents with facts and questions")
    add_arg("--context", type=numbers, default=(2048,), metavar="N,N", help="default 2048")
    add_arg("--sink", type=whole, default=64, help="exact first tokens (default 64)")
    add_arg("--recent", type=whole, default=256, help="exact last tokens (default 256)")
    add_arg("--sweep-windows", action="store_true", help="also other window sizes of each codec")
    add_arg("--concurrency", type=positive, default=32, help="requests windows are priced for")
    add_arg("--greedy", type=whole, default=64, metavar="N", help="tokens generated to compare")
    add_arg("--calibration-tokens", type=positive, default=8192, metavar="N", help="default 8192")
    add_arg("--device", default="cpu", help="cpu (default) or cuda")
    add_arg("--seed", type=int, default=0, help="of random calibration ids (default 0)")
    add_arg("--json", metavar="OUT", type=Path, help="results, and what a resumed run needs")
    add_arg("--html", metavar="OUT", type=Path, help="one self-contained report")
    p.set_defaults(run=run_eval)

    p = commands.add_parser("report", help="write the HTML report of a finished eval --json")
    p.add_argument("json", metavar="JSON", type=Path)
    p.add_argument("--html", required=True, metavar="OUT", type=Path)
    p.set_defaults(run=run_report)


def run_eval(args: argparse.Namespace, console: Console) -> None:
    """Evaluate, print a row per finished item and the table at the end, write JSON and HTML."""
    from ..calibration.evaluation.evaluate import Options, evaluate

    options = Options(
        model=args.model,
        codecs=args.codecs,
        contexts=args.context,
        tokens=args.tokens,
        documents=tuple(args.documents.split(",")) if args.documents else None,
        texts=tuple(args.text),
        recall=args.recall,
        artifact=args.artifact,
        calibration=args.calibration,
        calibration_tokens=args.calibration_tokens,
        sink=args.sink,
        recent=args.recent,
        greedy=args.greedy,
        sweep=args.sweep_windows,
        concurrency=args.concurrency,
        device=args.device,
        seed=args.seed,
        json=writable(args.json, "--json"),
    )
    writable(args.html, "--html")
    with progress_bar(console) as progress:

        def report(label, key, figures, done, total):
            console.print(_line(label, key, figures), soft_wrap=True, highlight=False)
            progress("evaluating", done, total)

        found = evaluate(options, report, progress)
    console.print(_table(found["results"]))
    for sentence in _verdict(found):
        console.print(sentence, soft_wrap=True, highlight=False)
    if args.html:
        _write_report(found, args.html)
    console.print(f"peak memory {peak_memory(args.device)}", highlight=False)


def run_report(args: argparse.Namespace, console: Console) -> None:
    from ..calibration.report.page import read_evaluation

    writable(args.html, "--html")
    _write_report(read_evaluation(args.json), args.html)
    console.print(f"wrote {args.html}", soft_wrap=True, highlight=False)


def _write_report(found: dict, path: Path) -> None:
    from ..calibration.report.page import page

    path.write_text(page(found), encoding="utf-8")


def _verdict(found: dict) -> list[str]:
    from ..calibration.report.verdict import verdict

    return verdict(found)


def _line(label: str, key: str, figures: dict) -> str:
    """One finished item, e.g. ``text/2048/prose  feedback  KL 0.0103  top-1 96.7%``."""
    shown = [f"{key:<32} {label:<28}"]
    if "kl" in figures:
        shown.append(f"KL {figures['kl']:.4f}  top-1 {figures['top1']:.1%}")
    if "induct" in figures:
        shown.append(f"induction {figures['induct']:.1%}")
    if "right" in figures:
        shown.append(f"recall {figures['right']}/{figures['asked']}")
    return "  ".join(shown)


def _table(results: list[dict]) -> Table:
    title = "against the exact cache (bits: history rows, measured)"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "codec" else "right", no_wrap=True)
    for r in results:
        recall = r.get("recall") or {}
        table.add_row(
            r["codec"],
            str(r["context"] or "-"),
            _cell(r, "bits", "{:.3f}"),
            _cell(r, "kl", "{:.4f}"),
            _cell(r, "top1", "{:.1%}"),
            _cell(r, "dnll", "{:+.4f}"),
            _cell(r, "perplexity", "{:.2f}"),
            _cell(r, "agree", "{:.0f}"),
            _cell(r, "induct", "{:.1%}"),
            " ".join(f"{int(c) // 1024}k:{v:.0%}" for c, v in recall.items()) or "-",
        )
    return table


def _cell(row: dict, name: str, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else form.format(round(value, 6) + 0.0)
