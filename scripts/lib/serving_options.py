"""Command line of ``bench_serving.py``. Defaults are sized for minutes on an H200."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

from scripts.lib.shapes import CACHES, SHAPES

SCENARIOS = ("memory", "prefill", "decode", "ttft", "job", "agents")


def names(allowed):
    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := set(given) - set(allowed):
            raise argparse.ArgumentTypeError(f"{unknown.pop()} is none of {', '.join(allowed)}")
        return [name for name in allowed if name in given]

    return parse


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _cases(text: str) -> list[tuple[int, int]]:
    return [tuple(map(int, case.split("x"))) for case in text.split(",")]


def cache_flags(text: str) -> tuple[str, list[str]]:
    cache, _, flags = text.partition("=")
    if cache not in CACHES:
        raise argparse.ArgumentTypeError(f"{cache} is none of {', '.join(CACHES)}")
    return cache, shlex.split(flags)


# name (of a group: its prefix), type, default, help
SIZES = {
    "decode": (_cases, "1024x1,32768x1,102400x1,32768x8,32768x32", "contexts x batches"),
    "decode-tokens": (int, 128, "output tokens of one stream; more streams get more"),
    "repeats": (int, 3, "runs of prefill and of one-stream decode"),
    "prefill-tokens": (int, 8192, "length of the fresh prompt"),
    "ttft-context": (int, 102400, "length of the cached prefix"),
    "ttft-turns": (numbers, "128,16,1", "tokens of the turn"),
    "ttft-repeats": (int, 7, "turns of each length"),
    "job-contexts": (numbers, "32768,102400", "lengths of the documents, one job each"),
    "job-documents": (numbers, None, "documents of each job (default: 4 x what BF16 holds)"),
    "job-questions": (int, 8, "questions to each document"),
    "job-suffix": (int, 128, "tokens of a question"),
    "job-tokens": (int, 64, "tokens of an answer"),
    "job-concurrency": (int, 16, "questions at a time"),
    "job-seconds": (float, 25, "time limit of a job; the rest of it is abandoned"),
    "hot-tokens": (int, 256, "tokens of an answer of the decode-heavy job; 0: no such job"),
    "hot-streams": (int, 32, "its streams at most"),
    "agents-sessions": (int, 32, "sessions, all at once"),
    "agents-concurrency": (int, 32, "requests at a time"),
    "agents-turns": (int, 10, "turns of a session"),
    "agents-system": (int, 8192, "tokens of the shared system prompt"),
    "agents-in": (int, 512, "tokens of a message"),
    "agents-out": (int, 64, "tokens of an answer"),
    "agents-seconds": (float, 90, "time limit"),
    "agents-no-radix": (int, 0, "sessions to run also with --disable-radix-cache (a server more)"),
    "soak": (int, 0, "mixed requests of the soak scenario; 0: no soak"),
    "soak-concurrency": (int, 32, "requests at a time"),
    "soak-longest": (int, 4096, "longest prompt and longest shared prefix"),
    "soak-answer": (int, 48, "longest answer"),
    "soak-long-answer": (int, 1024, "answer that the aborting clients ask for"),
    "soak-seconds": (float, 400, "time limit of either part; exceeding it is an error"),
}


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    p.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    p.add_argument("--caches", type=names(CACHES), default=list(CACHES))
    p.add_argument("--scenarios", type=names(SCENARIOS), default=list(SCENARIOS))
    p.add_argument("--mem-fraction", default="0.5")
    p.add_argument("--job-mem-fraction", default="0.28", help="for job and agents")
    for name, (kind, default, text) in SIZES.items():
        p.add_argument("--" + name, type=kind, default=default, help=f"{text} [{default}]")
    p.add_argument(
        "--flags", type=cache_flags, action="append", default=[], metavar="CACHE=FLAGS",
        help="server flags of a cache instead of the default ones",
    )  # fmt: skip
    p.add_argument("--server-flags", type=shlex.split, default=[], help="more, for every cache")
    p.add_argument("--json", type=Path, help="results file; rows of other cases in it are kept")
    p.add_argument("--commit", help="of the code, where git does not know it")
    p.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()))
    return p


def finish(p: argparse.ArgumentParser) -> argparse.Namespace:
    args = p.parse_args()
    args.flags = dict(args.flags)
    if args.job_documents and len(args.job_documents) != len(args.job_contexts):
        p.error("--job-documents needs a number for each of --job-contexts")
    if args.soak:
        args.scenarios.append("soak")
    return args
