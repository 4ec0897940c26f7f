"""The hash of a model's weights: everything that a calibration depends on, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oscar_sglang.artifact import file as art
from oscar_sglang.artifact import weights
from oscar_sglang.artifact.weights import FingerprintError, hash_weights, weight_files
from scripts.lib.tiny_models import family

HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A model with biased K and a head of its own; matrices larger than all their pieces."""
    folder = tmp_path_factory.mktemp("original")
    return family("qwen2", folder, hidden_size=512, intermediate_size=1024)


@pytest.fixture
def model(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture(scope="module")
def tensors(original) -> dict[str, torch.Tensor]:
    return load_file(original / "model.safetensors")


def saved(model: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, model / "model.safetensors")
    return hash_weights(model)


def test_every_tensor_counts_in_content_shape_dtype_and_name(model, tensors):
    """All but the head, of whatever layer and size; the head does not."""
    before, counted = hash_weights(model), []
    assert any(t.numel() * t.element_size() > weights.PIECE * 64 for t in tensors.values())
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        for change in (
            {name: noise.to(tensor.dtype)},
            {name: tensor.flatten() if tensor.dim() > 1 else tensor[None]},
            {name: tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)},
        ):
            assert (saved(model, tensors | change) == before) == (name == HEAD), name
        renamed = {"x" + n if n == name else n: t for n, t in tensors.items()}
        assert saved(model, renamed) != before or name == HEAD
        counted.append(name)
    assert HEAD in counted and len(counted) > 20
    assert saved(model, tensors) == before


@pytest.mark.parametrize("kind", ["k_proj", "q_proj", "o_proj"])
def test_one_head_of_a_projection_counts(model, tensors, kind):
    """16 heads here; the promise is 1/64 of an attention projection."""
    name = f"model.layers.1.self_attn.{kind}.weight"
    rows = len(tensors[name])
    before = hash_weights(model)
    for head in range(64):
        part = slice(head * rows // 64, (head + 1) * rows // 64)
        moved = tensors[name].clone()
        moved[part] *= -1
        assert saved(model, tensors | {name: moved}) != before, head


def test_a_bias_moved_by_one_counts(model, tensors):
    before = hash_weights(model)
    name = "model.layers.0.self_attn.v_proj.bias"
    assert saved(model, tensors | {name: tensors[name] + 1}) != before


def test_stated_share_of_a_matrix_is_read():
    """Any run of 1/64 or 1/8 meets a piece, and stacked experts count one by one."""
    for name, shape, runs in (
        ("layers.0.self_attn.q_proj.weight", (4096, 4096), 64),
        ("layers.0.mlp.up_proj.weight", (4096, 11008), 8),
        ("layers.0.mlp.experts.up", (16, 4096, 1024), 8 * 16),
    ):
        size = 2 * torch.Size(shape).numel()
        pieces = weights._pieces(weights.Tensor(name, "BF16", shape, Path("x"), 0, size))
        assert len(pieces) == runs and all(n == weights.PIECE for _, n in pieces)
        starts = [begin for begin, _ in pieces]
        ends = [begin + n for begin, n in pieces]
        assert starts[0] == 0 and ends[-1] <= size
        gaps = [b - e for b, e in zip([*starts[1:], size], ends, strict=True)]
        assert max(gaps) < size // runs


def test_how_tensors_are_spread_over_files_does_not_count(model, tensors):
    before = hash_weights(model)
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, model / file, {"format": "pt"})
    assert hash_weights(model) == before
    index = {"weight_map": {n: f for f, held in parts.items() for n in held}}
    (model / weights.INDEX).write_text(json.dumps(index))
    assert hash_weights(model) == before
    save_file({"more": torch.ones(3)}, model / "beside.safetensors")
    assert hash_weights(model) == before


@pytest.mark.parametrize(
    "name", ["training_args.bin", "pytorch_model.bin", "rng_state.pt", "notes.txt", "x.gguf"]
)
def test_files_that_sglang_does_not_load_do_not_count(model, name):
    before = hash_weights(model)
    torch.save({"lr": torch.ones(3)}, model / name)
    assert hash_weights(model) == before


def test_an_artifact_beside_the_weights_is_not_a_weight(model):
    before = hash_weights(model)
    art.data_free(art.Fingerprint.of(model)).save(model / "artifact.safetensors")
    assert hash_weights(model) == before
    save_file({"more": torch.ones(3)}, model / "more.safetensors")
    assert hash_weights(model) != before


def pickled(model: Path, tensors: dict[str, torch.Tensor], **options) -> str:
    torch.save(tensors, model / "pytorch_model.bin", **options)
    return hash_weights(model)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pickled_weights(model, tensors, zipped):
    (model / "model.safetensors").unlink()
    options = dict(_use_new_zipfile_serialization=zipped)
    before = pickled(model, tensors, **options)
    torch.save({}, model / "training_args.bin")
    assert pickled(model, tensors, **options) == before != weights.NO_WEIGHTS
    name = "model.layers.1.mlp.up_proj.weight"
    moved = tensors[name].clone()
    moved[100, 100] += 1  # the archive's checksums see a single number
    assert pickled(model, tensors | {name: moved}, **options) != before
    assert pickled(model, tensors | {name: tensors[name].T}, **options) != before


def test_a_tied_head_counts(model, tensors):
    """A checkpoint whose only embedding is its head."""
    alone = {n: t for n, t in tensors.items() if "embed" not in n}
    before = saved(model, alone)
    assert saved(model, alone | {HEAD: alone[HEAD] + 1}) != before


def test_no_weights(tmp_path):
    assert hash_weights(tmp_path) == weights.NO_WEIGHTS


@pytest.mark.parametrize("keep", [4, 40, 0.5, 0.999])
def test_a_file_cut_short_is_named(model, keep):
    file = model / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(FingerprintError, match="model.safetensors.*fetch it again"):
        hash_weights(model)


def test_an_index_of_absent_files_is_named(model):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / weights.INDEX).write_text(json.dumps(index))
    with pytest.raises(FingerprintError, match="names 1 file.*model-00001-of-00002"):
        hash_weights(model)
    (model / weights.INDEX).write_text("{}")
    with pytest.raises(FingerprintError, match="no weight_map"):
        hash_weights(model)


LAYOUTS = {
    "one file": ["model.safetensors"],
    "two formats": ["model.safetensors", "pytorch_model.bin", "model.pt"],
    "a Mistral copy": ["consolidated.safetensors", "model.safetensors"],
    "no index": ["a.safetensors", "b.safetensors", "consolidated.safetensors"],
    "an index": ["a.safetensors", "b.safetensors", "consolidated.safetensors", weights.INDEX],
    "pickled": ["pytorch_model-1.bin", "pytorch_model-2.bin", "training_args.bin", "optimizer.pt"],
    "pt": ["model.pt", "scheduler.pt", "scaler.pt"],
}
FORMATS = ("auto", "safetensors", "pt", "npcache", "mistral")


@pytest.mark.parametrize("load_format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_files_as_sglangs_loader(tmp_path, monkeypatch, layout, load_format):
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    for name in LAYOUTS[layout]:
        (tmp_path / name).write_bytes(bytes(8))
    if weights.INDEX in LAYOUTS[layout]:
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (tmp_path / weights.INDEX).write_text(json.dumps(index))
    monkeypatch.setattr(loader, "get_server_args", lambda: None, raising=False)
    made = loader.DefaultModelLoader(LoadConfig(load_format=load_format))
    try:
        _, theirs, _ = made._prepare_weights(str(tmp_path), None, fall_back_to_pt=True)
    except RuntimeError as error:
        assert "Cannot find any model weights" in str(error)
        theirs = []
    ours = weight_files(tmp_path, load_format)
    assert sorted(ours) == sorted(map(Path, theirs))
