"""check_models.py: its figures, the checkpoints it makes, and a run on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.lib import forced_decode, model_kinds, reference_answers

ROOT = Path(__file__).parents[1]


def test_divergence_is_that_of_the_tokens_both_have():
    p, q = (
        torch.tensor([3.0, 1.0, 0.5]).log_softmax(0),
        torch.tensor([1.0, 2.0, 0.0]).log_softmax(0),
    )
    exact = dict(enumerate(p.tolist()))
    other = dict(enumerate((q - 60).tolist()))  # beside a forced token, which is left out
    expected = (p.exp() * (p - q)).sum().item()
    assert forced_decode.divergence(exact, other) == pytest.approx(expected, abs=1e-6)
    other[9] = 5.0
    assert forced_decode.divergence(exact, other) == pytest.approx(expected, abs=1e-6)
    assert forced_decode.divergence(exact, {7: 0.0}) == math.inf


def test_the_worst_request_is_named():
    good, bad = {0: -1.0, 1: -2.0}, {0: -4.0, 1: -0.1}
    exact = {"fresh": {"answers": [[good] * 3, [good] * 3]}}
    other = {"fresh": {"answers": [[good] * 3, [good, bad, bad]]}}
    found = forced_decode.compare(exact, other, ["fresh"])
    assert found["worst_request"] == "fresh 1" and found["worst"] == found["max"] > 0.1
    assert found["top1"] == pytest.approx(4 / 6) and found["steps"] == 6


def test_answers_travel(tmp_path):
    steps = [{i: -float(i) for i in range(9)}, {i: -float(9 - i) for i in range(9)}]
    reference_answers.save(tmp_path / "a.npz", {"hit": {"answers": [steps], "cached": [4]}}, top=3)
    found = reference_answers.load(tmp_path / "a.npz")
    kept = [{0: 0.0, 1: -1.0, 2: -2.0}, {8: -1.0, 7: -2.0, 6: -3.0}]
    assert found == {"hit": {"answers": [kept], "cached": [4]}}


def test_awq_checkpoint_is_the_model():
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    tensors = model_kinds._awq_tensors("w", weight)

    def unpack(words):  # AutoAWQ's order: outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up
        nibbles = (words.long().unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        return nibbles[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(-2)

    codes, zeros = (unpack(tensors[f"w.{n}"]) for n in ("qweight", "qzeros"))
    group = torch.arange(256) // model_kinds._AWQ_GROUP
    found = (codes - zeros[group]) * tensors["w.scales"].float()[group]
    assert (found.t() - weight).abs().max() < 0.3  # half a step of a group's range
    assert tensors["w.qweight"].shape == (256, 2) and tensors["w.scales"].shape == (2, 16)


@pytest.mark.sglang
def test_on_the_cpu(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "scripts.check_models", "--device", "cpu"]
    command += ["--only", "qwen3-128", "--runs", "exact,wide", "--json", out, "--log-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(out.read_text())["models"]["qwen3-128"]
    (found,) = row["comparisons"]
    assert row["ok"] and row["spread"] > 0.5 and found["steps"] > 300
    assert found["prefix_hits"] and found["ratio"] < 1e-9
