"""The GPU backend's own code on a CPU: Triton under the interpreter, a two-layer model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    "codec, make",
    [
        ("feedback", tiny_models.qwen3),
        ("compact", tiny_models.llama),
        ("omni", tiny_models.llama),
    ],
)
def test_gpu_backend_equals_the_reference_backend(tmp_path, monkeypatch, codec, make):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    model = make(tmp_path / "model")
    script = Path(__file__).parents[1] / "backend_parity.py"
    done = subprocess.run(
        [sys.executable, script, model, codec], stdout=subprocess.PIPE, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    # Both store the same codes; logits differ by float32 rounding and FP16 operands of attend.
    assert max(result["differences"]) < 2e-3, result["differences"]
    reference, gpu = result["counts"]
    assert reference == gpu and reference[0] > 0 and reference[2] == 2
