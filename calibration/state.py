"""An interrupted calibration continues: the accumulated sums, kept beside the artifact to be."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from .stats import Accumulator, LayerStats

SAVE_EVERY_SECONDS = 30
_KEY = "oscar_sglang_partial"


class Partial:
    """A file with an ``Accumulator`` after some sequences of a run that ``key`` identifies.

    Anything wrong with the file, or another key, means starting from the beginning.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        self.saved_at = time.monotonic()

    def restore(self, accumulator: Accumulator) -> int:
        """Fill ``accumulator``; returns the number of sequences it has seen, 0 if none."""
        try:
            with safe_open(self.path, "pt") as file:
                head = json.loads(file.metadata()[_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            if head["key"] != self.key:
                return 0
            stats = {
                int(layer): _layer_stats(
                    accumulator.new_stats(int(layer)), counts, tensors, f"{layer}."
                )
                for layer, counts in head["counts"].items()
            }
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return 0
        accumulator.stats, accumulator.seen = stats, head["seen"]
        return head["done"]

    def save(self, accumulator: Accumulator, done: int) -> None:
        """Write at most every ``SAVE_EVERY_SECONDS``, atomically."""
        if time.monotonic() - self.saved_at < SAVE_EVERY_SECONDS:
            return
        tensors: dict[str, torch.Tensor] = {}
        counts: dict[int, list[int]] = {}
        for layer, stats in accumulator.stats.items():
            counts[layer] = [stats.count, stats.query_count]
            named = dict(stats.sums) | {"priority": stats.held.priority}
            named |= {f"held{i}": rows for i, rows in enumerate(stats.held.rows)}
            tensors |= {f"{layer}.{name}": t.cpu().contiguous() for name, t in named.items()}
        head = {"key": self.key, "done": done, "seen": accumulator.seen, "counts": counts}
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        safetensors.torch.save_file(tensors, temporary, metadata={_KEY: json.dumps(head)})
        os.replace(temporary, self.path)
        self.saved_at = time.monotonic()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _layer_stats(
    stats: LayerStats, counts: list[int], tensors: dict[str, torch.Tensor], prefix: str
) -> LayerStats:
    stats.count, stats.query_count = counts
    mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    stats.held.priority = mine.pop("priority")
    held = sorted(name for name in mine if name.startswith("held"))
    stats.held.rows = [mine.pop(name) for name in held]
    stats.sums = mine
    return stats
