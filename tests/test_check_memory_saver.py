"""check_memory_saver.py: what counts as another answer; a machine that cannot check says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import check_memory_saver
import pytest

SCRIPT = Path(check_memory_saver.__file__)


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
    code = "import sys; sys.modules['torch_memory_saver'] = None; sys.argv[0] = sys.argv[1];"
    code += "del sys.argv[1]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, SCRIPT, "--model", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 2 and "NOT CHECKED: torch_memory_saver" in done.stdout, done.stderr
