"""Triton kernels compiled for GPUs that are not there: what the interpreter does not see."""

from pathlib import Path

import pytest

from oscar_sglang.kernels import store
from tests.support.runner import result_without_sglang

KERNELS = Path(store.__file__).parent
# CUDA C++ programming guide, maximum shared memory of a thread block; of sm_86 as of sm_89.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}


@pytest.mark.parametrize("sm, codec", [(89, "omni"), (90, "position"), (80, "accurate")])
def test_the_largest_head_fits_in_shared_memory(sm, codec):
    shared = result_without_sglang("compile_triton", sm, 256, codec, TRITON_INTERPRET="0")
    assert max(shared.values()) <= SHARED_MEMORY[sm], shared
    files = [file.read_text() for file in KERNELS.glob("*.py")]
    every = {line.split("(")[0] for text in files for line in text.split("@triton.jit\ndef ")[1:]}
    kernels = {name for name in every if name.endswith("_kernel")}
    assert len(kernels) == 14 and shared.keys() >= kernels - {"_seal_kernel", "_mean_kernel"}
    assert ("_seal_kernel" in shared) == (codec == "omni")
    assert ("_mean_kernel" in shared) == (codec == "position")
