"""Statistics against a direct computation, bases and factors against their definitions, the
data sources and the per-user cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oscar_sglang.artifact import file as art
from oscar_sglang.cache import cache_dir
from oscar_sglang.calibration import (
    CalibrationError,
    Plan,
    auto,
    calibrate,
    ensure_artifact,
)
from oscar_sglang.calibration.attention import replaced_attention
from oscar_sglang.calibration.collect import check_supported, collect, load_model
from oscar_sglang.calibration.data import load_tokens
from oscar_sglang.calibration.fit import fit_layer
from oscar_sglang.calibration.fit_options import feedback_factor, feedback_metric
from oscar_sglang.calibration.stats import HOLD_EVERY, LayerStats
from oscar_sglang.kernels.codec import CODECS
from oscar_sglang.kernels.hadamard import bit_reversal, eigenbasis, hadamard, householder_to_e0
from scripts.lib.tiny_models import VOCAB, edit_config, family, llama, qwen3, random_ids

FITTED = [name for name, spec in CODECS.items() if spec.needs_data]


@pytest.fixture(scope="module", params=[llama, qwen3], ids=["llama-d64", "qwen3-d128"])
def model_dir(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_dir):
    return load_model(model_dir, "cpu")


@pytest.fixture(scope="module")
def moments(model):
    return collect(model, random_ids(700, 300), n_sink=8)


def _eye_gap(r: torch.Tensor) -> float:
    return float((r.mT @ r - torch.eye(r.shape[-1], dtype=r.dtype)).abs().max())


# ---- structured matrices


@pytest.mark.parametrize("d", [1, 2, 16, 128])
def test_hadamard(d):
    h = hadamard(d)
    assert _eye_gap(h) < 1e-12
    assert torch.allclose(h[:, 0], torch.full((d,), d**-0.5, dtype=torch.float64))


def test_hadamard_refuses_other_sizes():
    with pytest.raises(ValueError, match="power of two, got 96"):
        hadamard(96)


@pytest.mark.parametrize("kind", ["random", "e0", "minus e0", "nearly e0", "zero", "tiny"])
def test_householder_takes_x_to_e0(kind):
    d = 64
    x = torch.zeros(d, dtype=torch.float64)
    if kind in ("random", "tiny"):
        x = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x = x * 1e-30 if kind == "tiny" else x
    elif kind != "zero":
        x[0] = -3.0 if kind == "minus e0" else 3.0
        x[1] = 1e-9 if kind == "nearly e0" else 0.0
    q = householder_to_e0(x)
    expected = torch.zeros_like(x)
    expected[0] = x.norm()
    assert _eye_gap(q) < 1e-12
    assert torch.allclose(x @ q, expected, rtol=0, atol=1e-13 * float(x.norm()))


def test_bit_reversal():
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversal(1).tolist() == [0]


def test_eigenbasis_order_and_sign():
    x = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    m = x.mT @ x
    u = eigenbasis(m, descending=True)
    values = (u.mT @ m @ u).diagonal(dim1=-2, dim2=-1)
    assert (values.diff(dim=-1) <= 1e-9).all()
    largest = u.gather(-2, u.abs().argmax(-2, keepdim=True))
    assert (largest > 0).all()
    assert torch.equal(eigenbasis(m, descending=False), u.flip(-1))


# ---- statistics


def test_statistics_equal_a_direct_computation(model, moments):
    n_sink, rows = 8, {}

    def record(layer, q, k, v, scale):
        t, group = q.shape[2], q.shape[1] // k.shape[1]
        kk, vv = (x.double().repeat_interleave(group, 1) for x in (k, v))
        logits = (q.double() @ kk.mT * scale).masked_fill(
            torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf
        )
        o = logits.softmax(-1) @ vv
        for name, x in (("q", q.double()), ("k", k.double()), ("v", v.double()), ("o", o)):
            rows.setdefault((layer, name), []).append(x[0, :, n_sink:].transpose(0, 1))
        return o.to(q.dtype)

    with torch.no_grad(), replaced_attention(model, record):
        for ids in random_ids(700, 300):
            model(ids[None], use_cache=False)
    for layer, m in enumerate(moments):
        r = {name: torch.cat(rows[layer, name]) for name in "qkvo"}
        held = torch.arange(len(r["k"])) % HOLD_EVERY == HOLD_EVERY - 1
        heads = r["k"].shape[1]
        assert m.count == int((~held).sum())
        assert torch.allclose(m.k_mean, r["k"][~held].mean(0), atol=1e-6)
        for name, x in (("ktk", "k"), ("vtv", "v"), ("qtq", "q"), ("oto", "o")):
            x = r[x][~held].unflatten(1, (heads, -1))
            direct = torch.einsum("tkgd,tkge->kde", x, x) / (x.shape[0] * x.shape[2])
            assert torch.allclose(getattr(m, name), direct, rtol=1e-4, atol=1e-5), name
        assert {tuple(k.shape) for k in (m.held_k, m.held_v)} == {
            (int(held.sum()), *r["k"].shape[1:])
        }


def test_statistics_do_not_depend_on_batches():
    g = torch.Generator().manual_seed(3)
    q, k, v, o = (torch.randn(1000, h, 16, generator=g) for h in (4, 2, 2, 4))
    index = torch.arange(1000)
    results = []
    for size in (1000, 333, 1):
        stats = LayerStats(capacity=20)
        for rows in zip(*(x.split(size) for x in (index, q, k, v, o)), strict=True):
            stats.update(*rows)
        results.append(stats.finish())
    for other in results[1:]:
        for name in ("k_mean", "ktk", "vtv", "qtq", "oto"):
            assert torch.allclose(getattr(results[0], name), getattr(other, name), rtol=1e-10)
        assert torch.equal(results[0].held_k, other.held_k)
        assert torch.equal(results[0].held_v, other.held_v)


def test_memory_does_not_grow_with_tokens():
    stats = LayerStats(capacity=10)
    sizes = []
    for i in range(5):
        x = torch.ones(400, 2, 16)
        stats.update(torch.arange(400 * i, 400 * (i + 1)), x, x, x, x)
        kept = [*stats.sums.values(), *stats.held.rows, stats.held.priority]
        sizes.append(sum(t.untyped_storage().nbytes() for t in kept))
    assert len(set(sizes)) == 1
    assert len(stats.held.rows[0]) == 10


def test_collecting_restores_the_model(model):
    before = model.config._attn_implementation
    collect(model, random_ids(64), n_sink=4)
    assert model.config._attn_implementation == before


# ---- fit


@pytest.mark.parametrize("codec", FITTED)
def test_rotations_are_orthogonal_and_keep_products(moments, codec):
    for m in moments:
        params = fit_layer(m, codec).params
        assert CODECS[codec].meta.name == "position" or _eye_gap(params.r_k.double()) < 1e-6
        assert _eye_gap(params.r_v.double()) < 1e-6
        q_rot, k_rot = (
            torch.einsum("nhd,hde->nhe", x.double(), r.double())
            for x, r in ((m.held_v, params.queries), (m.held_k, params.r_k))
        )
        exact = (m.held_v.double() * m.held_k.double()).sum(-1)
        assert torch.allclose(exact, (q_rot * k_rot).sum(-1), atol=1e-4)


def test_aligned_puts_the_mean_on_all_ones(moments):
    for m in moments:
        r_k = fit_layer(m, "aligned").params.r_k.double()
        d = m.k_mean.shape[-1]
        expected = (m.k_mean.norm(dim=-1, keepdim=True) / d**0.5).expand(-1, d)
        assert torch.allclose(torch.einsum("hd,hde->he", m.k_mean, r_k), expected, atol=1e-6)


def test_oscar_is_ascending_eigenvectors_hadamard_reversed(moments):
    m = moments[0]
    d = m.k_mean.shape[-1]
    params = fit_layer(m, "oscar").params
    for r, second_moment in ((params.r_k, m.qtq), (params.r_v, m.oto)):
        r_h = r.double()[..., (d - 1 - bit_reversal(d)).argsort()] @ hadamard(d).mT
        energies = (r_h.mT @ second_moment @ r_h).diagonal(dim1=-2, dim2=-1)
        assert (energies.diff(dim=-1) >= -1e-4 * energies.abs().max()).all()


def test_feedback_factor_definition():
    x = torch.randn(1, 100, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    m, eye = x.mT @ x, torch.eye(16, dtype=torch.float64)
    f = feedback_factor(feedback_metric(eye[None], m, damping=0.05))
    g = m + 0.05 * m.diagonal(dim1=-2, dim2=-1).sum() / 16 * eye
    unit = f + eye  # U = diag(U) unit, so that G^-1 = unit^T diag(U)^2 unit
    diagonal = torch.linalg.inv(unit.mT) @ torch.linalg.inv(g) @ torch.linalg.inv(unit)
    assert not f.tril().any()
    assert torch.allclose(diagonal, diagonal.diagonal(dim1=-2, dim2=-1).diag_embed(), atol=1e-12)


def test_feedback_beats_plain_rounding_and_picks_the_best_basis(moments):
    for m in moments:
        report = fit_layer(m, "feedback").report
        assert set(report["k_error"]) == {"mean", "ktk", "qtq", "hadamard"}
        for head, basis in enumerate(report["k_basis"]):
            chosen = report["k_error"][basis][head]
            assert chosen == min(errors[head] for errors in report["k_error"].values())
            assert chosen < report["k_error_plain"][head]


def test_fit_of_a_dead_head_is_finite(moments):
    m = moments[0]
    zero = {n: torch.zeros_like(getattr(m, n)) for n in ("k_mean", "ktk", "qtq", "oto", "held_k")}
    before = replace(m.before, **{n: zero[n] for n in ("k_mean", "ktk", "qtq")})
    dead = type(m)(**(vars(m) | zero | {"before": before}))
    for codec in FITTED:
        params = fit_layer(dead, codec).params
        assert all(t is None or bool(t.isfinite().all()) for t in params)
        assert _eye_gap(params.r_k.double() @ params.k_back.double()) < 1e-6


def test_a_codec_without_statistics_is_made_without_the_model(model_dir, cache, monkeypatch):
    """``omni``: no token is run, beside codecs that need some or alone; options are its own."""
    from oscar_sglang.calibration import pipeline

    monkeypatch.setattr(pipeline, "ENGINES", {})
    without_norm = Plan(model_dir, codec_options={"norm": "none"})
    made = calibrate(without_norm, "omni")
    assert made.options == {"norm": "none", "rotation": "hadamard"}
    assert made.provenance["warnings"] == []
    with pytest.raises(CalibrationError, match="aligned has no options norm"):
        calibrate(without_norm, "aligned")
    _, path, created = ensure_artifact(without_norm, "omni")
    _, other, again = ensure_artifact(Plan(model_dir), "omni")
    assert created and again and path != other
    assert not ensure_artifact(without_norm, "omni")[2]


# ---- data


def test_random_tokens_are_seeded_and_start_with_bos(model_dir):
    a, b, c = (load_tokens("random", model_dir, 5000, seed) for seed in (0, 0, 1))
    assert [len(s) for s in a.sequences] == [4096, 904]  # max_position_embeddings
    assert all(int(s[0]) == 1 for s in a.sequences)
    assert a.hash == b.hash != c.hash
    short = load_tokens("random:2000", model_dir, 5000)
    assert [len(s) for s in short.sequences] == [2000, 2000, 1000] and short.seed == 0
    for bad in ("random:0", "random:x"):
        with pytest.raises(CalibrationError, match="length of a sequence"):
            load_tokens(bad, model_dir, 5000)


def test_npz_tokens(model_dir, tmp_path):
    path = tmp_path / "ids.npz"
    np.savez(path, two=np.arange(200, dtype=np.uint16).reshape(2, 100), big=np.array([[VOCAB]]))
    tokens = load_tokens(f"{path}:two", model_dir, 150)
    assert [s.tolist() for s in tokens.sequences] == [list(range(100)), list(range(100, 150))]
    with pytest.raises(CalibrationError, match="no array 'nope'; it holds"):
        load_tokens(f"{path}:nope", model_dir, 10)
    with pytest.raises(
        CalibrationError, match=f"reach {VOCAB}, the model's vocabulary has {VOCAB}"
    ):
        load_tokens(f"{path}:big", model_dir, 10)
    with pytest.raises(CalibrationError, match="missing.npz"):
        load_tokens(f"{tmp_path}/missing.npz:two", model_dir, 10)


def test_text_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = llama(tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text("a b c " * 100)
    with pytest.raises(CalibrationError, match="no usable tokenizer .* --data random"):
        load_tokens(str(text), folder, 10)
    tokenizer = Tokenizer(models.WordLevel({"a": 5, "b": 6, "c": 7, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    assert load_tokens(str(text), folder, 7).sequences[0].tolist() == [5, 6, 7, 5, 6, 7, 5]
    with pytest.raises(CalibrationError, match="cannot be read as UTF-8"):
        load_tokens(str(folder / "model.safetensors"), folder, 7)


# ---- pipeline and cache


def test_calibrate_is_reproducible_and_reports(model_dir):
    stages = set()
    plan = Plan(model_dir, tokens=600, progress=lambda stage, *_: stages.add(stage))
    a, b = (calibrate(plan) for _ in range(2))
    assert a.id == b.id
    assert stages == {"choosing tokens", "running the model", "fitting"}
    assert a.fingerprint == art.Fingerprint.of(model_dir)
    assert a.provenance["tokens"] == 600
    assert any("at least 2048 are recommended" in w for w in a.provenance["warnings"])
    assert len(a.provenance["layers"]) == 2


def test_calibrate_refuses_too_little_data(model_dir):
    with pytest.raises(CalibrationError, match="leave 36 beyond the first 64"):
        calibrate(Plan(model_dir, tokens=100))
    with pytest.raises(CalibrationError, match="unknown codec 'nope'; supported: feedback"):
        calibrate(Plan(model_dir), "nope")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"attention_chunk_size": 128}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"head_dim": 48}, "head_dim 48 has no 2-bit layout; supported: 16, 32, 64"),
    ],
    ids=["mla", "window", "chunks", "layer-types", "head-dim"],
)
def test_unsupported_models_are_refused_before_loading(tmp_path, change, message):
    folder = llama(tmp_path)
    edit_config(folder, **change)
    with pytest.raises(CalibrationError, match=message):
        check_supported(folder, art.Fingerprint.of(folder).head_dim)


def test_a_model_that_cannot_be_loaded_is_one_message(tmp_path):
    folder = llama(tmp_path)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(art.FingerprintError, match="no safetensors file; fetch it again") as error:
        calibrate(Plan(folder))
    assert "\n" not in str(error.value)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_ensure_artifact_calibrates_once(model_dir, cache):
    made, path, created = ensure_artifact(Plan(model_dir, tokens=600))
    found, same_path, again = ensure_artifact(Plan(model_dir, tokens=600))
    assert (created, again) == (True, False)
    assert path == same_path and path.parent == cache
    assert made.id == found.id


def test_ensure_artifact_replaces_a_damaged_file(model_dir, cache, caplog):
    path = auto.artifact_path(art.Fingerprint.of(model_dir), "aligned")
    cache.mkdir()
    path.write_bytes(b"x" * 100)
    _, _, created = ensure_artifact(Plan(model_dir, tokens=600), "aligned")
    assert created
    assert "ignoring a cached artifact" in caplog.text
    art.load(path)


def test_ensure_artifact_without_a_writable_cache(model_dir, cache, caplog):
    cache.write_text("a file where the directory should be")
    artifact, path, created = ensure_artifact(Plan(model_dir, tokens=600), "aligned")
    assert (path, created) == (None, True)
    assert "set OSCAR_SGLANG_CACHE to a writable directory" in caplog.text
    assert len(artifact.layers) == 2


def test_cache_directory_precedence(monkeypatch):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("OSCAR_SGLANG_CACHE")
    assert cache_dir() == Path("/b/oscar_sglang")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache/oscar_sglang"


def test_a_hybrid_model_has_statistics_of_its_attention_layers(tmp_path):
    model = family("qwen3-next", tmp_path)
    made = calibrate(Plan(model, tokens=512, n_sink=8))
    assert made.fingerprint == art.Fingerprint.of(model) and len(made.layers) == 2
    # The same two, whichever way the config names them; others are all attention.
    edit_config(model, layer_types=None)
    assert art.Fingerprint.of(model).layers == 2
    edit_config(model, full_attention_interval=None)
    assert art.Fingerprint.of(model).layers == 4
