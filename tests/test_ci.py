"""What continuous integration promises: no tier of tests goes unrun while it is green."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Triton decides at import whether it interprets: whoever comes first decides for all tests.
TOO_LATE = """
import sys, triton, pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/kernels/test_rotate.py"]))
"""
COLLECTED = """
import pytest
pytest.importorskip("no_such_module", reason={reason!r})
"""


def run(code: str, **env: str) -> tuple[int, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "OSCAR_CI", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=kept | env, capture_output=True, text=True
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="interprets kernels on a CPU")
@pytest.mark.parametrize("variable", ["OSCAR_CI", "CI", None])
def test_kernels_that_cannot_be_interpreted_fail_in_ci(variable):
    status, said = run(TOO_LATE, **({variable: "1"} if variable else {}))
    assert "TRITON_INTERPRET=1 was set" in said
    assert (status, " passed" in said) == ((1, False) if variable else (0, False)), said[-2000:]
    assert ("in CI this must run" in said) == bool(variable)


@pytest.mark.parametrize("reason, status", [("absent", 2), ("needs a CUDA GPU", 5)])
def test_a_file_that_skips_itself_fails_in_ci(tmp_path, reason, status):
    """Exit statuses of pytest: 2 interrupted by an error of collection, 5 nothing to run."""
    file = tmp_path / "test_it.py"
    file.write_text(COLLECTED.format(reason=reason))
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", str(file)]
    code = f"import sys, pytest; sys.exit(pytest.main({options!r}))"
    assert run(code, OSCAR_CI="1")[0] == status


def test_the_ci_script_sets_it():
    assert "export OSCAR_CI=1" in (ROOT / ".ci" / "run").read_text()
