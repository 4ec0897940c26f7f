"""Each calibration warning on moments that deserve it, and none on those that do not."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from oscar_sglang.calibration import Plan, calibrate_codecs
from oscar_sglang.calibration.data import Tokens
from oscar_sglang.calibration.fit import LayerFit
from oscar_sglang.calibration.stats import Moments
from oscar_sglang.calibration.warn import UNFIT, calibration_warnings, head_similarity
from scripts.lib.tiny_models import family

D = 16


def moments(mean: float = 3.0, axes=(0, 0), spread: bool = True) -> Moments:
    """Two heads: K's mean along all channels or one, queries along ``axes``."""
    k_mean = torch.zeros(2, D, dtype=torch.float64)
    k_mean[:, : D if spread else 1] = mean
    eye = torch.eye(D, dtype=torch.float64)
    qtq = torch.stack([eye + 20 * torch.outer(eye[a], eye[a]) for a in axes])
    ktk = k_mean[:, :, None] * k_mean[:, None] + eye
    rows = torch.zeros(4, 2, D)
    return Moments(100, k_mean, ktk, ktk, qtq, qtq, rows, rows)


def warnings(
    m: Moments,
    tokens: int = 4096,
    biased: bool = False,
    v_error: float = 0.1,
    logit_error: float = 0.5,
):
    source = Tokens([torch.zeros(tokens, dtype=torch.int64)], "a file")
    fit = LayerFit(None, None, {"v_error": [v_error], "logit_error": [0.1, logit_error]})
    return calibration_warnings(source, 4096, [m, m], [fit, fit], biased)


def test_a_healthy_calibration_has_none():
    assert warnings(moments()) == []


@pytest.mark.parametrize(
    "found, words",
    [
        (dict(m=moments(mean=0.1)), "K's mean holds less than 25% of its energy in 4 of 4 heads"),
        (dict(m=moments(axes=(0, 1))), "KV heads disagree in 2 of 2 layers (layers 0, 1)"),
        (dict(m=moments(mean=9, spread=False)), "single K channels hold over 75%"),
        (dict(m=moments(), tokens=400), "fewer than 512"),
        (dict(m=moments(), tokens=1000), "only 1000 tokens: at least 2048"),
        (dict(m=moments(), v_error=0.6), "layer 1: V keeps less than half"),
        (
            dict(m=moments(), logit_error=1.2),
            "off by up to 1.2 nats, 1 or more in layers 0, 1 of 2",
        ),
        (dict(m=moments(), logit_error=1.6), f"this model is {UNFIT}: logits"),
    ],
)
def test_each_warning(found, words):
    assert any(words in w for w in warnings(**found))


def test_outliers_name_biases_only_where_there_are_any():
    m = moments(mean=4, spread=False)
    assert not any("single K" in w and "biases" in w for w in warnings(m))
    assert any("biases of its Q and K projections" in w for w in warnings(m, biased=True))


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A Qwen2 shape whose K has large biases on two channels that turn fast."""
    folder = family("qwen2", tmp_path_factory.mktemp("model"), sharp=True, head_dim=64)
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        bias = weights[f"model.layers.{layer}.self_attn.k_proj.bias"].view(2, 64)
        bias[:, 1] += 60
        bias[:, 2] -= 45
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_biases_that_rope_hides_are_seen(biased):
    """Relative to K's energy, which the biases hold, the error looks small."""
    made = calibrate_codecs(Plan(biased, "random:1500", 1500), ["feedback", "position"])
    feedback, position = made.values()
    for report in feedback.provenance["layers"]:
        chosen = [report["k_error"][basis][head] for head, basis in enumerate(report["k_basis"])]
        assert max(chosen) < 0.05
    found = feedback.provenance["warnings"]
    assert any(UNFIT in w for w in found)
    assert any("single K channels" in w and "biases of its Q and K" in w for w in found)
    assert not any(UNFIT in w for w in position.provenance["warnings"])
    assert any("logits are off" in w for w in position.provenance["warnings"])


def test_a_model_without_such_biases_is_not_suspected(tmp_path):
    folder = family("qwen2", tmp_path, sharp=True, head_dim=64)
    made = calibrate_codecs(Plan(folder, "random:1500", 1500), ["feedback", "position"])
    for artifact in made.values():
        assert not any("logits" in w or "single K" in w for w in artifact.provenance["warnings"])


def test_similarity_of_heads():
    assert head_similarity(moments(axes=(2, 2)).qtq) == pytest.approx(1)
    assert abs(head_similarity(moments(axes=(2, 3)).qtq)) < 0.2
    assert head_similarity(moments().qtq[:1]) == 1
