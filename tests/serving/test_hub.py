"""A model by its hub name: int2 fetches what SGLang itself would, where SGLang would, and no more.

Each case is a process of its own: huggingface_hub reads its environment once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import NAME, Hub
from safetensors.torch import load_file, save_file
from tiny_models import llama

from oscar_sglang import artifact as art
from oscar_sglang.launch_server import cpu_environment

pytestmark = pytest.mark.sglang

# What SGLang's loader picks afterwards, given the same options, is printed beside.
LOCATE = """
import json, sys
from types import SimpleNamespace
from unittest import mock
from oscar_sglang.fingerprint import Fingerprint
from oscar_sglang.model_folder import model_folder
from oscar_sglang.weights import weight_files
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader import loader

given = json.loads(sys.argv[1])
args = dict(revision=None, download_dir=None, load_format="auto", json_model_override_args="{}")
args = SimpleNamespace(**args | given)
with model_folder(args) as folder:
    found = dict(key=Fingerprint.of(folder).key, config=(folder / "config.json").is_file())
    found["files"] = sorted(str(f.resolve()) for f in weight_files(folder))
if args.load_format != "dummy":
    config = LoadConfig(load_format=args.load_format, download_dir=args.download_dir)
    with mock.patch.object(loader, "get_server_args", lambda: None, create=True):
        _, files, _ = loader.DefaultModelLoader(config)._prepare_weights(
            args.model_path, args.revision, fall_back_to_pt=True
        )
    import os
    found["theirs"] = sorted(map(os.path.realpath, files))
print("FOUND", json.dumps(found))
"""
SERVE = """
import sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

load_plugins()
args = ServerArgs(
    model_path=sys.argv[1], download_dir=sys.argv[2], device="cpu", dtype="float32",
    kv_cache_dtype="int2", oscar_codec="aligned", skip_tokenizer_init=True,
)
print("FOUND", args.oscar_config.artifact)
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
def hub(revisions):
    hub = Hub(**revisions)
    with hub.serve() as url:
        hub.url = url
        yield hub


def process(hub: Hub, home: Path, code: str, *args: str, **env: str):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= cpu_environment(environment)
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"OSCAR_SGLANG_CACHE": str(home / "artifacts")}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=environment | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def locate(hub: Hub, home: Path, env: dict[str, str] | None = None, **args) -> dict:
    done = process(hub, home, LOCATE, json.dumps({"model_path": NAME} | args), **(env or {}))
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND "))


def test_one_format_in_sglangs_cache_and_offline_afterwards(hub, revisions, tmp_path):
    found = locate(hub, tmp_path)
    assert found["key"] == art.Fingerprint.of(revisions["main"]).key
    assert found["files"] == found["theirs"] and len(found["files"]) == 1 and found["config"]
    wanted = {"config.json", "generation_config.json", "model.safetensors"}
    assert {("main", name) for name in wanted} >= set(hub.fetched)
    assert hub.fetched.count(("main", "model.safetensors")) == 1, "fetched twice"
    hub.fetched.clear()
    again = locate(hub, tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert again == found and not hub.fetched


def test_download_dir_and_revision(hub, revisions, tmp_path):
    other = tmp_path / "weights"
    found = locate(hub, tmp_path / "home", download_dir=str(other), revision="v2")
    assert found["key"] == art.Fingerprint.of(revisions["v2"]).key
    assert found["files"] == found["theirs"] and found["config"]
    assert all(Path(f).is_relative_to(other) for f in found["files"])
    assert {revision for revision, _ in hub.fetched} == {"v2"}
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_a_load_format_that_reads_other_weights(hub, revisions, tmp_path):
    """Pickled weights where the hub has both: the format alone is fetched, and it is calibrated."""
    found = locate(hub, tmp_path, load_format="npcache")
    assert found["files"] == found["theirs"] and found["files"][0] != ""
    assert ("main", "pytorch_model.bin") in hub.fetched
    assert ("main", "model.safetensors") not in hub.fetched


def test_dummy_weights_fetch_none(hub, tmp_path):
    assert locate(hub, tmp_path, load_format="dummy")["files"] == []
    assert {name for _, name in hub.fetched} <= {"config.json", "generation_config.json"}


def test_calibrates_a_hub_model(hub, revisions, tmp_path):
    """All the way through SGLang's own arguments."""
    done = process(hub, tmp_path, SERVE, NAME, str(tmp_path / "weights"))
    assert "FOUND " in done.stdout, done.stderr[-3000:]
    made = art.load(done.stdout.split("FOUND ")[1].splitlines()[0])
    assert made.fingerprint == art.Fingerprint.of(revisions["main"])
    assert made.provenance["model"] == NAME.split("/")[1]


@pytest.mark.parametrize("name, words", [("tests/absent", "absent"), ("s3://x/y", "copy the")])
def test_a_model_that_cannot_be_fetched_is_named(hub, tmp_path, name, words):
    done = process(hub, tmp_path, LOCATE, json.dumps({"model_path": name}))
    message = done.stderr.strip().splitlines()[-1]
    assert "OscarError" in message and name in message and words in message


def test_local_files_and_formats_that_calibration_would_not_read(tmp_path):
    """A folder with two formats, and ``--load-format pt``: another model than the safetensors."""
    from types import SimpleNamespace

    from oscar_sglang.config import OscarError
    from oscar_sglang.model_folder import model_folder

    folder = llama(tmp_path / "m")
    args = dict(model_path=str(folder), json_model_override_args="{}", load_format="auto")
    shutil.copy(folder / "model.safetensors", folder / "model.pt")
    with model_folder(SimpleNamespace(**args)) as found:
        assert found == folder
    with pytest.raises(OscarError, match="would serve model.pt.*calibrated on model.safetensors"):
        with model_folder(SimpleNamespace(**args | {"load_format": "pt"})):
            pass
    args["model_path"] = str(folder / "model.pt")
    with pytest.raises(OscarError, match="is a file.*needs a folder"):
        with model_folder(SimpleNamespace(**args)):
            pass
