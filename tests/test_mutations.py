"""The faults of ``mutation_check.py`` still apply to the code as it is; a few of them, others for
every commit, are run. All of them: ``python -m tests.mutation_check``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation_check import KINDS, few
from tests.support.planted import Fault, faulty

HERE = Path(__file__).parent
FAULTS = {name: fault for kind in KINDS.values() for name, fault in kind.faults.items()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_still_applies(name):
    """Its source holds the place once, and still compiles with the fault."""
    source = faulty(FAULTS[name])
    if FAULTS[name].file.endswith(".py"):
        compile(source, FAULTS[name].file, "exec")


def test_a_place_that_is_gone_is_named():
    with pytest.raises(SystemExit, match="store.py holds 'no such code' 0 times"):
        faulty(Fault("store.py", "no such code", ""))


def test_names_are_unique_and_counted():
    assert len(FAULTS) == sum(len(kind.faults) for kind in KINDS.values())
    text = " ".join((HERE / "README.md").read_text().split())
    found = re.search(
        r"with (\d+) deliberate faults: (\d+) in the pool's code, (\d+) in the Triton kernels, "
        r"(\d+) in the CUDA kernels, (\d+) in what surrounds them",
        text,
    )
    order = ("pool", "triton", "cuda", "host")
    assert [int(n) for n in found.groups()] == [
        len(FAULTS),
        *(len(KINDS[kind].faults) for kind in order),
    ]


def test_every_fault_has_its_turn():
    most = max(len(kind.faults) for kind in KINDS.values())
    assert {name for number in range(most) for name in few(number)} == set(FAULTS)


@pytest.mark.sglang
def test_a_few_are_noticed():
    """Which ones depends on the commit."""
    git = ["git", "rev-list", "--count", "HEAD"]
    count = subprocess.run(git, cwd=HERE, capture_output=True, text=True).stdout.strip() or "0"
    command = [sys.executable, "-m", "tests.mutation_check", "--few", count]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("caught", "MISSED"))]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(lines) == len(KINDS) and all(line.startswith("caught") for line in lines), lines
