"""The doctor's self-test: silent on sound kernels; a wrong store and a wrong attend told apart."""

import pytest
import torch

from oscar_sglang.config import OscarError
from oscar_sglang.health import selftest
from oscar_sglang.health.selftest import Shape, check_served, compare
from oscar_sglang.kernels.codec import CODECS
from oscar_sglang.kernels.decode import DecodeAttention
from oscar_sglang.kernels.layout import WindowLayout

SMALL = Shape(32, 2, 2, lens=(70, 33, 5), windows=WindowLayout(8, 16))


@pytest.fixture
def shape(device):
    return Shape() if device.type == "cuda" else SMALL


def test_sound_kernels(device, shape):
    found = compare(device, triton_only=True, shape=shape)
    assert found.sound and found.attention_error > 0, str(found)
    assert "attention within" in str(found)


def served(lab, device, codec_name: str, triton_only: bool) -> tuple:
    """What a server would check: its decode attention, codec and one layer's parameters."""
    spec = CODECS[codec_name]
    # The interpreter cuts BF16 off instead of rounding it.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    dim, heads, windows = (128, 8, (64, 256)) if device.type == "cuda" else (16, 1, (6, 10))
    attention = DecodeAttention(
        heads=2 * heads, kv_heads=heads, head_dim=dim, dtype=dtype,
        windows=WindowLayout(windows[0], spec.ring_tokens(windows[1])),
        page_size=max(16, spec.block), max_batch=3, device=device, triton_only=triton_only,
        block=spec.block,
    )  # fmt: skip
    cache = lab(kv_heads=heads, dim=dim, lens=(8,), codec_name=codec_name)
    return attention, cache.seg.spec, cache.seg.params[0]


@pytest.mark.parametrize("codec_name", ["compact", "lloyd", "position", "omni"])
def test_sound_kernels_of_a_server(lab, device, codec_name):
    check_served(*served(lab, device, codec_name, True))


@pytest.mark.gpu
@pytest.mark.parametrize("codec_name", CODECS)
def test_sound_cuda_kernels_of_a_server(lab, device, codec_name):
    check_served(*served(lab, device, codec_name, False))


def test_a_server_with_wrong_kernels_is_stopped(lab, device, monkeypatch):
    attention, spec, params = served(lab, device, "lloyd", True)
    real = selftest.store
    monkeypatch.setattr(selftest, "store", lambda v, t, q, k, x, *a: real(v, t, q, x, k, *a))
    with pytest.raises(OscarError, match="lloyd are wrong here.*OSCAR_SGLANG_KERNELS=triton"):
        check_served(attention, spec, params)
    monkeypatch.setattr(selftest, "store", None)
    with pytest.raises(OscarError, match="lloyd fail here.*OSCAR_SGLANG_KERNELS=triton"):
        check_served(attention, spec, params)


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
