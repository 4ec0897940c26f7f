"""Published rotation files in and out, and everything that is refused; ``verify``."""

import os
import pickle

import pytest
import torch

from oscar_sglang.artifact import file as art
from oscar_sglang.artifact.file import ArtifactError
from oscar_sglang.calibration import Plan, calibrate, zoo
from oscar_sglang.calibration.verify import verify
from oscar_sglang.cli import main
from scripts.lib.tiny_models import llama, qwen3

HEADS, D, LAYERS = 2, 64, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("model"))


def orthogonal(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, generator=g).double()).Q.float()


def content(version: int, seed: int = 0, key=int) -> dict:
    shape = (D, D) if version == 1 else (HEADS, D, D)
    layers = {
        key(i): {"layer_id": i, "rotation": orthogonal(*shape, seed=seed + i)}
        for i in range(LAYERS)
    }
    return {"format_version": version, "objective": "qqt", "layers": layers}


@pytest.fixture
def files(tmp_path):
    def write(k, v=None):
        paths = tmp_path / "K.pt", tmp_path / "V.pt"
        for path, data in zip(paths, (k, v or content(2, 7)), strict=True):
            torch.save(data, path)
        return paths

    return write


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("key", [int, str])
def test_both_versions_import_and_round_trip(model_dir, files, tmp_path, version, key):
    k, v = content(version, 0, key), content(version, 7, key)
    artifact = zoo.import_zoo(*files(k, v), model_dir)
    for i, params in enumerate(artifact.layers):
        for tensor, side in ((params.r_k, k), (params.r_v, v)):
            wanted = side["layers"][key(i)]["rotation"].expand(HEADS, D, D)
            assert torch.equal(tensor, wanted)
    artifact.save(tmp_path / "a.safetensors")
    again = tmp_path / "k2.pt", tmp_path / "v2.pt"
    zoo.export_zoo(art.load(tmp_path / "a.safetensors"), *again)
    assert zoo.import_zoo(*again, model_dir).id == artifact.id


class Hostile:
    def __reduce__(self):
        return os.mkdir, (Hostile.target,)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_pickle_with_code_is_refused_and_not_run(model_dir, files, tmp_path, form):
    Hostile.target = str(tmp_path / "was-run")
    paths = files(content(2))
    if form == "torch":
        torch.save({"format_version": 1, "layers": Hostile()}, paths[0])
    else:
        paths[0].write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ArtifactError, match="K.pt: refused.*nothing in it was run"):
        zoo.import_zoo(*paths, model_dir)
    assert not (tmp_path / "was-run").exists()


def _without(layer):
    data = content(2)
    del data["layers"][layer]
    return data


def _with(rotation):
    data = content(2)
    data["layers"][1] = {"rotation": rotation}
    return data


@pytest.mark.parametrize(
    "data, message",
    [
        ([1], "holds a list, expected a dict"),
        (content(2) | {"format_version": 3}, "format_version is 3, expected 1 or 2"),
        (content(2) | {"layers": []}, "'layers' is list"),
        (content(2) | {"layers": {"x": 1}}, "layer id 'x' is not a number"),
        (_without(1), r"holds layers 0..0 \(1\), the model has 2"),
        (_with(None), "layer 1 has no 'rotation'"),
        (_with(orthogonal(D, D)), r"layer 1: rotation is \[64, 64\], this model needs \[2, 64, 64"),
        (_with(torch.ones(HEADS, D, D, dtype=torch.int64)), "layer 1 has no 'rotation'"),
        (_with(2 * orthogonal(HEADS, D, D)), "not orthogonal"),
        (_with(orthogonal(HEADS, D, D) * float("nan")), "NaN"),
    ],
)
def test_files_that_do_not_fit_are_refused(model_dir, files, data, message):
    with pytest.raises(ArtifactError, match=message):
        zoo.import_zoo(*files(data), model_dir)


@pytest.mark.parametrize("damage", ["missing", "truncated", "text"])
def test_damaged_files_are_refused(model_dir, files, damage):
    k, v = files(content(2))
    if damage == "missing":
        k.unlink()
    else:
        k.write_bytes(k.read_bytes()[:500] if damage == "truncated" else b"hello")
    with pytest.raises(ArtifactError, match=r"K\.pt"):
        zoo.import_zoo(k, v, model_dir)


def test_commands(model_dir, files, tmp_path, capsys):
    k, v = files(content(1), content(1, 7))
    out = str(tmp_path / "a.safetensors")
    assert main(["import-zoo", str(k), str(v), "--model", str(model_dir), "--out", out]) == 0
    printed = capsys.readouterr().out
    assert "codec oscar, 2 layers" in printed and "one rotation for all KV heads" in printed
    assert main(["inspect", out]) == 0
    assert main(["export", out, "--k", str(tmp_path / "k.pt"), "--v", str(tmp_path / "v.pt")]) == 0
    capsys.readouterr()
    k.write_bytes(b"hello")
    assert main(["import-zoo", str(k), str(v), "--model", str(model_dir), "--out", out]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- verify


@pytest.fixture(scope="module")
def artifact(model_dir):
    return calibrate(Plan(model_dir, tokens=2048))


def test_errors_are_reproduced_on_other_tokens(model_dir, artifact):
    found = verify(artifact, model_dir, tokens=2048)
    assert found.ok and len(found.rows) == LAYERS
    assert "fits this model; errors are" in found.verdict


def test_wrong_factors_are_not_reproduced(model_dir, artifact):
    layers = [p._replace(factor=-10 * p.factor) for p in artifact.layers]
    tampered = art.Artifact(
        artifact.fingerprint, "feedback", artifact.options, layers, artifact.provenance
    )
    found = verify(tampered, model_dir, tokens=2048)
    assert not found.ok and "not reproduced; calibrate again" in found.verdict


def test_verify_command(model_dir, artifact, tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    artifact.save(path)
    argv = ["verify", str(path), "--model", str(model_dir), "--tokens", "2048"]
    assert main(argv) == 0
    assert "fits this model" in capsys.readouterr().out
    argv[3] = str(qwen3(tmp_path / "other"))
    assert main(argv) == 2
    assert "calibrated for another model" in capsys.readouterr().err


def test_an_artifact_without_recorded_errors_only_has_to_fit(model_dir, files):
    artifact = zoo.import_zoo(*files(content(2)), model_dir)
    found = verify(artifact, model_dir, tokens=1024)
    assert found.ok and "records no errors" in found.verdict
    artifact.provenance["layers"] = [{"k_error": "tampered"}] * LAYERS
    assert verify(artifact, model_dir, tokens=1024).ok
