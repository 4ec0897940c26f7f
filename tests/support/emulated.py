"""The CUDA kernels on a CPU: their own sources and launchers, ``kernels/emulator/`` for a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oscar_sglang.kernels import cuda_attend, cuda_store, plan
from oscar_sglang.kernels.driver import Source

EMULATOR = Path(__file__).parents[1] / "kernels" / "emulator"
# $OSCAR_KERNEL_SOURCES: others to build (``mutation_check.py``).
SOURCES = Path(os.environ.get("OSCAR_KERNEL_SOURCES", Path(plan.__file__).parent))
DEVICE = SimpleNamespace(
    multi_processor_count=3, shared_memory_per_multiprocessor=233_472, major=9, minor=0
)


class Kernel:
    """``driver.Kernel``."""

    def __init__(self, library, name: str, threads: int, shared: int, overlap: bool) -> None:
        self.launch, self.threads = getattr(library, f"launch_{name}"), threads

    def __call__(self, grid: tuple[int, int, int], args: ctypes.Structure, stream: int) -> None:
        self.launch((ctypes.c_int * 3)(*grid), self.threads, ctypes.byref(args))


class Compiler:
    """``driver.module``: the source and defines of a kernel -> a library, built once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.built = folder, {}

    def __call__(self, source: Source, defines: tuple, device) -> ctypes.CDLL:
        key = source, tuple(sorted(defines))
        if key not in self.built:
            stem = self.folder / f"{len(self.built)}"
            options = ["-O1", "-ffp-contract=off", "-shared", "-fPIC"]
            library = stem.with_suffix(".so")
            self.compile(source, dict(defines), stem, SOURCES, *options, "-o", library)
            self.built[key] = ctypes.CDLL(str(library))
        return self.built[key]

    def compile(self, source: Source, defines: dict, stem: Path, folder: Path, *options) -> None:
        """Raises CalledProcessError where the sources in ``folder`` do not compile."""
        sources = [(folder / name).read_text() for name in source.files]
        # attend.cu compiles either of its two kernels.
        names = re.findall(r'extern "C" __global__.* void (\w+)\(', sources[-1])
        names = [n for n in names if n != ("attend_cta" if "WARPS" in defines else "attend_warp")]
        parts = ['#include "types.h"', sources[0], '#include "instructions.h"', *sources[1:]]
        parts += [source.checks(), '#include "launch.h"', *(f"LAUNCH({name})" for name in names)]
        program = stem.with_suffix(".cpp")
        program.write_text("\n".join(parts) + "\n")
        command = ["g++", "-std=c++20", "-w", f"-I{EMULATOR}", *options]
        command += [f"-D{name}={value}" for name, value in defines.items()]
        subprocess.run([*command, program], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Compiler:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler (g++) to build the emulator with")
    folder = tmp_path_factory.mktemp("emulator")
    probe = folder / "probe.cpp"
    probe.write_text("_Float16 half(float x) { return (_Float16)x; }\n")
    command = ["g++", "-std=c++20", "-c", probe, "-o", folder / "probe.o"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("the emulator needs C++20 and _Float16 (g++ 12 or newer)")
    return Compiler(folder)


@pytest.fixture
def cuda(compiler, monkeypatch):
    """``cuda_attend`` and ``cuda_store`` launch on CPU tensors."""
    caches = cuda_attend._attend_kernel, cuda_attend._merge_kernel, cuda_store._kernel
    for launcher in (cuda_attend, cuda_store):
        monkeypatch.setattr(launcher, "module", compiler)
        monkeypatch.setattr(launcher, "Kernel", Kernel)
        monkeypatch.setattr(launcher, "overlaps", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: DEVICE)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
