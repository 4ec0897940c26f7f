"""``oscar-sglang``: one module per group of subcommands. Torch and transformers load when a
command runs.

Errors an operator can act on are one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from .. import __version__
from ..config import CODEC_NAMES
from . import artifacts, calibrate, codecs, doctor, evaluate, verify

__all__ = ["CODEC_NAMES", "main"]

_PIPED_WIDTH = 120
_OURS = __package__.partition(".")[0]


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        width = None if sys.stdout.isatty() else _PIPED_WIDTH
        return args.run(args, Console(width=width)) or 0
    except (ValueError, OSError) as error:
        if not _is_ours(error):
            raise
        print(f"oscar-sglang: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("oscar-sglang: interrupted", file=sys.stderr)
        return 130


def _is_ours(error: BaseException) -> bool:
    """Whether the message is written for an operator: our own exceptions, and the system's."""
    return isinstance(error, OSError) or type(error).__module__.startswith(_OURS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="oscar-sglang", description="2-bit KV cache for SGLang")
    parser.add_argument("--version", action="version", version=f"oscar-sglang {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (doctor, codecs, calibrate, verify, artifacts, evaluate):
        module.add(commands)
    return parser
