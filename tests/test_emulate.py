"""The quantised-cache emulation against one that rebuilds K and V for every query row."""

from pathlib import Path

import pytest
import torch

from oscar_sglang.calibration import CalibrationError, Plan, calibrate
from oscar_sglang.calibration.attention import causal_attention, replaced_attention
from oscar_sglang.calibration.collect import load_model
from oscar_sglang.kernels.codec import LayerCodec
from oscar_sglang.kernels.layout import WindowLayout
from scripts.lib.tiny_models import llama, qwen3, random_ids
from tests.support.quantised_cache import QuantisedCache

WINDOWS = WindowLayout(n_sink=8, n_recent=16)


@pytest.fixture(scope="module", params=[llama, qwen3], ids=["llama-d64", "qwen3-d128"])
def model_dir(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_dir):
    return load_model(model_dir, "cpu")


@pytest.fixture(scope="module")
def artifact(model_dir):
    return calibrate(Plan(model_dir, tokens=600))


def _brute_force(artifact, ends: torch.Tensor, n_sink: int):
    """Attention function that rebuilds K and V for every query row."""

    def attend(layer, q, k, v, scale):
        params = artifact.layers[layer]
        k_hat, v_hat = LayerCodec(artifact.spec, params).quantised(
            *(x[0].transpose(0, 1) for x in (k, v))
        )
        k_hat = torch.einsum("thd,hed->hte", k_hat, params.r_k)
        v_hat = torch.einsum("thd,hed->hte", v_hat, params.r_v)
        rows = []
        for p, end in enumerate(ends.tolist()):
            coded = torch.arange(p + 1) >= n_sink
            coded &= torch.arange(p + 1) < end
            kk = torch.where(coded[:, None], k_hat[:, : p + 1], k[0, :, : p + 1])
            vv = torch.where(coded[:, None], v_hat[:, : p + 1], v[0, :, : p + 1])
            kk, vv = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (kk, vv))
            weights = (q[0, :, p : p + 1] @ kk.mT * scale).softmax(-1)
            rows.append(weights @ vv)
        return torch.cat(rows, 1)[None]

    return attend


def assert_same(fast: torch.Tensor, slow: torch.Tensor) -> None:
    """In the mean: the two compute K in different float32 orders, and where one lies on a
    rounding tie a code falls the other way (about 1e-3 in a few logits)."""
    assert (fast - slow).abs().mean() < 3e-5
    assert (fast - slow).abs().max() < 1e-2


@torch.no_grad()
def _logits(model, context, ids):
    with context:
        return model(ids[None], use_cache=False).logits[0]


def test_emulation_equals_brute_force(model, artifact):
    ids, prefix = random_ids(90)[0], 60
    ends = (torch.arange(90) + 1 - WINDOWS.n_recent).clamp_min(WINDOWS.n_sink)
    ends[:prefix] = 0
    fast = _logits(model, QuantisedCache(model, artifact, WINDOWS, exact_prefix=prefix), ids)
    slow = _logits(
        model, replaced_attention(model, _brute_force(artifact, ends, WINDOWS.n_sink)), ids
    )
    assert_same(fast, slow)


def test_emulation_of_an_arbitrary_schedule(model, artifact):
    ids = random_ids(70)[0]
    ends = torch.randint(0, 60, (70,), generator=torch.Generator().manual_seed(1))
    fast = _logits(model, QuantisedCache(model, artifact, WINDOWS, hist_end=ends), ids)
    slow = _logits(
        model, replaced_attention(model, _brute_force(artifact, ends, WINDOWS.n_sink)), ids
    )
    assert_same(fast, slow)


def test_emulation_with_nothing_quantised_is_exact(model, artifact):
    ids = random_ids(50)[0]

    def exact(layer, q, k, v, scale):
        return causal_attention(q, k, v, scale)

    expected = _logits(model, replaced_attention(model, exact), ids)
    for context in (
        QuantisedCache(model, artifact, WINDOWS, exact_prefix=50),
        QuantisedCache(model, artifact, WindowLayout(n_sink=8, n_recent=64)),
        QuantisedCache(model, artifact, WINDOWS, hist_end=torch.zeros(50, dtype=torch.int64)),
    ):
        assert torch.allclose(_logits(model, context, ids), expected, atol=1e-5)


@torch.no_grad()
def test_emulation_token_by_token_equals_one_pass(model, artifact):
    ids, prefix = random_ids(80)[0], 50
    whole = _logits(model, QuantisedCache(model, artifact, WINDOWS, exact_prefix=prefix), ids)
    with QuantisedCache(model, artifact, WINDOWS, exact_prefix=prefix):
        out = model(ids[None, :prefix], use_cache=True)
        steps = [out.logits[0]]
        for i in range(prefix, 80):
            out = model(ids[None, i : i + 1], past_key_values=out.past_key_values)
            steps.append(out.logits[0])
    assert torch.allclose(torch.cat(steps), whole, atol=1e-4)


def test_emulation_changes_logits_and_restores_the_model(model, artifact):
    ids = random_ids(80)[0]
    before = model.config._attn_implementation
    quantised = _logits(model, QuantisedCache(model, artifact, WINDOWS), ids)
    assert model.config._attn_implementation == before
    exact = _logits(model, QuantisedCache(model, artifact, WINDOWS, exact_prefix=80), ids)
    first = WINDOWS.tokens  # the first row that has a history
    assert torch.allclose(quantised[:first], exact[:first], atol=1e-5)
    assert (quantised[first:] - exact[first:]).abs().max() > 1e-3


def test_padded_batches_are_refused(model, artifact):
    mask = torch.tensor([[0, 0, 1, 1]])
    with (
        torch.no_grad(),
        QuantisedCache(model, artifact, WINDOWS),
        pytest.raises(CalibrationError, match="padded or masked"),
    ):
        model(torch.ones(1, 4, dtype=torch.int64), attention_mask=mask)
