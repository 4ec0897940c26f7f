"""``oscar-sglang inspect | import-zoo | export``: the life of an artifact."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .console import add_command, layer_table, print_warnings, writable
from .model import add_model, model_folder


def add(commands) -> None:
    p = add_command(
        commands,
        "inspect",
        run_inspect,
        "Check an artifact and print what it holds.",
        "qwen3-8b.safetensors",
        more="Its model, its tokens, the basis and the error of every layer, its warnings.",
    )
    p.add_argument("file", metavar="FILE", help="artifact (.safetensors)")

    p = add_command(
        commands,
        "import-zoo",
        run_import,
        "Make an artifact of codec oscar from rotations that OSCAR's authors published.",
        "k.pt v.pt --model Qwen/Qwen3-8B --out qwen3-8b-oscar.safetensors",
    )
    p.add_argument("k", metavar="K.pt", type=Path, help="rotations of K")
    p.add_argument("v", metavar="V.pt", type=Path, help="rotations of V")
    p.add_argument("--out", required=True, metavar="FILE", help="artifact to write (.safetensors)")
    add_model(p)

    p = add_command(
        commands,
        "export",
        run_export,
        "Write an artifact's rotations as RotationZoo files.",
        "qwen3-8b-oscar.safetensors --k k.pt --v v.pt",
    )
    p.add_argument("file", metavar="FILE", help="artifact (.safetensors)")
    p.add_argument("--k", required=True, metavar="K.pt", type=Path, help="file for those of K")
    p.add_argument("--v", required=True, metavar="V.pt", type=Path, help="file for those of V")


def run_inspect(args: argparse.Namespace, console: Console) -> None:
    """Validate an artifact and print its contents, provenance and errors per layer."""
    import dataclasses

    from ..artifact import file as art

    artifact = art.load(args.file)
    rows = {"file": args.file, "id": artifact.id, "codec": artifact.codec}
    rows["codec means"] = artifact.spec.summary
    rows |= dataclasses.asdict(artifact.fingerprint)
    bulky = ("rope", "rope_free", "bits")  # shown per layer, or of no use to a reader
    rows |= {f"options.{k}": v for k, v in artifact.options.items() if k not in bulky}
    hidden = ("layers", "warnings")
    rows |= {k: v for k, v in artifact.provenance.items() if k not in hidden}
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    if artifact.provenance.get("layers"):
        console.print(layer_table(artifact))
    print_warnings(artifact.provenance.get("warnings", []), console)


def run_import(args: argparse.Namespace, console: Console) -> None:
    out = writable(Path(args.out), "--out")
    with model_folder(args) as model:
        from ..calibration.zoo import import_zoo

        artifact = import_zoo(args.k, args.v, model)
    artifact.save(out)
    print_warnings(artifact.provenance["warnings"], console)
    console.print(
        f"wrote {out}: codec oscar, {len(artifact.layers)} layers, id {artifact.id}; check it "
        f"with: oscar-sglang verify {out} --model {args.model}",
        soft_wrap=True,
        highlight=False,
    )


def run_export(args: argparse.Namespace, console: Console) -> None:
    from ..artifact import file as art
    from ..calibration.zoo import export_zoo

    artifact = art.load(args.file)
    for path, what in ((args.k, "--k"), (args.v, "--v")):
        writable(path, what)
    export_zoo(artifact, args.k, args.v)
    if artifact.spec.k_feedback:
        print_warnings(["the files hold rotations only; feedback factors are left out"], console)
    console.print(f"wrote {args.k} and {args.v} (format 2)", soft_wrap=True, highlight=False)
