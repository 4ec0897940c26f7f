"""Heads of 80, 96 and 112 channels: rows of 128 in the cache, the same attention."""

from __future__ import annotations

import pytest
import torch

from oscar_sglang.calibration import CalibrationError, Options, Plan, calibrate, evaluate
from oscar_sglang.calibration.attention import causal_attention, replaced_attention
from oscar_sglang.calibration.collect import load_model, model_turning
from oscar_sglang.kernels.padding import padded
from scripts.lib.tiny_models import family, random_ids


def test_rows_get_zeros():
    rows = torch.randn(3, 2, 96)
    wide = padded(rows)
    assert wide.shape == (3, 2, 128) and torch.equal(wide[..., :96], rows)
    assert not wide[..., 96:].any()
    assert padded(wide) is wide


@pytest.mark.parametrize("head_dim", [80, 96, 112])
def test_logits_are_those_of_the_model(tmp_path, head_dim):
    """Scaled by the model's head_dim, turned by its RoPE, cut where its head ends."""
    model = load_model(family("llama-64", tmp_path, head_dim=head_dim), "cpu")
    (ids,), seen = random_ids(50), []

    def attend(layer, q, k, v, scale):
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1], scale))
        return causal_attention(q, k, v, scale)

    with torch.no_grad():
        expected = model(ids[None]).logits
        with replaced_attention(model, attend):
            found = model(ids[None]).logits
    assert set(seen) == {(128, 128, 128, head_dim**-0.5)}
    assert (found - expected).norm() / expected.norm() < 1e-6
    rope = model_turning(model, 5).rope
    assert sum(t != 0 for t in rope.theta) == head_dim // 2 and len(rope.pairs) == 128


def test_what_is_calibrated(tmp_path):
    folder = family("llama-64", tmp_path, head_dim=80)
    made = calibrate(Plan(folder, tokens=400))
    assert made.fingerprint.head_dim == 80 and made.layers[0].r_k.shape == (2, 128, 128)
    with pytest.raises(CalibrationError, match="codec position is not made for heads of 80"):
        calibrate(Plan(folder, tokens=400), "position")
    with pytest.raises(CalibrationError, match="evaluation is not made for heads of 80"):
        evaluate(Options(model=folder))
