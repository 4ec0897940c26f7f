"""The doctor's self-test: silent on sound kernels; a wrong store and a wrong attend told apart."""

import pytest
import torch

from oscar_sglang import selftest
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.selftest import Shape, compare

SMALL = Shape(32, 2, 2, lens=(70, 33, 5), windows=WindowLayout(8, 16))


@pytest.fixture
def shape(device):
    return Shape() if device.type == "cuda" else SMALL


def test_sound_kernels(device, shape):
    found = compare(device, triton_only=True, shape=shape)
    assert found.sound and found.attention_error > 0, str(found)
    assert "attention within" in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sound_cuda_kernels(device, head_dim):
    found = compare(device, triton_only=False, shape=Shape(head_dim))
    assert found.sound, str(found)


def test_no_fallback_passes_for_the_cuda_kernels(device):
    """head_dim 32 has no CUDA form, nor has a CPU."""
    with pytest.raises(RuntimeError, match="CUDA kernels do not support"):
        compare(device, triton_only=False, shape=SMALL)


def test_a_wrong_store_is_found(device, shape, monkeypatch):
    real = selftest.store

    def swapped(view, tokens, q, k, v, *rest):
        return real(view, tokens, q, v, k, *rest)

    monkeypatch.setattr(selftest, "store", swapped)
    found = compare(device, True, shape)
    assert not found.sound and found.equal_rows < 0.5 and found.window_error > 0.1


def test_a_wrong_attend_is_found(device, shape, monkeypatch):
    real = selftest.DecodeAttention.step

    def step(self, batch):
        made = real(self, batch)
        plan = made.plan
        # An off-by-one: the newest token is not read.
        made.plan = lambda rows, lens, start: plan(rows, lens - 1, start)
        return made

    monkeypatch.setattr(selftest.DecodeAttention, "step", step)
    found = compare(device, True, shape)
    assert not found.sound and found.equal_rows > 0.97 and found.attention_error > 0.05


def test_not_a_number_is_not_sound():
    assert not selftest.Agreement(1.0, 0.0, float("nan")).sound
    assert not selftest.Agreement(1.0, torch.inf, 0.0).sound
    assert selftest.Agreement(1.0, 0.0, 0.0).sound
