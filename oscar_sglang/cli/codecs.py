"""``oscar-sglang codecs``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from ..config import CODEC_NAMES, DEFAULT_CODEC
from .console import add_command

HEAD_DIM = 128


class Row(NamedTuple):
    """A codec; ``bits``: per element of history, metadata included, at ``HEAD_DIM``, 8 KV heads."""

    name: str
    bits: float
    what: str
    when: str
    published: str


def rows() -> Iterator[Row]:
    """Every served codec, the default first."""
    from ..calibration.widths import EXTRA_BITS
    from ..kernels.codec import CODECS

    for name in CODEC_NAMES:
        spec = CODECS[name]
        bits = spec.layout(kv_heads=8, head_dim=HEAD_DIM).bits_per_element
        if spec.fit == "before_rope":
            bits += EXTRA_BITS
        yield Row(name, bits, spec.summary, spec.when.replace("`", ""), spec.source)


def add(commands) -> None:
    add_command(
        commands,
        "codecs",
        run,
        "List the codecs: bits per element, what each is, when to choose it, where it is from.",
        "",
        more="Choose one with --oscar-codec on the server, or with calibrate --codec.",
    )


def run(args: argparse.Namespace, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("codec", no_wrap=True)
    table.add_column("bits", justify="right")
    table.add_column("what it is", overflow="fold")
    table.add_column("choose it when", overflow="fold")
    table.add_column("published", overflow="fold")
    for row in rows():
        default = " (default)" if row.name == DEFAULT_CODEC else ""
        table.add_row(row.name + default, f"{row.bits:.3f}", row.what, row.when, row.published)
    console.print(table)
    console.print(
        f"bits: per element of history at head_dim {HEAD_DIM}, metadata included (BF16: 16); the "
        "exact windows of a running request come on top",
        soft_wrap=True,
        highlight=False,
    )
