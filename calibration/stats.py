"""Streaming statistics of one attention layer, in memory that does not grow with the tokens.

Every ``HOLD_EVERY``-th row is held back: it enters no moment, and at most ``capacity`` of them are
kept to judge what was fitted to the others. Which ones depends on the rows' indices alone, so the
result does not depend on how the stream was cut into batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HOLD_EVERY = 16


@dataclass(frozen=True)
class Moments:
    """What a codec is fitted to, per KV head; q and k after QK-norm and RoPE. float64 on CPU.

    count         rows seen
    k_mean        [Hk, D]       E[k]
    ktk, vtv      [Hk, D, D]    E[k^T k], E[v^T v]
    qtq, oto      [Hk, D, D]    E[q^T q], E[o^T o] over the query heads that share the KV head,
                                o = softmax(q K^T scale) V before the output projection
    held_k, held_v [n, Hk, D]   float32 rows that are in none of the moments
    """

    count: int
    k_mean: torch.Tensor
    ktk: torch.Tensor
    vtv: torch.Tensor
    qtq: torch.Tensor
    oto: torch.Tensor
    held_k: torch.Tensor
    held_v: torch.Tensor


def join_heads(parts: list[Moments]) -> Moments:
    """Moments of a layer whose KV heads were seen in ``parts``, in order, over the same rows."""
    first = parts[0]
    if any(p.count != first.count or len(p.held_k) != len(first.held_k) for p in parts):
        raise ValueError("the parts saw different rows")

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(p, name) for p in parts], 1 if name.startswith("held") else 0)

    names = ("k_mean", "ktk", "vtv", "qtq", "oto", "held_k", "held_v")
    return Moments(first.count, *map(joined, names))


class Reservoir:
    """The ``capacity`` rows with the smallest hashed index among all rows offered."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.priority = torch.empty(0, dtype=torch.int64)
        self.rows: list[torch.Tensor] = []

    def offer(self, index: torch.Tensor, *rows: torch.Tensor) -> None:
        """``index`` [n] int64, unique over the stream; ``rows`` tensors [n, ...] kept together."""
        priority = (index.cpu() * 2654435761 + 12345) % 2**32
        rows = [r.float().cpu() for r in rows]
        if self.rows:
            priority = torch.cat([self.priority, priority])
            rows = [torch.cat(pair) for pair in zip(self.rows, rows, strict=True)]
        keep = priority.argsort()[: self.capacity]
        self.priority, self.rows = priority[keep], [r[keep].clone() for r in rows]


class LayerStats:
    """Accumulates one layer's moments in float64 on the device of the rows."""

    def __init__(self, capacity: int = 512) -> None:
        self.count = 0
        self.query_count = 0
        self.sums: dict[str, torch.Tensor] = {}
        self.held = Reservoir(capacity)

    def update(
        self,
        index: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
    ) -> None:
        """Add rows: q, o [T, H, D]; k, v [T, Hk, D]; index [T] int64, unique over the stream."""
        held = index % HOLD_EVERY == HOLD_EVERY - 1
        self.held.offer(index[held], k[held], v[held])
        q, k, v, o = (x[~held].double() for x in (q, k, v, o))
        heads = k.shape[1]
        self.count += len(k)
        self.query_count += len(k) * (q.shape[1] // heads)
        self._add("k", k.sum(0))
        for name, rows in (("ktk", k), ("vtv", v), ("qtq", q), ("oto", o)):
            grouped = rows.unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
            self._add(name, grouped.mT @ grouped)

    def finish(self) -> Moments:
        """Divide the sums by their counts."""
        if self.count == 0 or not self.held.rows:
            raise ValueError("no rows were seen")
        n = {"k": self.count, "ktk": self.count, "vtv": self.count}
        mean = {name: s.cpu() / n.get(name, self.query_count) for name, s in self.sums.items()}
        k_mean = mean.pop("k")
        return Moments(
            self.count, k_mean, **mean, held_k=self.held.rows[0], held_v=self.held.rows[1]
        )

    def _add(self, name: str, value: torch.Tensor) -> None:
        old = self.sums.get(name)
        self.sums[name] = value if old is None else old.to(value.device) + value
