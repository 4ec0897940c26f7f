"""OSCAR's published rotation files ("RotationZoo") in and out.

A ``.pt`` file holds {format_version, layers: {id: {rotation, ...}}, ...}; ``rotation`` is float
[d, d] in version 1, shared by the layer's heads, and [heads, d, d] in version 2. Files are
pickles: they are read with ``weights_only``, which runs no code of theirs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from ..artifact.file import Artifact, ArtifactError, Fingerprint
from ..artifact.file import validate as validate_artifact
from ..kernels.codec import LayerParams

VERSIONS = (1, 2)
_OBJECTIVES = {"k": "qqt", "v": "sst"}


def import_zoo(k_file: Path, v_file: Path, model_dir: Path) -> Artifact:
    """An ``oscar`` artifact of the rotations of K and V. Raises ArtifactError for what does not
    fit the model: layers, head_dim, heads, orthogonality."""
    fingerprint = Fingerprint.of(model_dir)
    k = read_rotations(k_file, fingerprint)
    v = read_rotations(v_file, fingerprint)
    layers = [LayerParams(a, b, None) for a, b in zip(k, v, strict=True)]
    hashes = {f: hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in (k_file, v_file)}
    artifact = Artifact(
        fingerprint=fingerprint,
        codec="oscar",
        options={"imported": True},
        layers=layers,
        provenance={
            "model": model_dir.resolve().name,
            "data": f"imported from {k_file.name} and {v_file.name}",
            "data_hash": " ".join(hashes.values()),
            "warnings": _warnings(k),
        },
    )
    validate_artifact(artifact, f"{k_file}, {v_file}")
    return artifact


def read_rotations(path: Path, fingerprint: Fingerprint) -> list[torch.Tensor]:
    """Rotations of every layer, [Hk, d, d] float32 each."""
    content = _load(path)
    version = content.get("format_version")
    if version not in VERSIONS or isinstance(version, bool):
        raise ArtifactError(f"{path}: format_version is {version!r}, expected 1 or 2")
    layers = content.get("layers")
    if not isinstance(layers, dict):
        raise ArtifactError(f"{path}: 'layers' is {type(layers).__name__}, expected a dict")
    by_id = {}
    for key, entry in layers.items():
        if not (isinstance(key, (int, str)) and str(key).isdigit()):
            raise ArtifactError(f"{path}: layer id {key!r} is not a number")
        by_id[int(key)] = entry
    if sorted(by_id) != list(range(fingerprint.layers)) or len(by_id) != len(layers):
        raise ArtifactError(
            f"{path}: holds layers {_span(sorted(by_id))}, the model has {fingerprint.layers}"
        )
    return [_rotation(path, i, by_id[i], version, fingerprint) for i in range(len(by_id))]


def export_zoo(artifact: Artifact, k_file: Path, v_file: Path) -> None:
    """Write version 2 files, one rotation per layer and KV head."""
    for side, path in (("k", k_file), ("v", v_file)):
        layers = {
            i: {"layer_id": i, "rotation": getattr(params, f"r_{side}").clone()}
            for i, params in enumerate(artifact.layers)
        }
        content = {
            "format_version": 2,
            "objective": _OBJECTIVES[side],
            "source_grouping": "kv_head",
            "layers": layers,
        }
        torch.save(content, path)


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch each raise their own
        raise ArtifactError(
            f"{path}: refused: not a file of plain tensors, or damaged "
            f"({type(error).__name__}); nothing in it was run"
        ) from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: holds a {type(content).__name__}, expected a dict")
    return content


def _rotation(path: Path, layer: int, entry: Any, version: int, f: Fingerprint) -> torch.Tensor:
    where = f"{path}: layer {layer}"
    r = entry.get("rotation") if isinstance(entry, dict) else None
    if not isinstance(r, torch.Tensor) or not r.is_floating_point():
        raise ArtifactError(f"{where} has no 'rotation' of floating-point numbers")
    shape = [f.head_dim, f.head_dim] if version == 1 else [f.kv_heads, f.head_dim, f.head_dim]
    if list(r.shape) != shape:
        raise ArtifactError(
            f"{where}: rotation is {list(r.shape)}, this model needs {shape} in version {version}"
        )
    return r.float().expand(f.kv_heads, -1, -1).contiguous()


def _warnings(k: list[torch.Tensor]) -> list[str]:
    shared = all(torch.equal(r[0], head) for r in k for head in r[1:])
    if shared and k[0].shape[0] > 1:
        return ["one rotation for all KV heads of a layer: calibrating gives each head its own"]
    return []


def _span(ids: list[int]) -> str:
    return f"{ids[0]}..{ids[-1]} ({len(ids)})" if ids else "none"
