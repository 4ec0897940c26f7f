"""``oscar-sglang verify``: an artifact against its model, or a running server against itself."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .console import add_command, add_device, add_sample, positive, progress_bar, writable
from .model import add_model, model_folder

LIMIT = 0.01  # nats, above which `verify --url` fails


def add(commands) -> None:
    p = add_command(
        commands,
        "verify",
        run,
        "Check an artifact on fresh tokens, or a running server by SGLang's own KL gate.",
        "qwen3-8b.safetensors --model Qwen/Qwen3-8B",
        "--url http://127.0.0.1:30000 --text book.txt",
        more="FILE: does it fit the model, do fresh tokens give the error it records. --url: does "
        "the server's prefix cache give back what it was given; it must be idle, and is flushed. "
        "Exit status 1 if not.",
    )
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("file", metavar="FILE", nargs="?", help="artifact (.safetensors)")
    what.add_argument("--url", help="SGLang server, with any cache")
    add_model(p, required=False)
    add_device(add_sample(p, tokens=4096, seed=1))
    add_sizes(p.add_argument_group("with --url"))


def add_sizes(group) -> None:
    """What the gate reads and sends."""
    group.add_argument(
        "--text",
        nargs="+",
        metavar="SOURCE",
        help="what prompts are cut from, each as of --data (default: LongBench v2, as in SGLang's "
        "CI; needs `datasets` and the internet)",
    )
    for name, default, text in (
        ("samples", 4, "prompts of the first case"),
        ("prompt-tokens", 3000, "their length"),
        ("groups", 3, "prefixes of the other cases"),
        ("branches", 3, "requests on each prefix"),
        ("new-tokens", 512, "tokens sampled per turn"),
    ):
        group.add_argument(
            f"--{name}",
            type=positive,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    group.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        metavar="NATS",
        help="fail above this KL (default: %(default)s)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def run(args: argparse.Namespace, console: Console) -> int:
    return run_server(args, console) if args.url else run_artifact(args, console)


def run_artifact(args: argparse.Namespace, console: Console) -> int:
    """Compare recorded errors with those on a fresh sample; status 1 if they are not reproduced."""
    from ..artifact import file as art
    from ..config import OscarError

    if not args.model:
        raise OscarError("verify FILE needs --model")
    artifact = art.load(args.file)
    with model_folder(args) as model, progress_bar(console) as progress:
        from ..calibration.verify import verify

        found = verify(
            artifact,
            model,
            args.data,
            args.tokens,
            device=args.device,
            seed=args.seed,
            progress=progress,
        )
    table = Table(title=f"{args.file}: relative error, recorded and on {found.sample}")
    for name in ("layer", "K recorded", "K now", "V recorded", "V now"):
        table.add_column(name, justify="right")
    for row in found.rows:
        cells = ("-" if e is None else f"{e:.2%}" for e in row.errors)
        table.add_row(str(row.layer), *cells, style="" if row.ok else "red")
    console.print(table)
    style = "green" if found.ok else "red"
    console.print(found.verdict, style=style, soft_wrap=True, highlight=False)
    return 0 if found.ok else 1


def run_server(args: argparse.Namespace, console: Console) -> int:
    """SGLang's KL gate beside the thresholds of its CI; status 1 above ``--limit``."""
    from ..launch_server import enter_cpu_mode, has_gpu

    if not has_gpu():
        enter_cpu_mode()  # before anything imports transformers or sglang
    from ..health import kl_gate

    sizes = sizes_of(args)
    writable(args.json, "--json")
    url = args.url.rstrip("/")
    args.model = args.model or kl_gate.served_model(url)
    with model_folder(args) as model:
        documents, vocab = kl_gate.documents(model, args.text, sizes)
    with console.status("sampling") as status:
        found = list(kl_gate.measure(url, documents, vocab, sizes, say=status.update))
    console.print(gate_table({"server": found}))
    if args.json:
        rows = [kl_gate.as_dict(r) for r in found]
        args.json.write_text(json.dumps({"url": url, "sizes": vars(sizes), "rows": rows}, indent=1))
    worst = max(r.kl for r in found)
    good = worst <= args.limit
    verdict = f"KL {worst:.4f} at most: {'within' if good else 'above'} the limit of {args.limit:g}"
    console.print(verdict, style="green" if good else "red", highlight=False)
    return 0 if good else 1


def sizes_of(args: argparse.Namespace):
    from ..health.kl_gate import Sizes

    return Sizes(**{f.name: getattr(args, f.name) for f in fields(Sizes) if hasattr(args, f.name)})


def gate_table(servers: dict[str, list]) -> Table:
    """Rows by server and case, and whether each threshold of SGLang's CI is kept."""
    from ..health.kl_gate import CI_THRESHOLDS

    table = Table(title="KL of sampled tokens on cached prefixes from an empty cache, nats")
    for name in ("server", "case", "KL", "samples", "tokens", "cached"):
        table.add_column(name, justify="left" if name in ("server", "case") else "right")
    for name, limit in CI_THRESHOLDS.items():
        table.add_column(f"< {limit:g}\n{name}")
    for server, rows in servers.items():
        for r in rows:
            kept = ("yes" if r.passes(limit) else "no" for limit in CI_THRESHOLDS.values())
            figure = f"{r.kl:.4f} ± {r.error:.4f}"
            table.add_row(
                server, r.case, figure, str(r.samples), str(r.tokens), f"{r.hit:.0%}", *kept
            )
    return table
