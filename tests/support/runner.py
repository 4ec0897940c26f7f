"""Run a program of ``tests/runners/`` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import forks


def result_of(name: str, *args, **environment: str):
    """What ``tests.runners.NAME``, which runs SGLang, says of ``args``: JSON on the last line of
    its stdout."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "stdout", Path(folder) / "stderr"
        env = {**os.environ, **environment}
        code = forks.start(f"tests.runners.{name}", args, env, out, log).wait()
        assert code == 0, (code, log.read_text(errors="replace")[-4000:])
        return json.loads(out.read_text().splitlines()[-1])


def result_without_sglang(name: str, *args, **environment: str):
    """The same of a program that needs no SGLang."""
    command = [sys.executable, "-m", f"tests.runners.{name}", *map(str, args)]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=forks.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
