"""Evaluation files -> units: token archives, text files, recall questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data import tokenise, vocabulary
from ..errors import CalibrationError
from .units import ROWS, Induction, Recall, Text, Unit


@dataclass(frozen=True)
class Inputs:
    """Units in the order they run."""

    units: list[Unit]

    @property
    def hashes(self) -> dict[str, str]:
        """16 hex digits over the ids of every unit, by key."""
        return {u.key: hashlib.sha256(u.ids.numpy().tobytes()).hexdigest()[:16] for u in self.units}


def load_inputs(
    model_dir: Path,
    contexts: Sequence[int],
    *,
    tokens: Path | None = None,
    documents: Iterable[str] | None = None,
    texts: Sequence[Path] = (),
    recall: Path | None = None,
    greedy: int = 0,
) -> Inputs:
    """``tokens`` is an NPZ whose ``test_*`` arrays are documents and whose ``induct`` holds
    induction rows; ``documents`` selects among the former."""
    found, induct = _from_archive(tokens, documents) if tokens else ({}, [])
    for path in texts:
        found[path.name] = tokenise(path, model_dir, max(contexts))
    units: list[Unit] = []
    for context in contexts:
        if context < ROWS + 1:
            raise CalibrationError(f"--context {context}: at least {ROWS + 1} tokens are needed")
        for name, ids in found.items():
            if len(ids) < context:
                raise CalibrationError(
                    f"{name} has {len(ids)} tokens, --context asks for {context}; give longer "
                    "documents or a smaller context"
                )
            units.append(Text(name, context, ids[:context], greedy))
    units += [Induction(str(i), ids) for i, ids in enumerate(induct)]
    units += _recall(recall) if recall else []
    if not units:
        raise CalibrationError("nothing to evaluate: give --text, --tokens or --recall")
    _check_vocabulary(model_dir, units)
    return Inputs(units)


def _from_archive(path: Path, documents: Iterable[str] | None):
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = [n for n in arrays.files if n.startswith("test_")]
            if documents is not None:
                if missing := sorted(set(documents) - set(names)):
                    raise CalibrationError(f"{path}: no document {missing[0]!r}; it has {names}")
                names = list(documents)
            found = {n: torch.from_numpy(arrays[n].astype(np.int64)) for n in names}
            induct = arrays["induct"].astype(np.int64) if "induct" in arrays.files else []
            return found, [torch.from_numpy(row) for row in induct]
    except (OSError, ValueError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"{path}: cannot be read as an NPZ of token ids ({error})") from None


def _recall(path: Path) -> list[Recall]:
    """A JSON list of {context, facts, document, questions: [{prompt, answer_ids}]}."""
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return [
            Recall(
                str(i),
                int(e["context"]),
                int(e["facts"]),
                torch.tensor(e["document"]),
                [
                    (torch.tensor(q["prompt"]), torch.tensor(q["answer_ids"]))
                    for q in e["questions"]
                ],
            )
            for i, e in enumerate(entries)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"{path}: cannot be read as recall questions ({type(error).__name__}: {error})"
        ) from None


def _check_vocabulary(model_dir: Path, units: list[Unit]) -> None:
    size = vocabulary(model_dir)
    for unit in units:
        if int(unit.ids.min()) < 0 or int(unit.ids.max()) >= size:
            raise CalibrationError(
                f"{unit.key}: token ids reach {int(unit.ids.max())}, the model's vocabulary has "
                f"{size}; are they from this model's tokenizer?"
            )
