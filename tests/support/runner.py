"""Run a program of ``tests/runners/`` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def result_of(name: str, *args, **environment: str):
    """What ``tests.runners.NAME`` says of ``args``: JSON on the last line of its stdout."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.runners.{name}", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
