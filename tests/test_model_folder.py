"""``--json-model-override-args``: calibration runs, and is looked up for, the model as served."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from oscar_sglang.artifact import file as art
from oscar_sglang.artifact.fingerprint import canonical_rope, read_config
from oscar_sglang.cli import main
from oscar_sglang.config import OscarError
from oscar_sglang.plugin.model_folder import model_folder, overridden_folder, parse_overrides
from scripts.lib.tiny_models import edit_config, llama

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture(scope="module", params=["rope_parameters", "rope_theta"])
def model(request, tmp_path_factory) -> Path:
    """A model with RoPE spelt as by transformers 5 or 4."""
    folder = llama(tmp_path_factory.mktemp(request.param))
    if request.param == "rope_theta":
        edit_config(folder, rope_parameters=None, rope_theta=10000.0)
    return folder


def served(model: Path, overrides: dict):
    """What ``model_folder`` makes of SGLang's arguments, and SGLang's own config."""
    from sglang.srt.configs.model_config import ModelConfig

    text = json.dumps(overrides)
    config = ModelConfig(str(model), model_override_args=text)
    view = SimpleNamespace(model_path=str(model), load_format="auto", json_model_override_args=text)
    return model_folder(view, config), config.hf_text_config


def run(*argv) -> int:
    return main([str(a) for a in argv])


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": YARN},
        {"rope_parameters": YARN},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_scaling": {"rope_theta": 1e6, **YARN}},
        {"rms_norm_eps": 1e-3},
        {"num_hidden_layers": 1},
    ],
    ids=str,
)
def test_the_folder_is_the_model_as_served(model, overrides):
    """RoPE as SGLang resolves it; the files themselves are links."""
    plain = art.Fingerprint.of(model)
    folder, text = served(model, overrides)
    with folder as found:
        made = art.Fingerprint.of(found)
        assert made.key != plain.key and made.weights == plain.weights
        ours, theirs = (json.loads(canonical_rope(c)) for c in (read_config(found), text.to_dict()))
        assert {k: theirs.get(k) for k in ours} == ours
        assert (found / "model.safetensors").samefile(model / "model.safetensors")
    assert not found.exists() and art.Fingerprint.of(model) == plain


def test_without_overrides_it_is_the_folder_itself(model):
    folder, _ = served(model, {})
    with folder as found:
        assert found == model


def test_an_override_that_sglang_never_reads_is_refused(model):
    """SGLang sets ``rope_theta`` beside the rope_parameters that its models read."""
    folder, _ = served(model, {"rope_theta": 7e5})
    with pytest.raises(OscarError, match="rope_theta.*700000.*rope_parameters"):
        with folder:
            pass


@pytest.mark.parametrize("text, words", [("{", "is not JSON"), ("[1]", "is not a JSON object")])
def test_overrides_that_are_no_object(text, words):
    with pytest.raises(OscarError, match=words):
        parse_overrides(text)


def test_a_nested_config_is_changed_value_by_value(tmp_path):
    config = {"architectures": ["X"], "text_config": {"a": 1, "b": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with overridden_folder([tmp_path], {"text_config": {"b": 3}}) as found:
        assert read_config(found) == {**config, "text_config": {"a": 1, "b": 3}}


def test_calibrate_and_verify_take_the_servers_flag(model, tmp_path, capsys):
    out, flag = tmp_path / "a.safetensors", "--json-model-override-args"
    asked = json.dumps({"rope_scaling": YARN})
    command = ("--model", model, "--tokens", "600")
    assert run("calibrate", *command, "--out", out, "--codec", "aligned", flag, asked) == 0
    made = art.load(out)
    with served(model, {"rope_scaling": YARN})[0] as folder:
        assert made.fingerprint == art.Fingerprint.of(folder) != art.Fingerprint.of(model)
    assert made.provenance["model"] == model.name
    plain = tmp_path / "plain.safetensors"
    assert run("calibrate", *command, "--out", plain, "--codec", "aligned") == 0
    layers = zip(made.layers, art.load(plain).layers, strict=True)
    moved = [(a.r_k - b.r_k).abs().max() for a, b in layers]
    assert max(moved) > 1e-3, "the model ran with its own RoPE"
    assert run("verify", out, *command, flag, asked) in (0, 1)
    capsys.readouterr()
    assert run("verify", out, *command) == 2
    assert "rope is" in capsys.readouterr().err
