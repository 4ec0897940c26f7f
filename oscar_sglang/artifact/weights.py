"""Which weight files of a model SGLang loads, and a hash of what is in them.

The hash answers one question: does a calibration made on these weights hold for those? It covers
name, dtype and shape of every tensor, and content

    whole                    of tensors up to ``PIECE * pieces`` bytes: norms, biases, scales
    in ``ATTENTION_PIECES``  evenly spread pieces of ``PIECE`` bytes: attention projections
    in ``PIECES``            pieces: every other matrix; stacked experts count one by one

Reading everything would take 100 GB twice at each start of a large model, and remembering a full
hash by path, size and date believes that nobody writes over a file with its date kept and asks for
a cache directory that outlives the start. Pieces need no state and read 36 MB of the 16 GB of
Llama-3.1-8B, 1.3 of the 470 GB of Qwen3-235B. What they can miss: a run of 1/64 of an attention
projection (one head of 64) or 1/8 of another matrix is always hit; of changes strewn over a share f
of a matrix's 16-bit numbers, all are missed with chance (1 - f)^131072 and (1 - f)^16384, below
1e-7 for one number in a thousand; one single number of a 4096 x 4096 projection is missed with 99%.
Fine-tuning, merging, quantising and replacing a layer change far more.

The output head lies behind all K and V and does not count, nor does how tensors are spread over
files. A pickled file (``*.bin``, ``*.pt``) is hashed storage by storage, its head included.
Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

NO_WEIGHTS = "none"
METADATA_KEY = "oscar_sglang"  # of our own safetensors files
PIECE = 4096
ATTENTION_PIECES = 64
PIECES = 8
INDEX = "model.safetensors.index.json"

# As SGLang's DefaultModelLoader._prepare_weights: of these patterns the first that any file has.
_SAFETENSORS = ("*.safetensors", "*.pt")
_PATTERNS = {
    "safetensors": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "instanttensor": _SAFETENSORS,
    "mistral": ("consolidated*.safetensors", "*.pt"),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
}
_INDICES = {"mistral": "consolidated.safetensors.index.json"}
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")

_ATTENTION = re.compile(r"attn|attention|qkv", re.IGNORECASE)
_HEAD = re.compile(r"(^|\.)(lm_head|score|embed_out)\.")
_EMBEDDING = re.compile(r"embed(?!_out)|wte")
_MAX_HEADER_BYTES = 256 << 20
_THREADS = 8


class FingerprintError(ValueError):
    """The model directory does not say what the plugin needs to know about its attention."""


class Tensor(NamedTuple):
    """Where the bytes of one tensor, or of one storage of a pickled file, lie."""

    name: str
    kind: str  # dtype, or what else tells the content apart
    shape: tuple[int, ...]
    file: Path
    begin: int
    size: int


def patterns(load_format: str = "auto") -> list[str]:
    """What SGLang looks for in a model's folder, or on a hub, with ``--load-format``."""
    return list(_PATTERNS.get(load_format, ("*.safetensors", "*.bin", "*.pt")))


def index_name(load_format: str = "auto") -> str:
    return _INDICES.get(load_format, INDEX)


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files of ``folder`` that SGLang loads, in name order; our own artifacts, which users may
    keep beside an index, are none. Raises FingerprintError if the index names absent files."""
    folder = Path(folder)
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    found = [[n for n in names if fnmatch(n, pattern)] for pattern in patterns(load_format)]
    files = next((f for f in found if f), [])
    safetensors = ".safetensors" in patterns(load_format)[0] and load_format in _PATTERNS
    if files and (safetensors or files[0].endswith(".safetensors")):
        files = _without_duplicates(folder, files, index_name(load_format))
    else:
        files = [n for n in files if not n.endswith(_NOT_WEIGHTS)]
    return [folder / n for n in files if not _is_artifact(folder / n)]


def hash_weights(folder: Path | str) -> str:
    """16 hex digits over what ``weight_files`` hold, or ``"none"``.

    Raises FingerprintError naming a file that is damaged or cut short.
    """
    files = weight_files(Path(folder))
    if not files:
        return NO_WEIGHTS
    tensors = sorted(t for file in files for t in _tensors(file))
    if any(_EMBEDDING.search(t.name) for t in tensors):  # else the head may be tied to it
        tensors = [t for t in tensors if not _HEAD.search(t.name)]
    handles = {file: os.open(file, os.O_RDONLY) for file in files}
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            contents = list(pool.map(lambda t: _content(handles[t.file], t), tensors))
    finally:
        for handle in handles.values():
            os.close(handle)
    digest = hashlib.sha256()
    for t, content in zip(tensors, contents, strict=True):
        digest.update(json.dumps([t.name, t.kind, t.shape, content]).encode())
    return digest.hexdigest()[:16]


def _without_duplicates(folder: Path, files: list[str], index: str) -> list[str]:
    """Only what the index names; without one, no Mistral copy of the same weights."""
    path = folder / index
    if not path.is_file():
        twice = len(files) == 2 and files[0].endswith("consolidated.safetensors")
        return files[1:] if twice and files[1].endswith("model.safetensors") else files
    try:
        wanted = set(json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FingerprintError(f"{path}: no weight_map; fetch the model again") from None
    if missing := sorted(wanted - {n for n in wanted if (folder / n).is_file()}):
        raise FingerprintError(
            f"{path}: names {len(missing)} file(s) that are not there, e.g. {missing[0]}; fetch "
            "the model again"
        )
    return [n for n in files if n in wanted]


def _is_artifact(path: Path) -> bool:
    """Whether the safetensors header at the start of the file has our metadata key."""
    with path.open("rb") as file:
        return f'"{METADATA_KEY}":'.encode() in file.read(256)


def _tensors(file: Path) -> Iterator[Tensor]:
    if file.suffix == ".safetensors":
        return _safetensors(file)
    if zipfile.is_zipfile(file):
        return _pickled(file)
    # A pickle of before PyTorch 1.6 says nothing about its storages: read all of it.
    return iter([Tensor(file.name, _hash_of(file), (), file, 0, 0)])


def _safetensors(file: Path) -> Iterator[Tensor]:
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise FingerprintError(f"{file}: cut short, or no safetensors file; fetch it again")
        raw = f.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if not 8 + length <= begin <= end <= size:
                raise FingerprintError(
                    f"{file}: {name} ends at byte {end}, the file at {size}: cut short; fetch it "
                    "again"
                )
            yield Tensor(name, entry["dtype"], tuple(entry["shape"]), file, begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FingerprintError):
            raise
        raise FingerprintError(
            f"{file}: its safetensors header is damaged; fetch it again"
        ) from None


def _pickled(file: Path) -> Iterator[Tensor]:
    """Storages of a torch.save file, an uncompressed ZIP archive. Names, shapes and dtypes are in
    its ``data.pkl``, which nobody unpickles here; the archive has a CRC-32 of every member."""
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as f:
            for entry in archive.infolist():
                f.seek(entry.header_offset + 26)
                name, extra = (int.from_bytes(f.read(2), "little") for _ in range(2))
                begin = entry.header_offset + 30 + name + extra
                inside = entry.filename.partition("/")[2]  # the first folder is the file's name
                if inside.endswith(".pkl"):
                    kind = hashlib.sha256(archive.read(entry)).hexdigest()
                else:
                    kind = f"{entry.file_size}:{entry.CRC}"
                yield Tensor(inside, kind, (), file, begin, entry.compress_size)
    except zipfile.BadZipFile as error:
        raise FingerprintError(f"{file}: {error}; fetch it again") from None


def _content(handle: int, t: Tensor) -> str:
    """Hash of a tensor's bytes, or of ``_pieces`` of them."""
    digest = hashlib.blake2b(digest_size=16)
    for offset, length in _pieces(t):
        digest.update(os.pread(handle, length, t.begin + offset))
    return digest.hexdigest()


def _pieces(t: Tensor) -> Sequence[tuple[int, int]]:
    """(offset, length) of the parts of ``t`` that are read."""
    count = ATTENTION_PIECES if _ATTENTION.search(t.name) else PIECES
    for stacked in t.shape[:-2]:
        count *= stacked
    if t.size <= PIECE * count:
        return [(0, t.size)]
    return [(t.size * i // count, PIECE) for i in range(count)]


def _hash_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while piece := f.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
