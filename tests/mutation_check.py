"""Do the tests notice? Deliberate faults in the pool's code, one at a time: each must fail a test.

    python tests/mutation_check.py [NAME ...]

No file is changed: each fault is put into the source while a forked child imports it. Exit status 1
if a fault passes all tests.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
KERNELS = HERE.parent / "triton_kernels"
TESTS = ("test_reference.py", "test_debug_tags.py", "test_faults.py", "test_ownership.py")
SKIP = "not calibrat and not cache and not disk"


class Fault(NamedTuple):
    file: str
    old: str
    new: str


FAULTS = {
    "history one token too short": Fault(
        "reference.py", "prefix_lens + 1 - windows.n_recent)", "prefix_lens - windows.n_recent)"
    ),
    "history one token too long": Fault(
        "reference.py", "prefix_lens + 1 - windows.n_recent)", "prefix_lens + 2 - windows.n_recent)"
    ),
    "stale ring after a prefix hit": Fault(
        "reference.py",
        "torch.maximum(recent_start, prefix_lens + 1 - windows.n_recent)",
        "prefix_lens + 1 - windows.n_recent",
    ),
    "ring read one row off": Fault(
        "stores.py",
        "index = positions % self.windows.n_recent\n        return self.recent_k",
        "index = (positions + 1) % self.windows.n_recent\n        return self.recent_k",
    ),
    # One row less would change nothing: attention reads the last n_recent - 1 of the prefix.
    "oldest ring rows not written": Fault(
        "stores.py", "positions >= ends - w.n_recent", "positions >= ends - w.n_recent + 2"
    ),
    "sink cache without its tag": Fault(
        "stores.py",
        "return self.tag[slots % self.tag.shape[0]] == slots",
        "return self.tag[slots % self.tag.shape[0]] >= 0",
    ),
    "wrong tag": Fault(
        "stores.py", "self.tag[slots % self.tag.shape[0]] = slots", "self.tag[slots % 3] = slots"
    ),
    "swapped scales of K and V": Fault(
        "stores.py", "torch.cat([k.meta, v.meta], -1)", "torch.cat([v.meta, k.meta], -1)"
    ),
    "padding claims a sink-cache row": Fault("reference.py", " & (slots > 0)", ""),
    "padding writes a live row": Fault(
        "reference.py", "token_rows = rows[request]", "token_rows = rows[request].clamp_min(1)"
    ),
    "rows of another request": Fault(
        "reference.py",
        "seg.windows.write(layer, batch.token_rows,",
        "seg.windows.write(layer, batch.rows.min().expand_as(batch.token_rows),",
    ),
    "slot table read one off": Fault(
        "reference.py",
        "slots = req_to_token[row, first : first + n].long()",
        "slots = req_to_token[row, first + 1 : first + n + 1].long()",
    ),
    "tile boundary one off": Fault(
        "reference.py",
        "low, high = max(n_sink, start), min(hist_end, stop)",
        "low, high = max(n_sink, start + 1), min(hist_end, stop)",
    ),
    "restored sinks from the wrong source": Fault(
        "reference.py", "miss = ~hit[:, None, None]", "miss = hit[:, None, None]"
    ),
    "one position read from two segments": Fault(
        "reference.py",
        "exact_from = max(n_sink, hist_end)",
        "exact_from = max(n_sink, hist_end - 1)",
    ),
    "empty segment not guarded": Fault(
        "reference.py", "torch.where(total > 0, 1 / total, torch.zeros_like(total))", "1 / total"
    ),
}


def mutate(fault: Fault) -> None:
    """Imports of ``fault.file`` in this process compile the faulty source."""
    target, loader = KERNELS / fault.file, importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self, fullname):
        if Path(self.path).resolve() != target.resolve():
            return original(self, fullname)
        source = target.read_text()
        if source.count(fault.old) != 1:
            raise SystemExit(f"{fault.file} holds {fault.old!r} {source.count(fault.old)} times")
        return compile(source.replace(fault.old, fault.new), self.path, "exec")

    loader.get_code = get_code


class Failures:
    """A pytest plugin: the names of tests that failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.names.append(report.nodeid.rpartition("/")[2])

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.names.append(f"{report.nodeid} cannot be imported")


def failing_tests(fault: Fault | None) -> list[str]:
    """Run the tests in a forked child that holds ``fault``."""
    import pytest

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = Failures()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if fault:
                mutate(fault)
            quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=no", "-k", SKIP]
            pytest.main([*quiet, *(str(HERE / t) for t in TESTS)], plugins=[found])
        os.write(write, json.dumps(found.names[:400]).encode()[:60000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        names = json.loads(pipe.read() or '["the run crashed"]')
    os.waitpid(child, 0)
    return names


def main(wanted: list[str]) -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "scripts" / "lib")]
    os.environ.setdefault("OSCAR_OWNERSHIP", "150x3")
    from oscar_sglang.launch_server import enter_cpu_mode

    enter_cpu_mode()
    import hypothesis  # noqa: F401  (imports that every child would repeat)
    import sglang.srt.mem_cache.radix_cache  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    if clean := failing_tests(None):
        print(f"fail even without a fault: {', '.join(clean)}")
        return 1
    missed = 0
    for name, fault in FAULTS.items():
        if wanted and name not in wanted:
            continue
        names = failing_tests(fault)
        missed += not names
        files = {f: [n for n in names if n.startswith(f)] for f in TESTS}
        caught = "; ".join(f"{v[0]} (+{len(v) - 1})" for v in files.values() if v)
        print(f"{'caught' if names else 'MISSED'}  {name}: {caught or names}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
