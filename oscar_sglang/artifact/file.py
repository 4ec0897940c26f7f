"""The calibrated file: what a codec keeps per layer and KV head, with provenance.

A safetensors file of float32 tensors ``layers.{i}.NAME`` ``[Hk, ...]``, names and shapes those of
``CodecSpec.tensors``, whose metadata entry ``oscar_sglang`` is JSON: format_version, fingerprint,
codec, options, provenance. Nothing in it is
executable and everything in it is checked: ``load`` raises ``ArtifactError`` or returns an
artifact that every kernel can use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..kernels.codec import CODECS, CodecSpec, LayerCodec, LayerParams, layer_specs, spec_of
from ..kernels.hadamard import hadamard
from ..kernels.layout import stored_head_dim
from .fingerprint import Fingerprint, FingerprintError
from .header import FORMAT_VERSION, ArtifactError, Header, read_header
from .weights import METADATA_KEY

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
_LARGEST_LOG2 = 64.0  # of a metadata grid: any model's steps are within 2^-64 .. 2^64


@dataclass
class Artifact:
    """A codec fitted to one model.

    layers      one LayerParams per attention layer, float32 CPU, all KV heads of the model
    options     what the codec was fitted with, e.g. {"damping": 0.05}, or how it runs (``omni``:
                ``codec_omni.OPTIONS``; ``position``: ``codec.layer_specs``); JSON values
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
        return spec_of(self.codec, self.options)

    @property
    def specs(self) -> list[CodecSpec]:
        """The codec as each layer has it."""
        return layer_specs(self.spec, self.fingerprint.layers, self.options)

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Bits of each layer's K and V, if the codec has a choice (``codec.layer_specs``)."""
        return tuple((k, v) for k, v in self.options.get("bits") or ())

    @property
    def codecs(self) -> list[LayerCodec]:
        """Of each layer, what ``calibration.served`` fits."""
        return [LayerCodec(*pair) for pair in zip(self.specs, self.layers, strict=True)]

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
        LayerParams._make(tensors.get(f"layers.{i}.{name}") for name in LayerParams._fields)
        for i in range(header.fingerprint.layers)
    ]
    artifact = _artifact(header, layers)
    validate(artifact, path)
    return artifact


def validate(artifact: Artifact, where: Path | str) -> None:
    """Refuse options and tensors that no kernel can use; ``where`` begins the message."""
    choices = CODECS[artifact.codec].meta.choices
    for name, values in choices.items():
        if (found := artifact.options.get(name, values[0])) not in values:
            raise ArtifactError(
                f"{where}: option {name} of codec {artifact.codec} is {found!r}, expected "
                f"{' or '.join(values)}"
            )
    _check_specs(where, artifact)
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
        LayerParams._make(None if t is None else t[heads].clone() for t in params)
        for params in artifact.layers
    ]


def data_free(
    fingerprint: Fingerprint, codec: str = "feedback", options: dict[str, str] | None = None
) -> Artifact:
    """Plain Hadamard rotations, the identity as metric: all there is to a codec that needs no data
    (``options``: ``Metadata.choices``); of others only for benchmarks with dummy weights."""
    spec, d = CODECS[codec], stored_head_dim(fingerprint.head_dim)
    options = spec.meta.chosen(options or {}) | spec.meta.neutral_options(d, fingerprint.layers)
    provenance = {"data": "none: the codec has no statistics", "warnings": []}
    if spec.needs_data:
        report = "uncalibrated: Hadamard rotations, zero feedback factor; for benchmarks only"
        provenance = {"data": report, "warnings": [report]}
    layers = [
        neutral_params(spec, fingerprint.kv_heads, d, options) for _ in range(fingerprint.layers)
    ]
    return Artifact(fingerprint, codec, options, layers, provenance)


def neutral_params(
    spec: CodecSpec, kv_heads: int, head_dim: int, options: Mapping[str, Any]
) -> LayerParams:
    """A layer's part of ``data_free``."""
    d = head_dim
    h = torch.eye(d) if options.get("rotation") == "none" else hadamard(d).float()
    neutral = {
        "r_k": h,
        "r_v": h,
        "factor": torch.zeros(d, d),
        "metric": torch.eye(d),
        "grid": torch.tensor([[-8.0, -8.0, 16 / 255]] * 2),  # steps 2^-8 .. 2^8, lo in -8 .. 8
        "q_k": h,
        "mean": torch.zeros(d),
    }
    shapes = spec.tensors(d).items()
    return LayerParams(**{n: neutral[n].expand(kv_heads, *shape).clone() for n, shape in shapes})


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
    shapes = CODECS[codec].tensors(stored_head_dim(fingerprint.head_dim))
    for i, params in enumerate(layers):
        for name, tensor in params._asdict().items():
            where = f"{path}: layers.{i}.{name}"
            if (tensor is not None) != (name in shapes):
                state = "is missing for" if tensor is None else "does not belong to"
                raise ArtifactError(f"{where} {state} codec {codec!r}")
            if tensor is not None:
                _check_tensor(where, name, tensor, (fingerprint.kv_heads, *shapes[name]))
        turns = (("r_k", params.r_k, params.queries), ("r_v", params.r_v, params.r_v))
        for name, keys, queries in turns:
            _check_inverse(f"{path}: layers.{i}.{name}", keys, queries)


def _check_specs(where: Path | str, artifact: Artifact) -> None:
    """Refuse options that describe no codec for this model's layers."""
    d = stored_head_dim(artifact.fingerprint.head_dim)
    try:
        for spec in artifact.specs:
            spec.meta.check(d)
            spec.layout(artifact.fingerprint.kv_heads, d)
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(
            f"{where}: options of codec {artifact.codec} describe none ({error!r}); calibrate again"
        ) from None


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
    if name == "metric":
        _check_metric(where, tensor)
        return
    if name == "grid":
        step_log2, _, lo_step = tensor.unbind(-1)
        if bool((step_log2.abs() > _LARGEST_LOG2).any()) or bool((lo_step <= 0).any()):
            raise ArtifactError(f"{where} is no grid of metadata bytes; calibrate again")
        return


def _check_inverse(where: str, keys: torch.Tensor, queries: torch.Tensor) -> None:
    """Logits stay what they are: keys and queries are turned by inverse transposes."""
    r, d = keys.double(), keys.shape[-1]
    gap = float((r.mT @ queries.double() - torch.eye(d, dtype=r.dtype)).abs().max())
    if gap <= ORTHOGONALITY:
        return
    if keys is queries:
        raise ArtifactError(
            f"{where} is not orthogonal: |R^T R - I| is {gap:.1e}, expected <= {ORTHOGONALITY:.0e}"
        )
    raise ArtifactError(
        f"{where} and q_k are not inverse transposes: |r_k^T q_k - I| is {gap:.1e}, expected <= "
        f"{ORTHOGONALITY:.0e}"
    )


def _check_metric(where: str, metric: torch.Tensor) -> None:
    if not torch.equal(metric, metric.mT):
        raise ArtifactError(f"{where} is not symmetric; calibrate again")
    if bool((torch.linalg.eigvalsh(metric.double()) <= 0).any()):
        raise ArtifactError(f"{where} is not positive definite; calibrate again")
