"""``oscar-sglang``: one function per subcommand. Torch and transformers load when a command runs.

Errors an operator can act on are one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import __version__
from .config import CODEC_NAMES


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        args.run(args, Console())
    except (ValueError, OSError) as error:
        if not _is_ours(error):
            raise
        print(f"oscar-sglang: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("oscar-sglang: interrupted", file=sys.stderr)
        return 130
    return 0


def _is_ours(error: BaseException) -> bool:
    """Whether the message is written for an operator: our own exceptions, and the system's."""
    return isinstance(error, OSError) or type(error).__module__.startswith(__package__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="oscar-sglang", description="2-bit KV cache for SGLang")
    parser.add_argument("--version", action="version", version=f"oscar-sglang {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_calibrate, _add_inspect):
        add(commands)
    return parser


# ---- calibrate


def _add_calibrate(commands) -> None:
    p = commands.add_parser("calibrate", help="fit a codec to a model and write an artifact")
    p.add_argument("--model", required=True, metavar="DIR", help="local model directory")
    p.add_argument("--out", required=True, metavar="FILE", help="artifact to write (.safetensors)")
    p.add_argument("--codec", default="feedback", choices=CODEC_NAMES)
    p.add_argument(
        "--data",
        default="random",
        metavar="SOURCE",
        help="random (default), a UTF-8 text file, or NPZ:KEY with token ids",
    )
    p.add_argument("--tokens", type=_positive, default=8192, help="tokens to run (default 8192)")
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument("--seed", type=int, default=0, help="of the random ids (default 0)")
    p.set_defaults(run=run_calibrate)


def run_calibrate(args: argparse.Namespace, console: Console) -> None:
    """Calibrate, write the artifact, print what was chosen."""
    from .calibration import calibrate

    out = Path(args.out)
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a directory, expected a file name")
    out.parent.mkdir(parents=True, exist_ok=True)  # fail before the work, not after
    with _progress_bar(console) as progress:
        artifact = calibrate(
            args.model,
            args.codec,
            args.data,
            args.tokens,
            device=args.device,
            seed=args.seed,
            progress=progress,
        )
    artifact.save(out)
    console.print(_layer_table(artifact))
    _print_warnings(artifact, console)
    console.print(
        f"wrote {out} ({out.stat().st_size / 2**20:.1f} MiB, id {artifact.id}) in "
        f"{artifact.provenance['seconds']} s; peak memory {_peak_memory(args.device)}",
        soft_wrap=True,
        highlight=False,
    )


@contextmanager
def _progress_bar(console: Console):
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
            bar.update(tasks[stage], completed=done)

        yield report


def _peak_memory(device: str) -> str:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = f"{peak / 2**30:.2f} GiB"
    if device.startswith("cuda"):
        import torch

        text += f", GPU {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
    return text


# ---- inspect


def _add_inspect(commands) -> None:
    p = commands.add_parser("inspect", help="check an artifact and print what it holds")
    p.add_argument("file", metavar="FILE")
    p.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace, console: Console) -> None:
    """Validate an artifact and print its contents, provenance and errors per layer."""
    import dataclasses

    from .artifact import load

    artifact = load(args.file)
    rows = {"file": args.file, "id": artifact.id, "codec": artifact.codec}
    rows["codec means"] = artifact.spec.summary
    rows |= dataclasses.asdict(artifact.fingerprint)
    rows |= {f"options.{k}": v for k, v in artifact.options.items()}
    hidden = ("layers", "warnings")
    rows |= {k: v for k, v in artifact.provenance.items() if k not in hidden}
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    if artifact.provenance.get("layers"):
        console.print(_layer_table(artifact))
    _print_warnings(artifact, console)


def _layer_table(artifact) -> Table:
    """One row a layer; errors are relative, mean over heads, on held-back rows."""
    table = Table(title=f"{artifact.codec}: relative error on held-back tokens")
    for name in ("layer", "K basis of each head", "K error", "plain rounding", "V error"):
        table.add_column(name, justify="left" if name.startswith("K b") else "right")
    for i, layer in enumerate(artifact.provenance["layers"]):
        chosen = [layer["k_error"][b][h] for h, b in enumerate(layer["k_basis"])]
        means = (sum(v) / len(v) for v in (chosen, layer["k_error_plain"], layer["v_error"]))
        table.add_row(str(i), _runs(layer["k_basis"]), *(f"{m:.2%}" for m in means))
    return table


def _runs(names: list[str]) -> str:
    """``ktk x3, mean x1``."""
    return ", ".join(f"{n} x{names.count(n)}" for n in dict.fromkeys(names))


def _print_warnings(artifact, console: Console) -> None:
    for warning in artifact.provenance.get("warnings", []):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
