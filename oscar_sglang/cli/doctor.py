"""``oscar-sglang doctor``."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .console import add_command
from .model import add_model, named

_STYLES = {"ok": "green", "note": "yellow", "fail": "red"}


def add(commands) -> None:
    p = add_command(
        commands,
        "doctor",
        run,
        "Check whether this machine is ready for int2, and what would be refused.",
        "",
        "--model Qwen/Qwen3-8B",
        "--sglang sglang-0.5.24-cp311-cp311-manylinux_2_34_x86_64.whl",
        more="With a GPU it compiles the kernels and compares them with the reference. Exit status "
        "1 if a check fails.",
    )
    add_model(p, required=False)
    p.add_argument("--artifact", type=Path, metavar="FILE", help="artifact to check")
    p.add_argument(
        "--sglang",
        type=Path,
        metavar="WHEEL_OR_DIR",
        help="only compare another SGLang with what the plugin relies on, without installing it",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Print every check; status 1 if one of them failed."""
    if args.sglang:
        from ..health.doctor import port

        return report(list(port(args.sglang)), console, "everything int2 relies on is there")
    model = named(args) if args.model else None
    from ..launch_server import enter_cpu_mode, has_gpu

    if not has_gpu():
        enter_cpu_mode()  # before anything imports transformers or sglang
    from ..health.doctor import examine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, about kernels a CPU does not have
        checks = list(examine(model, args.artifact))
    return report(checks, console, "ready for int2")


def report(checks: list, console: Console, good: str) -> int:
    """Print the table and the verdict, ``good`` if nothing failed."""
    from ..health.doctor import FAIL

    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        style = _STYLES[check.status]
        table.add_row(f"[{style}]{check.status}[/]", check.name, check.detail.replace("[", r"\["))
    console.print(table)
    failed = sum(check.status == FAIL for check in checks)
    verdict = f"{failed} of {len(checks)} checks failed" if failed else good
    console.print(verdict, style="red" if failed else "green")
    return int(failed > 0)
