"""A calibration that the running engine measures is the one that transformers would give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oscar_sglang.plugin.recalibrate import CalibrationError, _Clock, _fit
from scripts.lib import tiny_models
from tests.support.runner import result_of

pytestmark = pytest.mark.sglang


def move_biases(folder: Path, seed: int) -> Path:
    """Other biases of K and V: what a rotation is aligned to."""
    path = folder / "model.safetensors"
    weights, generator = load_file(path), torch.Generator().manual_seed(seed)
    for name, bias in weights.items():
        if name.endswith(("k_proj.bias", "v_proj.bias")):
            bias.copy_(torch.randn(bias.shape, generator=generator) * 2)
    save_file(weights, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("recalibrate")
    models = [tiny_models.family("qwen2", folder / n, sharp=True) for n in ("model", "other")]
    for seed, model in enumerate(models):
        move_biases(model, seed)
    return result_of("recalibrate_parity", *models)


def test_tokens_are_those_that_the_model_expects(found):
    assert found["lengths"] == [512, 1024] * 2 and found["repeated"]
    assert found["warnings"] == []
    # Drawn from the model's own distributions, which are far from uniform.
    assert found["surprise"] < found["surprise of random ids"] - 0.3


def test_the_fit_is_as_good_as_an_independent_one(found):
    """Errors of K and V per head, measured on the model's own rows by transformers."""
    assert found["live"] == pytest.approx(found["independent"], rel=0.02)
    # The other model's parameters are worse by far, or the test would show nothing.
    assert sum(found["other"]) > 1.5 * sum(found["live"])


def test_parameters_change_in_place(found):
    assert found["same tensors"] and found["grids follow"] and found["rotations changed"]


def test_nothing_is_left_behind(found):
    assert found["observer"] and found["free rows"] == 8


def test_time_is_bounded():
    with pytest.raises(CalibrationError, match="0 of 3 layers were fitted when the time was up"):
        _fit([None] * 3, "feedback", _Clock(-1))
