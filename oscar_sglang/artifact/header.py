"""The header of an artifact file, read and checked before any tensor is.

Every size the header declares is compared with what its own fingerprint implies and with the size
of the file, so a hostile file cannot make us allocate more than its own length.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.codec import CODECS
from ..kernels.layout import stored_head_dim
from .fingerprint import Fingerprint
from .weights import METADATA_KEY

FORMAT_VERSION = 2  # 1 identified the weights by a sample that missed most changes
CALIBRATE = "make one with: oscar-sglang calibrate --model DIR --out FILE"
_MAX_HEADER_BYTES = 32 << 20
_MAX_COUNT = 4096  # layers or heads


class ArtifactError(ValueError):
    """A calibrated file that cannot be used; the message is for the operator."""


@dataclass(frozen=True)
class Header:
    """What an artifact says about itself."""

    fingerprint: Fingerprint
    codec: str
    options: dict[str, Any]
    provenance: dict[str, Any]


def read_header(path: Path) -> Header:
    """Read and check the header; tensors may be loaded afterwards. Raises ArtifactError."""
    raw, data_bytes = _read_raw(path)
    meta = raw.pop("__metadata__", None)
    text = meta.get(METADATA_KEY) if isinstance(meta, dict) else None
    if not isinstance(text, str):
        raise ArtifactError(
            f"{path}: a safetensors file, but not an oscar_sglang artifact (no metadata entry "
            f"{METADATA_KEY!r}); {CALIBRATE}"
        )
    header = _parse(path, _json(path, text, f"metadata entry {METADATA_KEY!r}"))
    _check_entries(path, header, raw, data_bytes)
    return header


def expected_tensors(header: Header) -> dict[str, list[int]]:
    """Name -> shape of every tensor the file must hold, and no other."""
    f = header.fingerprint
    shapes = CODECS[header.codec].tensors(stored_head_dim(f.head_dim))
    return {
        f"layers.{i}.{name}": [f.kv_heads, *shape]
        for i in range(f.layers)
        for name, shape in shapes.items()
    }


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_raw(path: Path) -> tuple[dict[str, Any], int]:
    """The safetensors header as JSON, and the number of bytes after it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ArtifactError(
                    f"{path}: truncated or not a safetensors file ({size} bytes, header of "
                    f"{length} announced); {CALIBRATE}"
                )
            raw = _json(path, file.read(length), "safetensors header")
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; {CALIBRATE}") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path}: is a directory, expected an artifact file") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from None
    return raw, size - 8 - length


def _json(path: Path, text: str | bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ArtifactError(
            f"{path}: {what} is not JSON: not a safetensors file, or damaged; {CALIBRATE}"
        ) from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: {what} is {type(value).__name__}, expected a JSON object")
    return value


def _parse(path: Path, meta: dict[str, Any]) -> Header:
    version = meta.get("format_version")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        older = "it may be another model's than it says; " if version == 1 else ""
        raise ArtifactError(
            f"{path}: format_version is {_show(version)}, this oscar_sglang reads "
            f"{FORMAT_VERSION}; {older}"
            + ("upgrade oscar_sglang or " if newer else "")
            + "calibrate again: oscar-sglang calibrate --model DIR --out FILE"
        )
    codec = meta.get("codec")
    if not isinstance(codec, str) or codec not in CODECS:
        raise ArtifactError(f"{path}: unknown codec {_show(codec)}; supported: {', '.join(CODECS)}")
    for name in ("options", "provenance"):
        if not isinstance(meta.get(name), dict):
            raise ArtifactError(
                f"{path}: {name} is {_show(meta.get(name))}, expected a JSON object"
            )
    fingerprint = _parse_fingerprint(path, meta.get("fingerprint"))
    return Header(fingerprint, codec, meta["options"], meta["provenance"])


def _parse_fingerprint(path: Path, value: Any) -> Fingerprint:
    names = {f.name: f.type for f in dataclasses.fields(Fingerprint)}
    if not isinstance(value, dict) or set(value) != set(names):
        raise ArtifactError(f"{path}: fingerprint must have exactly the fields {', '.join(names)}")
    for name, kind in names.items():
        found = value[name]
        if kind == "str" and not isinstance(found, str):
            raise ArtifactError(f"{path}: fingerprint.{name} is {_show(found)}, expected a string")
        if kind == "int" and (type(found) is not int or not 1 <= found <= _MAX_COUNT):
            raise ArtifactError(
                f"{path}: fingerprint.{name} is {_show(found)}, expected an integer in "
                f"[1, {_MAX_COUNT}]"
            )
    try:
        stored_head_dim(value["head_dim"])
    except ValueError as error:
        raise ArtifactError(f"{path}: fingerprint.{error}") from None
    return Fingerprint(**value)


def _check_entries(path: Path, header: Header, raw: dict[str, Any], data_bytes: int) -> None:
    expected = expected_tensors(header)
    for name in expected:
        if name not in raw:
            raise ArtifactError(f"{path}: tensor {name} is missing; {CALIBRATE}")
    total = sum(math.prod(shape) * 4 for shape in expected.values())
    if data_bytes != total:
        raise ArtifactError(
            f"{path}: holds {data_bytes} bytes of tensors, its fingerprint implies {total}; "
            f"truncated or damaged: {CALIBRATE}"
        )
    for name, entry in raw.items():
        if name not in expected:
            raise ArtifactError(f"{path}: unknown tensor {_show(name)}; {CALIBRATE}")
        dtype, shape = (
            (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        )
        if dtype != "F32" or shape != expected[name]:
            raise ArtifactError(
                f"{path}: tensor {name} is {_show(dtype)} {_show(shape)}, expected F32 "
                f"{expected[name]}"
            )
