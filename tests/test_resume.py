"""Interrupted calibrations continue with the same result; tokens sampled from the model."""

import pytest
import torch

from oscar_sglang.calibration import Plan, calibrate, state
from oscar_sglang.calibration.collect import collect, load_model
from oscar_sglang.calibration.data import Tokens, load_tokens
from oscar_sglang.calibration.selfsample import plausible, resample
from oscar_sglang.calibration.state import Partial
from oscar_sglang.plugin.model_folder import overridden_folder
from scripts.lib.tiny_models import llama, random_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, "cpu")


@pytest.fixture(autouse=True)
def save_always(monkeypatch):
    monkeypatch.setattr(state, "SAVE_EVERY_SECONDS", 0)


class Stop(Exception):
    pass


def stop_after(n: int):
    def progress(stage, done, total):
        if stage == "running the model" and done >= n:
            raise Stop

    return progress


def same(a, b) -> bool:
    return all(
        torch.equal(getattr(x, n), getattr(y, n))
        for x, y in zip(a, b, strict=True)
        for n in ("k_mean", "ktk", "vtv", "qtq", "oto", "held_k", "held_v")
    )


def test_an_interrupted_collection_continues(model, tmp_path):
    ids, path = random_ids(300, 200, 250), tmp_path / "p"
    whole = collect(model, ids, n_sink=8)
    with pytest.raises(Stop):
        collect(model, ids, n_sink=8, partial=Partial(path, "key"), progress=stop_after(750))
    seen = []
    report = lambda stage, done, total: seen.append(done)  # noqa: E731
    again = collect(model, ids, n_sink=8, partial=Partial(path, "key"), progress=report)
    assert seen == [750] and same(whole, again)


@pytest.mark.parametrize("damage", ["other key", "truncated", "text", "missing"])
def test_anything_else_starts_again(model, tmp_path, damage):
    ids, path = random_ids(300, 200), tmp_path / "p"
    collect(model, ids, n_sink=8, partial=Partial(path, "key"))
    if damage == "missing":
        path.unlink()
    elif damage != "other key":
        path.write_bytes(path.read_bytes()[:300] if damage == "truncated" else b"hello")
    key = "another" if damage == "other key" else "key"
    assert same(collect(model, ids, n_sink=8), collect(model, ids, 8, partial=Partial(path, key)))


def test_calibrate_removes_the_partial_file(folder, tmp_path):
    path = tmp_path / "a.partial"
    with pytest.raises(Stop):
        calibrate(Plan(folder, tokens=9000, partial=path, progress=stop_after(8192)))
    assert path.exists()
    resumed = calibrate(Plan(folder, tokens=9000, partial=path))
    assert not path.exists()
    assert resumed.id == calibrate(Plan(folder, tokens=9000)).id


def test_a_model_in_a_temporary_folder_continues(folder, tmp_path):
    """As of a hub, or with overrides: each run has a folder of links of its own."""
    path, done = tmp_path / "a.partial", []
    with overridden_folder([folder], {"rms_norm_eps": 1e-5}) as first, pytest.raises(Stop):
        calibrate(Plan(first, tokens=9000, partial=path, progress=stop_after(8192)))
    with overridden_folder([folder], {"rms_norm_eps": 1e-5}) as second:
        assert second != first
        report = lambda stage, n, _: done.append(n) if stage == "running the model" else 0  # noqa: E731
        calibrate(Plan(second, tokens=9000, partial=path, progress=report))
    assert done == [8192, 9000], "began again"


def test_sampled_tokens_are_seeded_said_twice_and_likely(folder, model):
    tokens = load_tokens("random", folder, 5049, seed=3)
    found = plausible(model, tokens)
    assert found.description == "sampled from the model, seed 3"
    assert [len(s) for s in found.sequences] == [4096, 953]
    assert found.hash == plausible(model, tokens).hash
    for before, ids in zip(tokens.sequences, found.sequences, strict=True):
        half = (len(ids) + 1) // 2
        assert torch.equal(ids[half:], ids[: len(ids) - half]) and ids[0] == before[0]

    ids = tokens.sequences[0]
    sampled = resample(model, [ids], seed=0)[0][1:1024]
    with torch.no_grad():
        logp = model(ids[None, :1023]).logits[0].log_softmax(-1)
    likely, uniform = (logp.gather(1, x[:, None]).mean() for x in (sampled, ids[1:1024]))
    assert likely > uniform


def test_given_tokens_are_left_alone(model):
    tokens = Tokens(random_ids(50), "a file")
    assert plausible(model, tokens) is tokens
