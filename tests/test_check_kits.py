"""SGLang's server test kits: all are accounted for, and a difference is told."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import unittest
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import check_kits
from scripts.lib import kits

FOLDER = Path(importlib.util.find_spec("sglang").origin).parent / "test" / "kits"


def test_every_kit_of_the_wheel_runs_or_has_a_reason():
    known = {k.name for k in kits.KITS} | set(kits.LEFT_OUT)
    found = kits.kit_classes(FOLDER)
    assert found - known == set(), "new kits: a row of KITS, or a reason in LEFT_OUT"
    functions = {k.name for k in kits.KITS if k.name.startswith("run_")}
    assert known - found == functions, "kits that are gone"
    for kit in kits.KITS:
        assert kit.setup in kits.SETUPS
        assert kit.name in (FOLDER / f"{kit.module}.py").read_text()


@pytest.mark.sglang
def test_kits_can_be_loaded():
    """Whatever is not installed here that they use for something else."""
    for kit in kits.KITS:
        try:
            assert hasattr(kits.load(kit), kit.name)
        except ModuleNotFoundError as error:
            assert error.name == "anthropic" and kit.name == "AnthropicMessagesMixin"


def case() -> type[unittest.TestCase]:
    """Within a function, or pytest would run it."""

    class Case(unittest.TestCase):
        def test_good(self):
            pass

        def test_bad(self):
            self.assertEqual(1, 2, "one is not two")

        def test_broken(self):
            raise KeyError("text")

        def test_slow(self):
            time.sleep(5)

        @unittest.skip("needs nothing")
        def test_skipped(self):
            pass

        def test_parts(self):
            for i in range(2):
                with self.subTest(i=i):
                    self.assertEqual(i, 0)

    return Case


@pytest.mark.parametrize(
    "name, result, why",
    [
        ("good", "passed", ""),
        ("bad", "failed", "one is not two"),
        ("broken", "failed", "KeyError: 'text'"),
        ("slow", "timeout", "after 0.2 s"),
        ("skipped", "skipped", "needs nothing"),
        ("parts", "failed", "1 != 0"),
    ],
)
def test_results(name, result, why):
    found, reason = check_kits.run_test(case()(f"test_{name}"), 0.2 if name == "slow" else 30)
    assert found == result and why in reason


class Settled:
    """A server's part in ``settle``."""

    def __init__(self, used: int = 0, code: int | None = None) -> None:
        self.process = SimpleNamespace(poll=lambda: code, returncode=code)
        self.port, self.used, self.flushed = 1, used, 0

    def abort_all(self) -> None:
        pass

    def flush(self) -> None:
        self.flushed += 1

    def load(self) -> dict:
        return {"num_used_tokens": self.used}


def test_a_leak_or_a_dead_server_fails_the_test_before():
    assert check_kits.settle(Settled()) == ""
    assert "3 tokens stay in use" in check_kits.settle(Settled(used=3))
    assert "ended with -9" in check_kits.settle(Settled(code=-9))


@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_a_test_that_ends_the_server_or_hangs_ends_its_kit(monkeypatch, how):
    """What still runs of a hanging test would disturb the next, so its server goes with it."""
    server = Settled()
    server.kill = lambda: setattr(server.process, "poll", lambda: -9)

    class Ending(case()):
        def test_bad(self):
            if how == "hangs":
                time.sleep(5)
            server.process.poll = lambda: 1

    monkeypatch.setattr(check_kits, "test_case", lambda *_, **__: Ending)
    tests = ["test_bad", "test_good", "test_skipped"]
    args = argparse.Namespace(tests=tests, limit=0.2 if how == "hangs" else 30, model="m")
    found = check_kits.run_kit(kits.KITS[0], server, args)
    results = [found[name]["result"] for name in tests]
    assert results == ["timeout" if how == "hangs" else "failed", "not run", "not run"]


def test_differences():
    def results(**found):
        return {k: {"result": v, "why": "", "seconds": 0} for k, v in found.items()}

    tests = {
        "stock": results(a="passed", b="failed", c="passed", d="passed"),
        "int2": results(a="passed", b="failed", c="failed"),
    }
    row = {"kit": "K", "tests": tests}
    assert check_kits.differences([row]) == [
        "K.c: stock passed, int2 failed",
        "K.d: stock passed, int2 missing",
    ]
    assert check_kits.counts(tests["stock"]) == "3 passed, 1 failed"


def test_results_of_the_other_cache_are_kept_if_the_flags_are_the_same(tmp_path):
    """A run can be done in parts; what was run on another model or flags is no comparison."""
    kit, passed = kits.KITS[0], {"t": {"result": "passed", "why": "", "seconds": 1}}
    file = tmp_path / "kits.json"

    def results(cache: str, *flags: str) -> check_kits.Results:
        args = argparse.Namespace(json=file, commit="abc", caches=[cache], flags=list(flags))
        args.model = Path("m")
        found = check_kits.Results(args, [kit])
        found.add(kit, cache, passed)
        return found

    def caches() -> list[str]:
        (row,) = json.loads(file.read_text())["rows"]
        return list(row["tests"])

    results("stock", "--a")
    assert results("int2", "--a").as_dict()["differences"] == []
    assert caches() == ["stock", "int2"]
    assert len(results("int2", "--b").as_dict()["differences"]) == 1 and caches() == ["int2"]
