"""check_gpu.py: its commands are ones that their programs take, and no step outlives its limit."""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts import check_gpu
from scripts.check_gpu import STEPS, Step

ROOT = Path(__file__).parents[1]


class Parsed(Exception):
    pass


@pytest.mark.parametrize("name", [n for n, s in STEPS.items() if "-m scripts." in s.command])
def test_scripts_take_their_arguments(name, tmp_path, monkeypatch):
    """Up to the end of parsing; files that a command reads must be there."""
    args = argparse.Namespace(out=tmp_path, model=ROOT / "tests", commit="abc", workers=3)
    argv = STEPS[name].argv(args)[1:]
    assert "{" not in "".join(argv)
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *a, **k):
        found = real(self, *a, **k)
        raise Parsed(found)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    assert argv[0] == "-m"
    monkeypatch.setattr(sys, "argv", argv[1:])
    with pytest.raises(Parsed) as parsed:
        runpy.run_module(argv[1], run_name="__main__")
    for key in ("tokens", "reference"):
        if path := getattr(parsed.value.args[0], key, None):
            assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", [n for n, s in STEPS.items() if " pytest " in s.command])
def test_tests_are_there(name):
    found = [word for word in STEPS[name].command.split() if word.startswith("tests/")]
    assert found and all((ROOT / word).exists() for word in found)


def main(monkeypatch, tmp_path, *argv) -> tuple[int, dict]:
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--out", str(tmp_path), *argv])
    code = check_gpu.main()
    return code, json.loads((tmp_path / "steps.json").read_text())


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    """What a step over its limit has started is gone, also what left its process group."""
    pid = tmp_path / "pid"
    code = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "99"], start_new_session=True)
pathlib.Path({str(pid)!r}).write_text(str(child.pid))
time.sleep(99)
"""
    (tmp_path / "hang.py").write_text(code)
    steps = {
        "fails": Step(60, f"{tmp_path}/missing.py"),
        "hangs": Step(5, f"{tmp_path}/hang.py"),
        "passes": Step(60, "--version"),
    }
    monkeypatch.setattr(check_gpu, "STEPS", steps)
    code, found = main(monkeypatch, tmp_path, "--commit", "abc")
    assert code == 1 and found["commit"] == "abc"
    results = {name: row["result"] for name, row in found["steps"].items()}
    assert results == {"fails": "failed (exit 2)", "hangs": "past its limit", "passes": "passed"}
    assert "missing.py" in (shown := capsys.readouterr().out) and "Python 3" in shown
    child = int(pid.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "argv, word", [(["--only", "nothing"], "nothing"), (["--only", "demo"], "--model")]
)
def test_wrong_calls_are_explained(argv, word, monkeypatch):
    monkeypatch.delenv("OSCAR_NANO_MODEL", raising=False)
    command = [sys.executable, "-m", "scripts.check_gpu", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and word in done.stderr
