"""What commands share: how they are described, progress bars, the per-layer table, warnings,
argument types."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_HELP_WIDTH = 96


def add_command(
    commands: Any,
    name: str,
    run: Callable[..., int | None],
    what: str,
    *examples: str,
    more: str = "",
) -> argparse.ArgumentParser:
    """A command of the parsers ``commands``: what it does, in a sentence, ``more`` about it, and
    examples of its arguments."""
    shown = "".join(f"\n  oscar-sglang {name} {example}".rstrip() for example in examples)
    parser = commands.add_parser(
        name,
        help=what[0].lower() + what[1:].rstrip("."),
        description=textwrap.fill(f"{what} {more}".rstrip(), _HELP_WIDTH),
        epilog=f"example{'s' * (len(examples) > 1)}:{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_sample(
    parser: argparse.ArgumentParser,
    tokens: int,
    seed: int,
    prefix: str = "",
    or_artifact: bool = False,
) -> Any:
    """The options that say which tokens a model is run on, or that an artifact is there already;
    returns their group."""
    group = parser.add_argument_group("tokens that the model is run on")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        f"--{prefix or 'data'}",
        default="random",
        metavar="SOURCE",
        help="random: ids that the model samples itself (random:N in sequences of N), a UTF-8 text "
        "file, or NPZ:KEY with ids (default: %(default)s)",
    )
    if or_artifact:
        source.add_argument(
            "--artifact", metavar="FILE", type=Path, help=f"an artifact instead of --{prefix}"
        )
    group.add_argument(
        f"--{prefix}-tokens" if prefix else "--tokens",
        type=positive,
        default=tokens,
        metavar="N",
        help="tokens to run, at most (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=seed, metavar="N", help="of random ids (default: %(default)s)"
    )
    return group


def add_device(group: Any) -> None:
    group.add_argument(
        "--device", default="cpu", help="cpu or cuda, which runs the model (default: %(default)s)"
    )


@contextmanager
def progress_bar(console: Console):
    """Yields ``report(stage, done, total)``; each stage replaces the one before."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        tasks = {"": bar.add_task("loading the model", total=None)}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report


def peak_memory(device: str) -> str:
    """Peak resident memory of this process, and of the GPU."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = f"{peak / 2**30:.2f} GiB"
    if device.startswith("cuda"):
        import torch

        text += f", GPU {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
    return text


def layer_table(artifact) -> Table:
    """One row a layer: errors on held-back rows, relative, mean over heads; of logits in nats, the
    worst head's."""
    table = Table(title=f"{artifact.codec}: error on held-back tokens")
    names = ("layer", "bits K/V", "K basis of each head", "K error", "logit, nats", "V error")
    for name in names:
        table.add_column(name, justify="left" if name.startswith("K b") else "right")
    layers = zip(artifact.specs, artifact.provenance["layers"], strict=True)
    for i, (spec, layer) in enumerate(layers):
        chosen = [layer["k_error"][b][h] for h, b in enumerate(layer["k_basis"])]
        k, v = (sum(x) / len(x) for x in (chosen, layer["v_error"]))
        logit = max(layer["logit_error"]) if "logit_error" in layer else None
        table.add_row(
            str(i),
            f"{spec.k_bits}/{spec.v_bits}",
            runs(layer["k_basis"]),
            f"{k:.2%}",
            "-" if logit is None else f"{logit:.2f}",
            f"{v:.2%}",
        )
    return table


def runs(names: list[str]) -> str:
    """``ktk x3, mean x1``."""
    return ", ".join(f"{n} x{names.count(n)}" for n in dict.fromkeys(names))


def print_warnings(warnings: list[str], console: Console) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False)


_Output = TypeVar("_Output", Path, Path | None)


def writable(path: _Output, what: str) -> _Output:
    """Fail before the work, not after: make the folder of an output file."""
    if path is not None:
        if path.is_dir():
            raise IsADirectoryError(f"{what} {path} is a directory, expected a file name")
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """``2048,4096``."""
    return tuple(positive(part) for part in text.split(","))


def whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value
