"""``oscar-sglang verify``: an artifact against its model, or a running server against itself."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .console import add_overrides, overridden, positive, progress_bar, writable

LIMIT = 0.01  # nats, above which `verify --url` fails


def add(commands) -> None:
    p = commands.add_parser(
        "verify",
        help="does an artifact fit a model; does a server give back what its cache was given",
        description="With FILE: are the artifact's recorded errors reproduced on a fresh sample. "
        "With --url: SGLang's own KL gate for cached prefixes, against an idle running server.",
    )
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("file", metavar="FILE", nargs="?", help="artifact")
    what.add_argument("--url", help="server, as http://127.0.0.1:30000; its cache is flushed")
    p.add_argument("--model", metavar="DIR", help="local model directory (--url: the server's)")
    p.add_argument("--data", default="random", metavar="SOURCE", help="as for calibrate")
    p.add_argument("--tokens", type=positive, default=4096, help="tokens to run (default 4096)")
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument("--seed", type=int, default=1, help="of the random ids (default 1)")
    add_overrides(p)
    add_sizes(p.add_argument_group("with --url"))
    p.set_defaults(run=run)


def add_sizes(group) -> None:
    """What the gate reads and sends."""
    group.add_argument(
        "--text", nargs="+", metavar="SOURCE",
        help="text files or NPZ:KEY, of the model's language (default: LongBench v2, as in "
        "SGLang's CI: needs `datasets` and the internet)",
    )  # fmt: skip
    for name, default, text in (
        ("samples", 4, "prompts of the first case"),
        ("prompt-tokens", 3000, "their length"),
        ("groups", 3, "prefixes of the other cases"),
        ("branches", 3, "requests on each prefix"),
        ("new-tokens", 512, "tokens sampled per turn"),
    ):
        group.add_argument(
            "--" + name, type=positive, default=default, help=f"{text} (default {default})"
        )
    group.add_argument(
        "--limit", type=float, default=LIMIT, help=f"fail above this KL (default {LIMIT})"
    )
    group.add_argument("--json", type=Path, help="write the figures")


def run(args: argparse.Namespace, console: Console) -> int:
    return run_server(args, console) if args.url else run_artifact(args, console)


def run_artifact(args: argparse.Namespace, console: Console) -> int:
    """Compare recorded errors with those on a fresh sample; status 1 if they are not reproduced."""
    from ..artifact import file as art
    from ..calibration.verify import verify
    from ..config import OscarError

    if not args.model:
        raise OscarError("verify FILE needs --model DIR")
    artifact = art.load(args.file)
    with overridden(args) as model, progress_bar(console) as progress:
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
    documents, vocab = kl_gate.documents(url, args.model, args.text, sizes)
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
