"""A model by its hub name: int2 fetches what SGLang would, where SGLang would, and no more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from huggingface_hub import HfFileSystem, constants
from safetensors.torch import load_file, save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader import loader

from oscar_sglang.artifact import file as art
from oscar_sglang.artifact.weights import weight_files
from oscar_sglang.cli import main
from oscar_sglang.config import OscarError
from oscar_sglang.health import doctor
from oscar_sglang.launch_server import cpu_environment
from oscar_sglang.plugin.model_folder import NamedModel, model_folder
from scripts.lib.tiny_models import edit_config, llama
from tests.support.fake_hub import NAME, Hub

pytestmark = pytest.mark.sglang

SERVE = """
import sys
from oscar_sglang.config import fold_options
from oscar_sglang.plugin.seam import config_of
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

load_plugins()
args = ServerArgs(**fold_options(dict(
    model_path=sys.argv[1], download_dir=sys.argv[2], device="cpu", dtype="float32",
    kv_cache_dtype="int2", oscar_codec="aligned", skip_tokenizer_init=True,
)))
args.resolve_once()
print("FOUND", config_of(args).artifact)
"""


@pytest.fixture(scope="module")
def revisions(tmp_path_factory) -> dict[str, Path]:
    """Two revisions with other weights, each in two formats, and what nobody needs."""
    made = {}
    for seed, name in enumerate(("main", "v2")):
        folder = tmp_path_factory.mktemp(name)
        llama(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] += seed
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        torch.save(tensors, folder / "pytorch_model.bin")
        for extra in ("consolidated.00.pth", "model.onnx", "picture.png", "training_args.bin"):
            (folder / extra).write_bytes(b"never fetched")
        made[name] = folder
    return made


@pytest.fixture
def hub(revisions, tmp_path, monkeypatch):
    """The only hub that this process, too, knows of; its cache is ``tmp_path / "hub"``."""
    hub = Hub(**revisions)
    with hub.serve() as hub.url:
        for name, value in (
            ("ENDPOINT", hub.url),
            ("HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HUB_CACHE", str(tmp_path / "hub")),
        ):
            monkeypatch.setattr(constants, name, value)
        set_offline(monkeypatch, False)
        HfFileSystem.clear_instance_cache()
        yield hub
    HfFileSystem.clear_instance_cache()


def set_offline(monkeypatch, offline: bool) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


def arguments(**given) -> SimpleNamespace:
    """As far as ``model_folder`` reads SGLang's."""
    args = dict(model_path=NAME, revision=None, download_dir=None, load_format="auto")
    return SimpleNamespace(**args | {"json_model_override_args": "{}"} | given)


def locate(**given) -> tuple[str, list[str]]:
    """Key of the model's fingerprint and its weight files, which must be those that SGLang's loader
    picks afterwards with the same options."""
    args = arguments(**given)
    with model_folder(args, None) as folder:
        assert (folder / "config.json").is_file()
        key = art.Fingerprint.of(folder).key
        files = sorted(str(f.resolve()) for f in weight_files(folder))
    if args.load_format != "dummy":
        config = LoadConfig(load_format=args.load_format, download_dir=args.download_dir)
        with mock.patch.object(loader, "get_server_args", lambda: None, create=True):
            _, theirs, _ = loader.DefaultModelLoader(config)._prepare_weights(
                args.model_path, args.revision, fall_back_to_pt=True
            )
        assert files == sorted(map(os.path.realpath, theirs))
    return key, files


def test_one_format_in_sglangs_cache_and_offline_afterwards(hub, revisions, monkeypatch):
    found = locate()
    assert found[0] == art.Fingerprint.of(revisions["main"]).key and len(found[1]) == 1
    wanted = {"config.json", "generation_config.json", "model.safetensors"}
    assert set(hub.fetched) <= {("main", name) for name in wanted}
    assert hub.fetched.count(("main", "model.safetensors")) == 1, "fetched twice"
    hub.fetched.clear()
    set_offline(monkeypatch, True)
    assert locate() == found and not hub.fetched


def test_download_dir_and_revision(hub, revisions, tmp_path):
    other = tmp_path / "weights"
    key, files = locate(download_dir=str(other), revision="v2")
    assert key == art.Fingerprint.of(revisions["v2"]).key
    assert all(Path(f).is_relative_to(other) for f in files)
    assert {revision for revision, _ in hub.fetched} == {"v2"}
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_a_load_format_that_reads_other_weights(hub):
    """Pickled weights where the hub has both: that format alone is fetched."""
    _, files = locate(load_format="npcache")
    assert len(files) == 1 and ("main", "pytorch_model.bin") in hub.fetched
    assert ("main", "model.safetensors") not in hub.fetched


def test_dummy_weights_fetch_none(hub):
    assert locate(load_format="dummy")[1] == []
    assert {name for _, name in hub.fetched} <= {"config.json", "generation_config.json"}


def test_calibrates_a_hub_model(hub, revisions, tmp_path):
    """All the way through SGLang's own arguments, in a process that reads its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= cpu_environment(environment)
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"OSCAR_SGLANG_CACHE": str(tmp_path / "artifacts")}
    command = [sys.executable, "-c", SERVE, NAME, tmp_path / "weights"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "FOUND " in done.stdout, done.stderr[-3000:]
    made = art.load(done.stdout.split("FOUND ")[1].splitlines()[0])
    assert made.fingerprint == art.Fingerprint.of(revisions["main"])
    assert made.provenance["model"] == NAME.split("/")[1]


def test_commands_take_a_hub_name(hub, revisions, tmp_path, monkeypatch, capsys):
    """Calibrated under its name, verified offline afterwards; another revision is another model."""
    out = tmp_path / "a.safetensors"
    model = ["--model", NAME, "--tokens", "600"]
    assert main(["calibrate", *model, "--codec", "aligned", "--out", str(out)]) == 0
    made = art.load(out)
    assert made.fingerprint == art.Fingerprint.of(revisions["main"])
    assert made.provenance["model"] == NAME.split("/")[1]
    set_offline(monkeypatch, True)
    hub.fetched.clear()
    assert main(["verify", str(out), *model]) in (0, 1) and not hub.fetched
    assert main(["verify", str(out), *model, "--revision", "v2"]) == 2
    assert "cannot be fetched from the hub ($HF_HUB_OFFLINE is set)" in capsys.readouterr().err
    set_offline(monkeypatch, False)
    assert main(["verify", str(out), *model, "--revision", "v2"]) == 2
    assert "weights" in capsys.readouterr().err


def test_doctor_takes_a_hub_name_and_fetches_nothing_that_is_refused(hub, revisions, tmp_path):
    folder = tmp_path / "odd"
    shutil.copytree(revisions["main"], folder)
    edit_config(folder, is_causal=False)
    hub.revisions["odd"] = folder
    (fits,) = [c for c in doctor.examine(NamedModel(NAME)) if c.name == "artifact"]
    assert fits.status == doctor.NOTE and "first start calibrates" in fits.detail
    hub.fetched.clear()
    found = {c.name: c for c in doctor.examine(NamedModel(NAME, "odd"))}
    assert found["model LlamaForCausalLM"].status == doctor.FAIL and "artifact" not in found
    assert {name for _, name in hub.fetched} <= {"config.json", "generation_config.json"}


def test_without_sglang_a_hub_name_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.configs.load_config", None)
    with pytest.raises(OscarError, match=f"{NAME}.*fetched by SGLang.*give a folder"):
        with NamedModel(NAME).folder():
            pass


@pytest.mark.parametrize(
    "name, words", [("tests/absent", "cannot be fetched"), ("s3://x/y", "copy the model")]
)
def test_a_model_that_cannot_be_fetched_is_named(hub, name, words):
    with pytest.raises(OscarError, match=f"{name}.*{words}"):
        locate(model_path=name)


def test_formats_and_files_that_calibration_would_not_read(tmp_path):
    """A folder with two formats, and ``--load-format pt``: another model than the safetensors."""
    folder = llama(tmp_path / "m")
    shutil.copy(folder / "model.safetensors", folder / "model.pt")
    with model_folder(arguments(model_path=str(folder)), None) as found:
        assert found == folder
    with pytest.raises(OscarError, match="would serve model.pt.*calibrated on model.safetensors"):
        with model_folder(arguments(model_path=str(folder), load_format="pt"), None):
            pass
    with pytest.raises(OscarError, match="is a file.*needs a folder"):
        with model_folder(arguments(model_path=str(folder / "model.pt")), None):
            pass
