"""Which layers' K or V get 4 bits, and that what they cost is counted."""

from __future__ import annotations

import pytest
import torch

from oscar_sglang.artifact import file as art
from oscar_sglang.calibration import CalibrationError, Plan, calibrate, widths
from oscar_sglang.calibration.collect import collect, load_model, score
from oscar_sglang.calibration.model_fit import Fitter
from oscar_sglang.kernels.layout import HistoryLayout, MemoryPlan, WindowLayout
from oscar_sglang.kernels.stores import HistoryStore
from oscar_sglang.pool.sizing import make_plan
from scripts.lib.tiny_models import family, random_ids

N_SINK = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return family("qwen2", tmp_path_factory.mktemp("model"), sharp=True)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, "cpu")


@pytest.fixture(scope="module")
def codecs(model):
    return Fitter("position", 4096, N_SINK)(collect(model, random_ids(900), n_sink=N_SINK))


@pytest.mark.parametrize(
    "bits, layers, head_dim, slots",
    [(2.125, 36, 128, 0), (2.3, 36, 128, 6), (2.4, 30, 64, 4), (4.125, 36, 128, 72), (9, 2, 64, 4)],
)
def test_slots_that_bits_pay_for(bits, layers, head_dim, slots):
    found = widths.wide_slots(bits, layers, head_dim)
    assert found == slots
    scores = [(float(i), 0.5) for i in range(layers)]
    chosen = widths.choose(scores, bits, head_dim)
    assert sum(w == 4 for pair in chosen for w in pair) == slots
    plan = MemoryPlan(
        layers, HistoryLayout(8, head_dim, meta_bytes=1), WindowLayout(), 2, 0, 0, 2,
        widths=tuple(chosen),
    )  # fmt: skip
    assert plan.bits_per_element <= max(bits, widths.base_bits(head_dim)) + 1e-9
    assert plan.bits_per_element == pytest.approx(widths.base_bits(head_dim) + slots / layers)
    store = HistoryStore(plan.layouts, layers, 100, "cpu")
    assert store.num_bytes == plan.history_bytes(100)


def test_the_largest_scores_are_chosen():
    scores = [(0.1, 0.4), (0.3, 0.2), (0.0, 0.5)]
    assert widths.choose(scores, 2.125 + 2 / 3, 128) == [(2, 4), (2, 2), (2, 4)]
    assert widths.choose(scores, 2.125, 128) == [(2, 2)] * 3


def test_widths_of_other_layers_are_refused():
    with pytest.raises(ValueError, match="widths of 2 layers, expected 3"):
        MemoryPlan(3, HistoryLayout(8, 128), WindowLayout(), 2, 0, 0, 2, widths=((2, 2),) * 2)


def test_outputs_with_one_slot_coded(codecs):
    """Against attention over keys and values replaced row by row."""
    length, codec = 700, codecs[1]
    g = torch.Generator().manual_seed(0)
    d = codec.params.mean.shape[-1]
    q = torch.randn(length, 4, d, generator=g)
    k, v = (torch.randn(length, 2, d, generator=g) for _ in "kv")
    exact, k_coded, v_coded = widths.outputs_of(codec, q, k, v, 0.3, N_SINK)
    assert len(exact) == widths.ROWS
    hats = codec.quantised(k, v, torch.arange(length))
    k_hat = torch.einsum("thd,hde->the", hats[0], codec.params.k_back)
    v_hat = torch.einsum("thd,hde->the", hats[1], codec.params.r_v.mT)
    for i in (0, 100, widths.ROWS - 1):
        at = length - widths.ROWS + i
        history = torch.zeros(length, dtype=torch.bool)
        history[N_SINK : at + 1 - widths.RECENT] = True
        for found, keys, values in ((exact, k, v), (k_coded, k_hat, v), (v_coded, k, v_hat)):
            keys, values = (
                torch.where(history[:, None, None], hat, x)[: at + 1].repeat_interleave(2, 1)
                for hat, x in ((keys, k), (values, v))
            )
            weights = (torch.einsum("hd,thd->ht", q[at], keys) * 0.3).softmax(-1)
            want = torch.einsum("ht,thd->hd", weights, values)
            assert torch.allclose(found[i], want, atol=1e-4)


def test_scores_see_the_output_projection(model, codecs):
    """A layer whose output goes nowhere has nothing to lose; twice the weights, more to lose."""
    ids = random_ids(900)[0]
    plain = score(model, ids, codecs, N_SINK)
    assert all(x > 0 for pair in plain for x in pair)
    weight = model.model.layers[1].self_attn.o_proj.weight
    kept = weight.detach().clone()
    try:
        weight.data.zero_()
        assert score(model, ids, codecs, N_SINK)[1] == (0.0, 0.0)
        weight.data.copy_(2 * kept)
        doubled = score(model, ids, codecs, N_SINK)
    finally:
        weight.data.copy_(kept)
    assert doubled[0] == pytest.approx(plain[0])
    assert all(a > 1.5 * b for a, b in zip(doubled[1], plain[1], strict=True))
    assert not model.model.layers[0]._forward_pre_hooks


def test_calibration_chooses_and_records(folder, tmp_path):
    """Half of the slots; the file, the plan and the report say which."""
    base = widths.base_bits(32)
    options = dict(tokens=1800, n_sink=N_SINK, context=2048)
    artifact = calibrate(Plan(folder, "random:900", bits=base + 1, **options), "position")
    path = tmp_path / "a.safetensors"
    artifact.save(path)
    loaded = art.load(path)
    pairs = [(s.k_bits, s.v_bits) for s in loaded.specs]
    assert sorted(w for pair in pairs for w in pair) == [2, 2, 4, 4]
    assert [tuple(x) for x in loaded.options["bits"]] == pairs
    assert art.load(path).widths == tuple(pairs)
    reports = loaded.provenance["layers"]
    scores = {(r["score"][side], pairs[i][side]) for i, r in enumerate(reports) for side in (0, 1)}
    assert min(s for s, bits in scores if bits == 4) > max(s for s, bits in scores if bits == 2)
    for report, (k, v) in zip(reports, pairs, strict=True):
        old = report.get("at_2_bits", {})
        if k == 4:
            assert max(report["logit_error"]) < 0.5 * max(old["logit_error"])
        if v == 4:
            assert max(report["v_error"]) < 0.5 * max(old["v_error"])
    plan = make_plan(
        _config(), layers=2, kv_heads=2, head_dim=32, itemsize=4, budget_bytes=1 << 30,
        max_running_requests=2, device="cpu", context_length=2048, widths=tuple(pairs),
    )  # fmt: skip
    assert plan.bits_per_element == base + 1
    all_wide = calibrate(Plan(folder, "random:300", bits=base + 2, **options), "position")
    assert [(s.k_bits, s.v_bits) for s in all_wide.specs] == [(4, 4)] * 2


def _config():
    from oscar_sglang.config import OscarConfig

    return OscarConfig(codec="position")


def test_what_cannot_be_chosen(folder):
    options = dict(tokens=900, n_sink=N_SINK)
    with pytest.raises(CalibrationError, match="2.1 bits per element cannot be had.*2.5 to 4.5"):
        calibrate(Plan(folder, bits=2.1, **options), "position")
    short = calibrate(Plan(folder, "random:300", bits=3.0, **options), "position")
    assert [(s.k_bits, s.v_bits) for s in short.specs] == [(2, 2)] * 2
    assert any("no K or V was given 4 bits" in w for w in short.provenance["warnings"])
    none = calibrate(Plan(folder, "random:300", bits=2.5, **options), "position")
    assert not any("4 bits" in w for w in none.provenance["warnings"])
