"""check_memory_saver.py: what counts as another answer; a machine that cannot check says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_memory_saver

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "after, expected",
    [
        ([[(-1.0, 3), (-2.0, 4)]], 0),
        ([[(-1.02, 3), (-2.0, 4)]], 0.02),
        ([[(-1.0, 3), (-2.001, 5)]], 0.001),  # a near-tie
        ([[(-1.0, 3), (-2.5, 5)]], float("inf")),
        ([[(-4.0, 3), (-2.0, 4)]], 3),
    ],
)
def test_difference(after, expected):
    before = [[(-1.0, 3), (-2.0, 4)]]
    assert check_memory_saver.difference(before, after) == pytest.approx(expected)


def test_without_the_package_it_says_that_nothing_was_checked(tmp_path):
    code = "import sys; sys.modules['torch_memory_saver'] = None; import runpy;"
    code += "runpy.run_module('scripts.check_memory_saver', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, "--model", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "NOT CHECKED: torch_memory_saver" in done.stdout, done.stderr
