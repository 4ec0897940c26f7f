"""``oscar-sglang calibrate``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ..config import CODEC_NAMES, DEFAULT_CODEC, OMNI_CHOICES
from .console import (
    add_command,
    add_device,
    add_sample,
    layer_table,
    peak_memory,
    positive,
    print_warnings,
    progress_bar,
    writable,
)
from .model import add_model, model_folder


def add(commands) -> None:
    p = add_command(
        commands,
        "calibrate",
        run,
        "Fit a codec to a model and write an artifact.",
        "--model Qwen/Qwen3-8B --out qwen3-8b.safetensors",
        "--model DIR --out FILE --data prose.txt --codec accurate --device cuda",
        more="A server does this by itself at its first start, on tokens that the model samples; "
        "use the command for a text of your own, or before a deployment.",
    )
    p.add_argument("--out", required=True, metavar="FILE", help="artifact to write (.safetensors)")
    add_model(p)
    sample = add_sample(p, tokens=8192, seed=0)
    sample.add_argument(
        "--images",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="pictures that a vision-language model reads besides (default: text alone)",
    )
    codec = p.add_argument_group("codec")
    codec.add_argument(
        "--codec",
        default=DEFAULT_CODEC,
        choices=CODEC_NAMES,
        help="which; oscar-sglang codecs lists them (default: %(default)s)",
    )
    codec.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="tokens of context that codec position is fitted for (default: all that the model "
        "takes)",
    )
    codec.add_argument(
        "--bits",
        type=float,
        metavar="B",
        help="bits per element of codec position: what is over 2 and metadata gives some layers' "
        "K or V 4 bits (default: 1/6 over; 2.29 at head_dim 128)",
    )
    for name, values in OMNI_CHOICES.items():
        codec.add_argument(
            "--" + name.replace("_", "-"),
            choices=values,
            help=f"of codec omni, which needs no data (default: {values[0]})",
        )
    engine = p.add_argument_group("what runs the model")
    add_device(engine)
    engine.add_argument(
        "--engine",
        default="transformers",
        choices=("transformers", "sglang"),
        help="sglang for checkpoints transformers cannot hold: FP8, AWQ (default: %(default)s)",
    )
    engine.add_argument(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="ranks that share the model, with --engine sglang (default: %(default)s)",
    )


def run(args: argparse.Namespace, console: Console) -> None:
    """Calibrate, write the artifact, print what was chosen."""
    if args.engine == "sglang" and args.device == "cpu":
        from ..launch_server import enter_cpu_mode

        enter_cpu_mode()  # before anything imports transformers
    out = writable(Path(args.out), "--out")
    chosen = {n.removeprefix("omni_"): getattr(args, n) for n in OMNI_CHOICES}
    with model_folder(args) as model, progress_bar(console) as progress:
        from ..calibration import Plan, calibrate

        plan = Plan(
            model,
            args.data,
            args.tokens,
            device=args.device,
            seed=args.seed,
            context=args.context,
            bits=args.bits,
            images=tuple(args.images),
            progress=progress,
            engine=args.engine,
            tp=args.tp,
            partial=out.with_name(f"{out.name}.partial"),
            codec_options={name: value for name, value in chosen.items() if value},
        )
        artifact = calibrate(plan, args.codec)
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
