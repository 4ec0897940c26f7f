"""A fault in a source, put there while a forked child imports or builds it."""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import linecache
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
KERNELS = TESTS.parent / "triton_kernels"


class Fault(NamedTuple):
    """``old``, which ``file`` (below triton_kernels) holds once, becomes ``new``."""

    file: str
    old: str
    new: str


def faulty(fault: Fault) -> str:
    """The source of ``fault.file`` with the fault."""
    source = (KERNELS / fault.file).read_text()
    if source.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} holds {fault.old!r} {source.count(fault.old)} times")
    return source.replace(fault.old, fault.new)


def mutate(fault: Fault) -> None:
    """Imports of ``fault.file`` in this process compile the faulty source."""
    if fault.file.endswith(".cu"):
        folder = Path(tempfile.mkdtemp())
        shutil.copytree(KERNELS, folder, dirs_exist_ok=True)
        (folder / fault.file).write_text(faulty(fault))
        os.environ["OSCAR_KERNEL_SOURCES"] = str(folder)
        return
    target, loader = KERNELS / fault.file, importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self, fullname):
        if Path(self.path).resolve() != target.resolve():
            return original(self, fullname)
        source = faulty(fault)
        # Triton's interpreter reads a kernel's source again; no date: never checked against disk.
        linecache.cache[self.path] = (len(source), None, source.splitlines(True), self.path)
        return compile(source, self.path, "exec")

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


def failing_tests(
    fault: Fault | None, tests: tuple[str, ...], choose: str, stop: bool
) -> list[str]:
    """Run those of ``tests`` that pytest's -k ``choose`` leaves in a forked child that holds
    ``fault``; ``stop`` at the first failure."""
    import pytest

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = Failures()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if fault:
                mutate(fault)
            options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=no"]
            options += ["-x"] * stop + ["-k", choose] * bool(choose)
            pytest.main([*options, *(str(TESTS / t) for t in tests)], plugins=[found])
        os.write(write, json.dumps(found.names[:400]).encode()[:60000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        names = json.loads(pipe.read() or '["the run crashed"]')
    os.waitpid(child, 0)
    return names
