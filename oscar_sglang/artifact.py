"""The calibrated file: rotations and feedback factors per layer and KV head, with provenance.

A safetensors file ``layers.{i}.{r_k,r_v,factor}`` of float32 ``[Hk, D, D]`` whose metadata entry
``oscar_sglang`` is JSON: format_version, fingerprint, codec, options, provenance. Nothing in it is
executable and everything in it is checked: ``load`` raises ``ArtifactError`` or returns an
artifact that every kernel can use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from .artifact_header import FORMAT_VERSION, METADATA_KEY, ArtifactError, Header, read_header
from .calibration.hadamard import hadamard
from .fingerprint import Fingerprint, FingerprintError
from .kernels.codec import CODECS, CodecSpec, LayerParams

__all__ = [
    "FORMAT_VERSION",
    "Artifact",
    "ArtifactError",
    "Fingerprint",
    "FingerprintError",
    "check",
    "data_free",
    "load",
    "shard",
    "validate",
]

ORTHOGONALITY = 1e-4  # |R^T R - I|: float32 rounding of an orthogonal matrix stays below 1e-6


@dataclass
class Artifact:
    """A codec fitted to one model.

    layers      one LayerParams per attention layer, float32 CPU [Hk, D, D] of the whole model
    options     what the codec was fitted with, e.g. {"damping": 0.05}; JSON values
    provenance  tool, data, date, seconds, warnings, per-layer report; JSON values, never used
                in computation
    """

    fingerprint: Fingerprint
    codec: str
    options: dict[str, Any]
    layers: list[LayerParams]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> CodecSpec:
        return CODECS[self.codec]

    @property
    def id(self) -> str:
        """12 hex digits over everything that changes a code; provenance does not."""
        head = [dataclasses.asdict(self.fingerprint), self.codec, self.options]
        digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors().items()):
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:12]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the file by name."""
        return {
            f"layers.{i}.{name}": tensor.contiguous()
            for i, params in enumerate(self.layers)
            for name, tensor in params._asdict().items()
            if tensor is not None
        }

    def save(self, path: Path | str) -> None:
        """Write atomically: readers see the old file or the whole new one. Validates first."""
        path = Path(path)
        validate(self, path)
        head = {
            "format_version": FORMAT_VERSION,
            "fingerprint": dataclasses.asdict(self.fingerprint),
            "codec": self.codec,
            "options": self.options,
            "provenance": self.provenance,
        }
        data = safetensors.torch.save(self.tensors(), metadata={METADATA_KEY: json.dumps(head)})
        try:
            _write_atomically(path, data)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be written ({error.strerror or error})") from error


def load(path: Path | str) -> Artifact:
    """Read and validate an artifact. Raises ArtifactError for anything that is wrong with it."""
    path = Path(path)
    header = read_header(path)
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error})") from None
    layers = [
        LayerParams(*(tensors.get(f"layers.{i}.{name}") for name in LayerParams._fields))
        for i in range(header.fingerprint.layers)
    ]
    _check_layers(path, header.codec, header.fingerprint, layers)
    return _artifact(header, layers)


def validate(artifact: Artifact, where: Path | str) -> None:
    """Refuse tensors that no kernel can use; ``where`` begins the message."""
    _check_layers(where, artifact.codec, artifact.fingerprint, artifact.layers)


def check(artifact: Artifact, fingerprint: Fingerprint, codec: str | None = None) -> None:
    """Refuse an artifact made for another model or codec."""
    for name, expected in dataclasses.asdict(fingerprint).items():
        found = getattr(artifact.fingerprint, name)
        if found != expected:
            raise ArtifactError(
                f"the artifact was calibrated for another model: {name} is {found!r}, this model "
                f"has {expected!r}; calibrate it: oscar-sglang calibrate --model DIR --out FILE"
            )
    if codec is not None and artifact.codec != codec:
        raise ArtifactError(
            f"the artifact holds codec {artifact.codec!r}, asked for {codec!r}; calibrate with: "
            f"oscar-sglang calibrate --codec {codec} --model DIR --out FILE"
        )


def shard(artifact: Artifact, tp_rank: int, tp_size: int) -> list[LayerParams]:
    """Layers with the KV heads of one tensor-parallel rank, split as SGLang's QKVParallelLinear:
    contiguous heads, and each head on ``tp_size // Hk`` consecutive ranks if ranks outnumber heads.
    """
    total = artifact.fingerprint.kv_heads
    large, small = max(total, tp_size), min(total, tp_size)
    if not 0 <= tp_rank < tp_size or large % small:
        raise ArtifactError(
            f"{total} KV heads cannot be split over rank {tp_rank} of {tp_size}: one number must "
            "divide the other"
        )
    first = tp_rank * total // tp_size
    heads = slice(first, first + max(1, total // tp_size))
    return [
        LayerParams(*(None if t is None else t[heads].clone() for t in params))
        for params in artifact.layers
    ]


def data_free(fingerprint: Fingerprint, codec: str = "feedback") -> Artifact:
    """Plain Hadamard rotations and no feedback: for benchmarks with dummy weights."""
    d, heads = fingerprint.head_dim, fingerprint.kv_heads
    h = hadamard(d).float().expand(heads, d, d).contiguous()
    factor = torch.zeros(heads, d, d) if CODECS[codec].k_feedback else None
    report = "uncalibrated: Hadamard rotations, zero feedback factor; for benchmarks only"
    layers = [
        LayerParams(h.clone(), h.clone(), None if factor is None else factor.clone())
        for _ in range(fingerprint.layers)
    ]
    return Artifact(fingerprint, codec, {}, layers, {"data": report, "warnings": [report]})


def _artifact(header: Header, layers: list[LayerParams]) -> Artifact:
    return Artifact(header.fingerprint, header.codec, header.options, layers, header.provenance)


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _check_layers(
    path: Path | str, codec: str, fingerprint: Fingerprint, layers: list[LayerParams]
) -> None:
    if len(layers) != fingerprint.layers:
        raise ArtifactError(
            f"{path}: holds {len(layers)} layers, fingerprint says {fingerprint.layers}"
        )
    shape = (fingerprint.kv_heads, fingerprint.head_dim, fingerprint.head_dim)
    for i, params in enumerate(layers):
        if (params.factor is not None) != CODECS[codec].k_feedback:
            raise ArtifactError(f"{path}: layers.{i}.factor does not belong to codec {codec!r}")
        for name, tensor in params._asdict().items():
            if tensor is not None:
                _check_tensor(f"{path}: layers.{i}.{name}", name, tensor, shape)


def _check_tensor(where: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise ArtifactError(
            f"{where} is {tensor.dtype} {list(tensor.shape)}, expected float32 {list(shape)}"
        )
    if not bool(tensor.isfinite().all()):
        raise ArtifactError(f"{where} holds NaN or infinity; calibrate again")
    if name == "factor":
        if bool(tensor.tril().any()):
            raise ArtifactError(f"{where} is not strictly upper triangular; calibrate again")
        return
    r = tensor.double()
    gap = float((r.mT @ r - torch.eye(shape[-1], dtype=r.dtype)).abs().max())
    if gap > ORTHOGONALITY:
        raise ArtifactError(
            f"{where} is not orthogonal: |R^T R - I| is {gap:.1e}, expected <= {ORTHOGONALITY:.0e}"
        )
