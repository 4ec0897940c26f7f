"""``oscar-sglang eval`` and ``report``."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from .console import (
    add_command,
    add_device,
    add_sample,
    numbers,
    peak_memory,
    positive,
    progress_bar,
    whole,
    writable,
)
from .model import add_model, model_folder

_COLUMNS = ("codec", "context", "bits", "KL", "top-1", "dNLL", "ppl", "agree", "induct", "recall")


def add(commands) -> None:
    p = add_command(
        commands,
        "eval",
        run_eval,
        "Measure what 2 bits do to a model, per method, against its exact cache.",
        "--model Qwen/Qwen3-8B --text a.txt b.txt --html report.html",
        "--model DIR --codecs feedback,kivi@0+128 --text a.txt --context 4096,16384 --json j.json",
        more="Runs every chosen method on the last 129 rows of each document, on a quantised cache "
        "of all that is before them. Interrupted runs continue from --json.",
    )
    add_model(p)
    methods = p.add_argument_group("methods")
    methods.add_argument(
        "--codecs",
        metavar="LIST",
        help="all, or names separated by commas; NAME@SINK+RECENT sets windows "
        "(default: the artifact's codec, else feedback)",
    )
    add_whole = partial(methods.add_argument, type=whole, metavar="N")
    add_whole("--sink", default=64, help="exact first tokens (default: %(default)s)")
    add_whole("--recent", default=256, help="exact last tokens (default: %(default)s)")
    methods.add_argument(
        "--sweep-windows", action="store_true", help="also other window sizes of each codec"
    )
    add_device(add_sample(p, tokens=8192, seed=0, prefix="calibration", or_artifact=True))
    documents = p.add_argument_group("documents and questions")
    add_arg = documents.add_argument
    add_arg("--text", nargs="+", default=[], metavar="FILE", type=Path, help="UTF-8 documents")
    add_arg("--tokens", metavar="NPZ", type=Path, help="documents test_*, induction rows induct")
    add_arg("--documents", metavar="KEYS", help="of --tokens, separated by commas (default: all)")
    add_arg("--recall", metavar="JSON", type=Path, help="documents with facts and questions")
    add_arg(
        "--context",
        type=numbers,
        default=(2048,),
        metavar="N,N",
        help="tokens of each document (default: 2048)",
    )
    add_arg(
        "--greedy",
        type=whole,
        default=64,
        metavar="N",
        help="tokens generated to compare (default: %(default)s)",
    )
    output = p.add_argument_group("output")
    output.add_argument(
        "--concurrency",
        type=positive,
        default=32,
        metavar="N",
        help="requests that windows are priced for (default: %(default)s)",
    )
    output.add_argument(
        "--json", metavar="OUT", type=Path, help="results, and what a resumed run needs"
    )
    output.add_argument("--html", metavar="OUT", type=Path, help="one self-contained report")

    p = add_command(
        commands,
        "report",
        run_report,
        "Write the HTML report of a finished eval --json.",
        "out.json --html report.html",
    )
    p.add_argument("json", metavar="JSON", type=Path, help="what eval --json wrote")
    p.add_argument("--html", required=True, metavar="OUT", type=Path, help="page to write")


def run_eval(args: argparse.Namespace, console: Console) -> None:
    """Evaluate, print a row per finished item and the table at the end, write JSON and HTML."""
    writable(args.json, "--json")
    writable(args.html, "--html")
    with model_folder(args) as model, progress_bar(console) as progress:
        from ..calibration.evaluation.evaluate import Options, evaluate

        def report(label, key, figures, done, total):
            console.print(_line(label, key, figures), soft_wrap=True, highlight=False)
            progress("evaluating", done, total)

        options = Options(
            model=model,
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
            json=args.json,
        )
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
