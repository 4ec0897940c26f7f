"""Calibration tokens: random ids, a text file, or an array of ids; with a hash for provenance."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..artifact.fingerprint import read_config, text_config
from .errors import CalibrationError

SEQUENCE = 8192  # K's mean after RoPE depends on the positions it is taken over: cover many
_CHARS_PER_TOKEN = 16  # of a text file, at most this much is read
RANDOM = "random"


@dataclass(frozen=True)
class Tokens:
    """Sequences of at most ``SEQUENCE`` int64 ids, and where they came from.

    ``seed``: uniform random ids made with it, which ``selfsample.plausible`` turns into better
    ones; None for anything else.
    """

    sequences: list[torch.Tensor]
    description: str
    seed: int | None = None

    @property
    def count(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def hash(self) -> str:
        """16 hex digits over all ids in order."""
        digest = hashlib.sha256()
        for ids in self.sequences:
            digest.update(ids.numpy().tobytes())
        return digest.hexdigest()[:16]


def load_tokens(source: str, model_dir: Path, tokens: int, seed: int = 0) -> Tokens:
    """At most ``tokens`` ids from ``source``: ``random``, ``random:N``, a text FILE, or NPZ:KEY.

    Random ids are uniform over the vocabulary, in sequences of N (``SEQUENCE``) that start with BOS
    if the model has one. Raises CalibrationError if the source cannot be read or does not suit the
    vocabulary.
    """
    config = read_config(model_dir)
    vocab = vocabulary(model_dir)
    if source == RANDOM or source.startswith(RANDOM + ":"):
        asked = source.partition(":")[2] or str(SEQUENCE)
        if not asked.isdecimal() or int(asked) < 1:
            raise CalibrationError(f"{source}: give the length of a sequence, as {RANDOM}:2048")
        longest = text_config(config).get("max_position_embeddings") or SEQUENCE
        length = min(int(asked), longest)
        sequences = _random(vocab, _bos(config), tokens, seed, length)
        return Tokens(sequences, f"uniform random ids, seed {seed}", seed)
    path, _, key = source.rpartition(":")
    if path.endswith(".npz"):
        rows = _from_npz(path, key)
    else:
        rows = [tokenise(Path(source), model_dir, tokens)]
    sequences = _take(rows, tokens)
    for ids in sequences:
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise CalibrationError(
                f"{source}: token ids reach {int(ids.max())}, the model's vocabulary has {vocab}; "
                "are they from this model's tokenizer?"
            )
    return Tokens(sequences, Path(source).name)


def vocabulary(model_dir: Path) -> int:
    """Number of token ids of a model."""
    vocab = text_config(read_config(model_dir)).get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise CalibrationError(f"{model_dir}: config.json has no vocab_size")
    return vocab


def _random(vocab: int, bos: int | None, tokens: int, seed: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sequences = list(torch.randint(vocab, (tokens,), generator=generator).split(length))
    if bos is not None:
        for ids in sequences:
            ids[0] = bos
    return sequences


def _bos(config: dict[str, Any]) -> int | None:
    bos = config.get("bos_token_id", text_config(config).get("bos_token_id"))
    return bos if isinstance(bos, int) else None


def _from_npz(path: str, key: str) -> list[torch.Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if key not in arrays:
                raise CalibrationError(f"{path}: no array {key!r}; it holds {arrays.files}")
            array = arrays[key]
    except (OSError, ValueError) as error:
        raise CalibrationError(str(error) if key in str(error) else f"{path}: {error}") from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise CalibrationError(
            f"{path}: {key!r} is {array.dtype} {list(array.shape)}, expected integers [T] or [N, T]"
        )
    return list(torch.from_numpy(np.atleast_2d(array).astype(np.int64)))


def tokenise(path: Path, model_dir: Path, tokens: int) -> torch.Tensor:
    """Ids [T] of the beginning of a text file, about enough text for ``tokens`` of them."""
    from transformers import AutoTokenizer

    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(tokens * _CHARS_PER_TOKEN)
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # transformers raises whatever it likes
        raise CalibrationError(
            f"{model_dir}: has no usable tokenizer ({str(error).splitlines()[0]}); calibrate on "
            "random ids: --data random"
        ) from error
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)


def _take(rows: list[torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """The first ``tokens`` ids in sequences that never cross a row."""
    sequences = []
    for piece in (p for row in rows for p in row.split(SEQUENCE) if len(row)):
        if tokens <= 0:
            break
        sequences.append(piece[:tokens].clone())
        tokens -= len(piece)
    return sequences
