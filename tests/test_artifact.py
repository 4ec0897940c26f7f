"""Round trip, every refusal of ``artifact.load``, and the fingerprint of a model directory.

Long because each way a file can be wrong is a case here, all made from the same sound artifact.
"""

import dataclasses
import json
import random
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

from oscar_sglang.artifact import file as art
from oscar_sglang.artifact.file import Artifact, ArtifactError, Fingerprint, FingerprintError
from oscar_sglang.config import OMNI_CHOICES
from oscar_sglang.kernels.codec import CODECS, LayerParams
from oscar_sglang.kernels.codec_omni import OPTIONS
from oscar_sglang.kernels.codec_position import Rope

FINGERPRINT = Fingerprint("LlamaForCausalLM", 2, 8, 4, 16, '{"rope_theta":10000.0}', "{}", "0123")


def _orthogonal(heads: int, d: int, generator: torch.Generator) -> torch.Tensor:
    return (
        torch.linalg.qr(torch.randn(heads, d, d, generator=generator).double())
        .Q.float()
        .contiguous()
    )


def make(codec: str = "feedback", fingerprint: Fingerprint = FINGERPRINT) -> Artifact:
    g = torch.Generator().manual_seed(0)
    h, d = fingerprint.kv_heads, fingerprint.head_dim
    layers = []
    for _ in range(fingerprint.layers):
        square = torch.randn(h, d, d, generator=g)
        metric = square @ square.mT + torch.eye(d)
        tensors = {
            "r_k": _orthogonal(h, d, g),
            "r_v": _orthogonal(h, d, g),
            "factor": square.triu(1),
            "metric": (metric + metric.mT) / 2,
            "grid": torch.tensor([-8.0, -4.0, 0.03]).repeat(h, 2, 1),
            "mean": torch.randn(h, d, generator=g),
        }
        if CODECS[codec].meta.name == "position":
            tensors["q_k"] = torch.linalg.inv(tensors["r_k"].double()).mT.float().contiguous()
        layers.append(LayerParams(**{n: tensors[n] for n in CODECS[codec].tensors(d)}))
    options = {"damping": 0.05}
    if CODECS[codec].meta.name == "position":
        options["rope"] = json.loads(json.dumps(dataclasses.asdict(Rope.of((1.0, 0.1), d))))
        options |= {"rope_free": [0], "bits": [[2, 4], [4, 2]]}
    return Artifact(fingerprint, codec, options, layers, {"tokens": 1, "data": "é"})


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "a.safetensors"


def rewrite(path: Path, tensors=None, drop=(), made: str = "feedback", **meta) -> None:
    """A valid artifact file with some tensors and metadata replaced, unchecked."""
    artifact = make(made)
    head = {
        "format_version": 2,
        "fingerprint": dataclasses.asdict(artifact.fingerprint),
        "codec": artifact.codec,
        "options": {},
        "provenance": {},
    } | meta
    tensors = {k: v for k, v in (artifact.tensors() | (tensors or {})).items() if k not in drop}
    safetensors.torch.save_file(tensors, path, metadata={"oscar_sglang": json.dumps(head)})


def refuses(path: Path, *parts: str) -> None:
    with pytest.raises(ArtifactError) as error:
        art.load(path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message
    for part in parts:
        assert part in message, message


# ---- round trip


@pytest.mark.parametrize("codec", CODECS)
def test_round_trip(path, codec):
    artifact = make(codec)
    artifact.save(path)
    loaded = art.load(path)
    assert loaded.id == artifact.id
    assert (loaded.fingerprint, loaded.codec) == (artifact.fingerprint, codec)
    assert (loaded.options, loaded.provenance) == (artifact.options, artifact.provenance)
    for name, tensor in artifact.tensors().items():
        assert torch.equal(loaded.tensors()[name], tensor)


def test_save_leaves_one_readable_file_and_replaces(path):
    path.write_text("old")
    make().save(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644


def test_save_refuses_what_load_would(path):
    artifact = make()
    artifact.layers[1].r_k[0, 0, 0] = 7
    with pytest.raises(ArtifactError, match="layers.1.r_k is not orthogonal"):
        artifact.save(path)
    assert not path.exists()


def test_save_to_an_impossible_place(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="cannot be written"):
        make().save(tmp_path / "file" / "a.safetensors")


def test_id_depends_on_codes_only():
    a, b = make(), make()
    b.provenance = {"date": "another"}
    assert a.id == b.id and len(a.id) == 12
    b.layers[0].r_k[0] *= -1
    assert a.id != b.id
    assert dataclasses.replace(make(), options={}).id != a.id


# ---- refusals


def test_missing_file(path):
    refuses(path, "no such file", "oscar-sglang calibrate --model DIR --out FILE")


def test_directory(tmp_path):
    refuses(tmp_path, "is a directory")


@pytest.mark.parametrize("content", [b"", b"1234", b"x" * 1000, b"\x02" + bytes(7) + b"{]"])
def test_not_safetensors(path, content):
    path.write_bytes(content)
    refuses(path, "not a safetensors file")


def test_json_header_that_is_not_an_object_or_too_deep(path):
    for text in (b"[1]", b'{"a":' * 100_000):
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        refuses(path, "safetensors header")


def test_foreign_safetensors(path):
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path)
    refuses(path, "not an oscar_sglang artifact")


@pytest.mark.parametrize("keep", [9, 100, 0.5, 0.999])
def test_truncated(path, keep):
    make().save(path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    refuses(path, "truncated")


@pytest.mark.parametrize(
    "version, part",
    [(3, "upgrade"), (1, "may be another model's"), (0, "calibrate"), (None, "None")],
)
def test_format_version(path, version, part):
    """A file of version 1 has another fingerprint, too: what to do must be said all the same."""
    fingerprint = dataclasses.asdict(FINGERPRINT)
    if version == 1:
        del fingerprint["settings"]
    rewrite(path, format_version=version, fingerprint=fingerprint)
    refuses(path, "format_version", "reads 2", part, "oscar-sglang calibrate --model DIR")


def test_unknown_codec(path):
    rewrite(path, codec="zip")
    refuses(path, "unknown codec 'zip'", ", ".join(CODECS))


@pytest.mark.parametrize("name", ["options", "provenance"])
def test_metadata_of_the_wrong_type(path, name):
    rewrite(path, **{name: [1]})
    refuses(path, f"{name} is [1]")


@pytest.mark.parametrize(
    "change, part",
    [
        ({"layers": "2"}, "fingerprint.layers is '2'"),
        ({"layers": True}, "fingerprint.layers is True"),
        ({"kv_heads": 0}, "fingerprint.kv_heads is 0"),
        ({"layers": 10**12}, "fingerprint.layers is 1000000000000"),
        ({"head_dim": 48}, "fingerprint.head_dim 48 has no 2-bit layout"),
        ({"rope": 1}, "fingerprint.rope is 1"),
        ({"extra": 1}, "exactly the fields"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_fingerprint(path, change, part):
    rewrite(path, fingerprint=dataclasses.asdict(FINGERPRINT) | change)
    refuses(path, part)


def test_sizes_that_do_not_match_the_fingerprint(path):
    rewrite(path, fingerprint=dataclasses.asdict(FINGERPRINT) | {"kv_heads": 4096})
    refuses(path, "its fingerprint implies")


def test_missing_tensor(path):
    rewrite(path, drop=["layers.1.r_v"], tensors={"layers.9.r_v": torch.zeros(4, 16, 16)})
    refuses(path, "tensor layers.1.r_v is missing")


def test_extra_tensor(path):
    rewrite(path, tensors={"extra": torch.zeros(0)})
    refuses(path, "unknown tensor 'extra'")


@pytest.mark.parametrize(
    "tensor, found",
    [
        (torch.zeros(4, 16, 16, dtype=torch.int32), "is 'I32'"),
        (torch.zeros(4, 256), "[4, 256], expected F32 [4, 16, 16]"),
    ],
    ids=["dtype", "shape"],
)
def test_wrong_dtype_or_shape(path, tensor, found):
    rewrite(path, tensors={"layers.0.r_k": tensor})
    refuses(path, "layers.0.r_k", found)


@pytest.mark.parametrize("name", ["r_k", "r_v", "factor"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(path, name, value):
    tensor = getattr(make().layers[1], name).clone()
    tensor[3, 0, 15] = value
    rewrite(path, tensors={f"layers.1.{name}": tensor})
    refuses(path, f"layers.1.{name}", "NaN or infinity")


def test_not_orthogonal(path):
    r = make().layers[0].r_v.clone()
    r[2] *= 1.001
    rewrite(path, tensors={"layers.0.r_v": r})
    refuses(path, "layers.0.r_v is not orthogonal", "expected <= 1e-04")


def test_factor_not_strictly_upper(path):
    rewrite(path, tensors={"layers.0.factor": torch.eye(16).expand(4, 16, 16).contiguous()})
    refuses(path, "layers.0.factor is not strictly upper triangular")


def test_metric_and_grid_are_checked(path):
    metric = make("accurate").layers[0].metric.clone()
    metric[0, 0, 1] += 1
    rewrite(path, {"layers.0.metric": metric}, made="accurate")
    refuses(path, "layers.0.metric is not symmetric")
    metric[0] = -torch.eye(16)
    rewrite(path, {"layers.0.metric": metric}, made="accurate")
    refuses(path, "layers.0.metric is not positive definite")
    for column, value in ((0, 65.0), (2, 0.0), (2, -1.0)):
        grid = make("compact").layers[1].grid.clone()
        grid[3, 1, column] = value
        rewrite(path, {"layers.1.grid": grid}, made="compact")
        refuses(path, "layers.1.grid is no grid of metadata bytes")


def test_tensors_of_another_codec_are_refused(path):
    """A header that names a codec whose tensors the file does not hold."""
    rewrite(path, codec="accurate")
    refuses(path, "tensor layers.0.metric is missing")
    rewrite(path, made="compact", codec="feedback")
    refuses(path, "its fingerprint implies")


def test_damaged_bytes_never_raise_anything_else(path):
    """Any byte of a valid file changed: an artifact or an ArtifactError."""
    make(fingerprint=dataclasses.replace(FINGERPRINT, layers=1, kv_heads=1)).save(path)
    data, rng = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    for i in range(600):
        damaged = bytearray(data)
        damaged[rng.randrange(header if i % 4 else len(data))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            art.load(path)
        except ArtifactError as error:
            assert "\n" not in str(error)


# ---- check, shard, data_free


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Fingerprint)])
def test_check_names_the_field_that_differs(field):
    old = getattr(FINGERPRINT, field)
    other = dataclasses.replace(FINGERPRINT, **{field: old + (1 if type(old) is int else "x")})
    with pytest.raises(ArtifactError, match=f"another model: {field} is .*, this model has"):
        art.check(make(), other)


def test_check_codec():
    art.check(make(), FINGERPRINT, "feedback")
    with pytest.raises(ArtifactError, match="holds codec 'feedback', asked for 'oscar'"):
        art.check(make(), FINGERPRINT, "oscar")


@pytest.mark.parametrize(
    "tp_size, heads",
    [
        (1, [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (4, [[0], [1], [2], [3]]),
        (8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
    ],
)
def test_shard(tp_size, heads):
    artifact = make()
    for rank in range(tp_size):
        for whole, part in zip(artifact.layers, art.shard(artifact, rank, tp_size), strict=True):
            for a, b in zip(whole, part, strict=True):
                assert b is None if a is None else torch.equal(b, a[heads[rank]])


@pytest.mark.parametrize("rank, size", [(0, 3), (2, 2), (-1, 2), (0, 6)])
def test_shard_refuses_uneven_splits(rank, size):
    with pytest.raises(ArtifactError, match="4 KV heads cannot be split"):
        art.shard(make(), rank, size)


@pytest.mark.parametrize("codec", CODECS)
def test_data_free(path, codec):
    artifact = art.data_free(FINGERPRINT, codec)
    artifact.save(path)
    loaded = art.load(path)
    warned = "uncalibrated" in loaded.provenance["data"]
    assert warned == bool(loaded.provenance["warnings"]) == CODECS[codec].needs_data
    first = loaded.layers[0]
    assert torch.allclose(first.r_k[:, :, 0], torch.full((4, 16), 0.25))
    present = {name for name, tensor in first._asdict().items() if tensor is not None}
    assert present == set(CODECS[codec].tensors(16))


@pytest.mark.parametrize("norm", ["head", "none"])
@pytest.mark.parametrize("rotation", ["hadamard", "none"])
def test_options_of_omni(path, norm, rotation):
    """The parts that its ablation leaves out are recorded, run so and change the id."""
    chosen = {"norm": norm, "rotation": rotation}
    artifact = art.data_free(FINGERPRINT, "omni", chosen)
    artifact.save(path)
    loaded = art.load(path)
    assert loaded.options == chosen and loaded.spec.meta.token_norm == (norm == "head")
    plain = torch.equal(loaded.layers[0].r_k[0], torch.eye(16))
    assert plain == (rotation == "none")
    other = art.data_free(FINGERPRINT, "omni", {**chosen, "norm": "none"})
    assert (other.id == artifact.id) == (norm == "none")
    assert {"omni_" + n: v for n, v in OPTIONS.items()} == OMNI_CHOICES
    rewrite(path, made="omni", options={"norm": "layer"})
    refuses(path, "option norm of codec omni is 'layer'", "head or none")


# ---- fingerprint


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 256,
    "rope_theta": 500000,
}


def fingerprint(folder: Path, **changes) -> Fingerprint:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return Fingerprint.of(folder)


def test_fingerprint_defaults(tmp_path):
    f = fingerprint(tmp_path)
    assert (f.layers, f.heads, f.kv_heads, f.head_dim) == (2, 4, 4, 64)
    assert (f.rope, f.weights) == ('{"rope_theta":500000.0}', "none")
    assert len(f.key) == 12


def test_fingerprint_explicit_fields_and_nesting(tmp_path):
    f = fingerprint(tmp_path, num_key_value_heads=2, head_dim=128)
    assert (f.kv_heads, f.head_dim) == (2, 128)
    text = LLAMA | {"num_key_value_heads": 2, "head_dim": 128}
    nested = {"architectures": ["LlamaForCausalLM"], "text_config": text}
    assert Fingerprint.of(tmp_path, nested) == f


@pytest.mark.parametrize(
    "old, new",
    [
        ({}, {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_theta": 500000, "rope_type": "linear", "factor": 2.0}},
        ),
    ],
    ids=["plain", "linear"],
)
def test_fingerprint_reads_both_spellings_of_rope(tmp_path, old, new):
    assert fingerprint(tmp_path, **old) == fingerprint(tmp_path, rope_theta=None, **new)


def test_fingerprint_tells_ropes_apart(tmp_path):
    scaled = {"rope_type": "llama3", "factor": 8.0}
    ropes = [
        fingerprint(tmp_path, **c)
        for c in ({}, {"rope_theta": 1e4}, {"rope_scaling": scaled}, {"partial_rotary_factor": 0.5})
    ]
    assert len({f.key for f in ropes}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"num_experts_per_tok": 4},
        {"rope_interleave": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 9},
    ],
    ids=str,
)
def test_fingerprint_counts_what_changes_activations(tmp_path, change):
    assert fingerprint(tmp_path, **change).key != fingerprint(tmp_path).key


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_version": "9", "eos_token_id": [7], "use_cache": False},
        {"max_position_embeddings": 10**6},
        {"torch_dtype": "float16", "dtype": "float16"},
        {"hidden_act": None, "partial_rotary_factor": 1},
    ],
    ids=str,
)
def test_fingerprint_counts_nothing_else(tmp_path, change):
    assert fingerprint(tmp_path, **change) == fingerprint(tmp_path)


def test_yarn_stretches_the_trained_context(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    a, b = (fingerprint(tmp_path, rope_scaling=yarn, max_position_embeddings=n) for n in (512, 999))
    assert a != b
    said = {**yarn, "original_max_position_embeddings": 512}
    assert fingerprint(tmp_path, rope_scaling=said, max_position_embeddings=2048) == a


def test_fingerprint_of_transformers_own_config(tmp_path):
    """The dictionary that a loaded config gives is the same model as its file."""
    from transformers import AutoConfig

    from scripts.lib.tiny_models import llama

    folder = llama(tmp_path)
    config = AutoConfig.from_pretrained(folder).to_dict()
    assert Fingerprint.of(folder, config) == Fingerprint.of(folder)


def test_fingerprint_errors(tmp_path):
    with pytest.raises(FingerprintError, match="config.json: not found"):
        Fingerprint.of(tmp_path / "nowhere")
    with pytest.raises(FingerprintError, match="num_hidden_layers is None, expected a positive"):
        fingerprint(tmp_path, num_hidden_layers=None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FingerprintError, match="cannot be read as JSON"):
        Fingerprint.of(tmp_path)
