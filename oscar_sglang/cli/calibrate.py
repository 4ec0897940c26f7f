"""``oscar-sglang calibrate``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ..config import CODEC_NAMES, OMNI_CHOICES
from .console import (
    add_overrides,
    layer_table,
    overridden,
    peak_memory,
    positive,
    print_warnings,
    progress_bar,
    writable,
)


def add(commands) -> None:
    p = commands.add_parser("calibrate", help="fit a codec to a model and write an artifact")
    p.add_argument("--model", required=True, metavar="DIR", help="local model directory")
    p.add_argument("--out", required=True, metavar="FILE", help="artifact to write (.safetensors)")
    p.add_argument("--codec", default="feedback", choices=CODEC_NAMES)
    p.add_argument(
        "--data",
        default="random",
        metavar="SOURCE",
        help="random (default; random:N: sequences of N), a UTF-8 text file, or NPZ:KEY with ids",
    )
    p.add_argument(
        "--images",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="pictures that a vision-language model reads besides (default: text alone)",
    )
    p.add_argument("--tokens", type=positive, default=8192, help="tokens to run (default 8192)")
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="positions that codec position is fitted for (default: all that the model takes)",
    )
    p.add_argument(
        "--bits",
        type=float,
        metavar="B",
        help="bits per element of codec position: what is over 2 and metadata gives some layers' "
        "K or V 4 bits (default: 1/6 over)",
    )
    p.add_argument("--seed", type=int, default=0, help="of the random ids (default 0)")
    p.add_argument(
        "--engine",
        default="transformers",
        choices=("transformers", "sglang"),
        help="what runs the model; sglang for checkpoints transformers cannot hold (FP8, AWQ)",
    )
    p.add_argument(
        "--tp", type=positive, default=1, help="ranks that share the model (sglang; default 1)"
    )
    add_overrides(p)
    for name, values in OMNI_CHOICES.items():
        p.add_argument(
            "--" + name.replace("_", "-"),
            choices=values,
            help=f"of codec omni, which needs no data (default {values[0]})",
        )
    p.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> None:
    """Calibrate, write the artifact, print what was chosen."""
    if args.engine == "sglang" and args.device == "cpu":
        from ..launch_server import enter_cpu_mode

        enter_cpu_mode()  # before anything imports transformers
    from ..calibration import calibrate

    out = writable(Path(args.out), "--out")
    chosen = {n.removeprefix("omni_"): getattr(args, n) for n in OMNI_CHOICES}
    with overridden(args) as model, progress_bar(console) as progress:
        artifact = calibrate(
            model,
            args.codec,
            args.data,
            args.tokens,
            device=args.device,
            seed=args.seed,
            context=args.context,
            bits=args.bits,
            images=args.images,
            progress=progress,
            engine=args.engine,
            tp=args.tp,
            partial=out.with_name(f"{out.name}.partial"),
            codec_options={name: value for name, value in chosen.items() if value},
        )
    artifact.save(out)
    if artifact.provenance.get("layers"):
        console.print(layer_table(artifact))
    print_warnings(artifact.provenance["warnings"], console)
    console.print(
        f"wrote {out} ({out.stat().st_size / 2**20:.1f} MiB, id {artifact.id}) in "
        f"{artifact.provenance['seconds']} s; peak memory {peak_memory(args.device)}",
        soft_wrap=True,
        highlight=False,
    )
