"""Fixtures of the tests that run SGLang itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from oscar_sglang.launch_server import enter_cpu_mode, has_gpu
from scripts.lib.tiny_models import LLAMA
from tests.support.vectors import DATA

if not has_gpu():
    enter_cpu_mode()  # before anything imports sglang

ROOT = Path(__file__).parents[2]
CALIBRATION = f"{DATA / 'smollm2_tokens.npz'}:cal_tech"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once per checkout."""
    target = Path(os.environ.get("OSCAR_DEMO_MODEL", ROOT / ".cache" / "smollm2-135m"))
    subprocess.run([sys.executable, "-m", "scripts.demo_model", target], cwd=ROOT, check=True)
    return target


@pytest.fixture(scope="session")
def nano() -> Path:
    """The small Qwen3-type model with head_dim 128 and QK-norm, where the machine has it."""
    folder = os.environ.get("OSCAR_NANO_MODEL")
    if not folder:
        pytest.skip("OSCAR_NANO_MODEL names no folder with the qwen3-nano test model")
    return Path(folder)


@pytest.fixture(scope="session")
def documents() -> dict[str, list[int]]:
    """The test documents of the acceptance table, 2048 tokens each."""
    with np.load(DATA / "smollm2_tokens.npz") as z:
        return {k: z[k][:2048].tolist() for k in z.files if k.startswith("test_")}


@pytest.fixture(scope="session")
def artifacts(smollm2, tmp_path_factory) -> dict[str, Path]:
    """Calibrated artifacts of some codecs, from one pass over 4 x 2048 tokens."""
    from oscar_sglang.calibration import Plan, calibrate_codecs

    names = ["feedback", "aligned", "oscar"]
    folder = tmp_path_factory.mktemp("artifacts")
    paths = {}
    for name, made in calibrate_codecs(Plan(smollm2, CALIBRATION), names).items():
        paths[name] = folder / f"{name}.safetensors"
        made.save(paths[name])
    return paths


@pytest.fixture(scope="session")
def reference_model(smollm2):
    """The same model in transformers, float32: the independent implementation."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """The config of a two-layer Llama for ``--load-format dummy``; token ids only."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder
