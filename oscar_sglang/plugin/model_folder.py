"""A model as a local folder, by path or by hub name: what SGLang itself fetches, with SGLang's own
overrides."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..artifact.fingerprint import canonical_rope, read_config, text_config
from ..artifact.weights import index_name, patterns, weight_files
from ..config import OscarError

OVERRIDES_FLAG = "--json-model-override-args"
_WANTED = "give a folder in Hugging Face format, or a name on the hub such as Qwen/Qwen3-8B"
_ROPES = ("rope_scaling", "rope_parameters")
# What calibration needs beside the weights; the index of the weights is among them.
_SMALL_FILES = ("*.json", "*.py", "*.txt", "*.model", "*.jinja")


@contextmanager
def model_folder(view: Any, model: Any) -> Iterator[Path]:
    """The folder while the context lasts. ``view``: SGLang's resolved arguments, ``model``: the
    ModelConfig that SGLang makes of them. Raises OscarError where there cannot be one, or where
    calibration would read other weights or another RoPE than SGLang serves."""
    path = Path(view.model_path)
    if path.is_file():
        raise OscarError(
            f"{path} is a file; --kv-cache-dtype int2 needs a folder in Hugging Face format "
            "(config.json and safetensors)"
        )
    folders = [path] if path.is_dir() else fetch(view)
    overrides = parse_overrides(view.json_model_override_args)
    with overridden_folder(folders, overrides, path.name) as folder:
        if overrides:
            _check_rope(folder, overrides, model.hf_text_config)
        _check_files(folder, str(view.load_format))
        yield folder


@dataclass(frozen=True)
class NamedModel:
    """A model outside a server, as SGLang's flags of the same names give it."""

    name: str
    revision: str | None = None
    download_dir: str | None = None
    overrides: str | None = None

    @property
    def on_a_hub(self) -> bool:
        """Whether it has to be fetched. Raises OscarError for what can be no name on a hub."""
        path = Path(self.name).expanduser()
        if path.is_dir():
            return False
        a_path = self.name.startswith((".", "/", "~")) or self.name.count("/") > 1
        if path.exists() or (a_path and "://" not in self.name):
            found = "is a file" if path.exists() else "no such folder"
            raise OscarError(f"{self.name}: {found}; {_WANTED}")
        return True

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """The folder while the context lasts. Raises OscarError if there is none."""
        folders, name = [Path(self.name).expanduser()], ""
        if self.on_a_hub:
            name = self.name.rpartition("/")[2]
            folders = fetch(
                SimpleNamespace(
                    model_path=self.name,
                    revision=self.revision,
                    download_dir=self.download_dir,
                    load_format="auto",
                )
            )
        elif self.revision or self.download_dir:
            raise OscarError(
                f"{self.name} is a folder; drop --revision and --download-dir, which belong to a "
                "hub's model"
            )
        with overridden_folder(folders, parse_overrides(self.overrides), name) as folder:
            yield folder


def fetch(view: Any) -> list[Path]:
    """Snapshots of a hub's model: weights in one format, where SGLang looks for them
    (``--download-dir``), and small files, which SGLang takes from the default cache."""
    from huggingface_hub import constants, snapshot_download

    name, revision = view.model_path, view.revision
    try:
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.weight_utils import (
            download_safetensors_index_file_from_hf,
            download_weights_from_hf,
        )
    except ImportError as error:
        raise OscarError(
            f"{name}: no folder, and a hub's model is fetched by SGLang, which cannot be imported "
            f"({error}); give a folder, or install SGLang"
        ) from error
    if "://" in name:
        raise OscarError(
            f"{name}: --kv-cache-dtype int2 cannot read weights at a URL to tell which calibration "
            "they need; copy the model to a folder and give that"
        )
    offline = constants.HF_HUB_OFFLINE
    try:
        small = snapshot_download(
            name, revision=revision, allow_patterns=list(_SMALL_FILES), local_files_only=offline
        )
        if view.load_format == "dummy":
            return [Path(small)]
        where, kind = view.download_dir, str(view.load_format)
        ignored = LoadConfig(load_format=kind, download_dir=where).ignore_patterns
        weights = download_weights_from_hf(
            name, where, patterns(kind), revision, ignore_patterns=ignored
        )
        if any(Path(weights).glob("*.safetensors")):
            download_safetensors_index_file_from_hf(name, index_name(kind), where, revision)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        how = "$HF_HUB_OFFLINE is set" if offline else "check the name and the network"
        raise OscarError(
            f"{name}: no folder, and it cannot be fetched from the hub ({how}): {reason}"
        ) from error
    return [Path(p) for p in dict.fromkeys((weights, small))]


def parse_overrides(text: str | None) -> dict[str, Any]:
    try:
        overrides = json.loads(text or "{}")
    except ValueError as error:
        raise OscarError(f"{OVERRIDES_FLAG} {text!r} is not JSON ({error})") from None
    if not isinstance(overrides, dict):
        raise OscarError(f"{OVERRIDES_FLAG} {text!r} is not a JSON object")
    return overrides


@contextmanager
def overridden_folder(
    folders: Sequence[Path], overrides: Mapping[str, Any], name: str = ""
) -> Iterator[Path]:
    """One folder with the files of all ``folders``, the first before the others, and ``overrides``
    in its config.json: links in a temporary folder, or the only folder itself. Its name is ``name``
    (a hub's snapshots are called after their commit), else the first folder's."""
    if len(folders) == 1 and not overrides and name in ("", folders[0].name):
        yield folders[0]
        return
    with tempfile.TemporaryDirectory(prefix="oscar_sglang_model_") as folder_made:
        made = Path(folder_made) / (name or folders[0].resolve().name)
        made.mkdir()
        for file in (f for folder in reversed(folders) for f in folder.iterdir()):
            (made / file.name).unlink(missing_ok=True)
            (made / file.name).symlink_to(file.resolve())
        if overrides:
            config = with_overrides(read_config(made), overrides)
            (made / "config.json").unlink()
            (made / "config.json").write_text(json.dumps(config))
        yield made


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as SGLang's ``get_config`` overrides it: RoPE is merged, the values of a nested
    config replace one by one, anything else as a whole."""
    made = dict(config)
    for key, value in overrides.items():
        if key in _ROPES and isinstance(value, dict):
            spelling = "rope_parameters" if made.get("rope_parameters") else "rope_scaling"
            rope = {**(made.get(spelling) or {}), **value}
            made[spelling] = rope
            if "rope_theta" in value and "rope_theta" in made:
                made["rope_theta"] = value["rope_theta"]
        elif isinstance(value, dict) and isinstance(made.get(key), dict):
            made[key] = {**made[key], **value}
        else:
            made[key] = value
    return made


def _check_rope(folder: Path, overrides: Mapping[str, Any], text: Any) -> None:
    """SGLang takes overrides that its models never read, e.g. a bare ``rope_theta``."""
    served = json.loads(canonical_rope(text.to_dict()))
    asked = json.loads(canonical_rope(text_config(read_config(folder))))
    asked |= {k: v for k, v in overrides.items() if k in asked}
    if wrong := {k: v for k, v in asked.items() if served.get(k) != v}:
        raise OscarError(
            f"{OVERRIDES_FLAG} asks for {wrong} in RoPE, but SGLang would serve "
            f"{ {k: served.get(k) for k in wrong} }; write it as "
            f'{{"rope_parameters": {json.dumps(wrong)}}}'
        )


def _check_files(folder: Path, load_format: str) -> None:
    files, usual = weight_files(folder, load_format), weight_files(folder)
    if files != usual and load_format != "dummy":
        raise OscarError(
            f"--load-format {load_format} would serve {', '.join(f.name for f in files) or 'none'}"
            f" of the weight files, and int2 is calibrated on {', '.join(f.name for f in usual)}; "
            "drop --load-format, or move the others away"
        )
