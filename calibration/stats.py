"""Streaming statistics of one attention layer, in memory that does not grow with the tokens.

Every ``HOLD_EVERY``-th row is held back: it enters no moment, and at most ``capacity`` of them are
kept to judge what was fitted to the others. Which ones depends on the rows' indices alone, so the
result does not depend on how the stream was cut into batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kernels.codec_position import Rope
from .errors import CalibrationError
from .rope import Turning

HOLD_EVERY = 16


@dataclass(frozen=True)
class BeforeRope:
    """Moments of q and k with their turn taken back, over the rows of ``Moments``: from them follow
    those of any context length (``fit_position.turned_moment``).

    rope            the turn
    k_mean          [Hk, D]      float64
    ktk, qtq        [Hk, D, D]   float64
    held_positions  [n] int64    of the held-back rows
    doubt           why ``rope`` may not be how the model turns (``rope.Turning``)
    """

    rope: Rope
    k_mean: torch.Tensor
    ktk: torch.Tensor
    qtq: torch.Tensor
    held_positions: torch.Tensor
    doubt: str | None = None


@dataclass(frozen=True)
class Moments:
    """What a codec is fitted to, per KV head; q and k after QK-norm and RoPE. float64 on CPU.

    count         rows seen
    k_mean        [Hk, D]       E[k]
    ktk, vtv      [Hk, D, D]    E[k^T k], E[v^T v]
    qtq, oto      [Hk, D, D]    E[q^T q], E[o^T o] over the query heads that share the KV head,
                                o = softmax(q K^T scale) V before the output projection
    held_k, held_v [n, Hk, D]   float32 rows that are in none of the moments
    before        of q and k before RoPE; None unless the turn was given
    """

    count: int
    k_mean: torch.Tensor
    ktk: torch.Tensor
    vtv: torch.Tensor
    qtq: torch.Tensor
    oto: torch.Tensor
    held_k: torch.Tensor
    held_v: torch.Tensor
    before: BeforeRope | None = None


def join_heads(parts: list[Moments]) -> Moments:
    """Moments of a layer whose KV heads were seen in ``parts``, in order, over the same rows."""
    first = parts[0]
    if any(p.count != first.count or len(p.held_k) != len(first.held_k) for p in parts):
        raise ValueError("the parts saw different rows")

    def joined(name: str, of: list) -> torch.Tensor:
        return torch.cat([getattr(p, name) for p in of], 1 if name.startswith("held") else 0)

    names = ("k_mean", "ktk", "vtv", "qtq", "oto", "held_k", "held_v")
    before = None
    if first.before:
        of = [p.before for p in parts]
        three = (joined(name, of) for name in ("k_mean", "ktk", "qtq"))
        held = first.before.held_positions
        before = BeforeRope(first.before.rope, *three, held, first.before.doubt)
    return Moments(first.count, *(joined(name, parts) for name in names), before)


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
    """Accumulates one layer's moments in float64 on the device of the rows. ``rope``: how its q and
    k turn; without it there are no moments before RoPE."""

    def __init__(self, capacity: int = 512, rope: Rope | None = None) -> None:
        self.rope = rope
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
        positions: torch.Tensor | None = None,
    ) -> None:
        """Add rows: q, o [T, H, D]; k, v [T, Hk, D]; index [T] int64, unique over the stream;
        positions [T] int64 in their sequences, needed with ``rope``."""
        held = index % HOLD_EVERY == HOLD_EVERY - 1
        rows = [k, v] if self.rope is None else [k, v, positions]
        self.held.offer(index[held], *(x[held] for x in rows))
        q, k, v, o = (x[~held].double() for x in (q, k, v, o))
        heads = k.shape[1]
        self.count += len(k)
        self.query_count += len(k) * (q.shape[1] // heads)
        self._add("k", k.sum(0))
        squares = [("ktk", k), ("vtv", v), ("qtq", q), ("oto", o)]
        if self.rope is not None:
            q, k = (self.rope.turn(x, positions[~held], back=True) for x in (q, k))
            self._add("before_k", k.sum(0))
            squares += [("before_ktk", k), ("before_qtq", q)]
        for name, rows in squares:
            grouped = rows.unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
            self._add(name, grouped.mT @ grouped)

    def finish(self) -> Moments:
        """Divide the sums by their counts."""
        if self.count == 0 or not self.held.rows:
            raise ValueError("no rows were seen")
        queries = ("qtq", "oto", "before_qtq")
        mean = {
            name: s.cpu() / (self.query_count if name in queries else self.count)
            for name, s in self.sums.items()
        }
        before = None
        if self.rope is not None:
            three = (mean.pop(f"before_{name}") for name in ("k", "ktk", "qtq"))
            before = BeforeRope(self.rope, *three, self.held.rows[2].long())
        k_mean = mean.pop("k")
        held_k, held_v = self.held.rows[:2]
        return Moments(self.count, k_mean, **mean, held_k=held_k, held_v=held_v, before=before)

    def _add(self, name: str, value: torch.Tensor) -> None:
        old = self.sums.get(name)
        self.sums[name] = value if old is None else old.to(value.device) + value


class Accumulator:
    """Moments of every layer, fed layer by layer and sequence by sequence by a front end.
    ``turning``: how keys turn; without it there are no moments before RoPE."""

    def __init__(
        self, n_sink: int = 64, capacity: int = 512, turning: Turning | None = None
    ) -> None:
        self.n_sink = n_sink
        self.capacity = capacity
        self.turning = turning
        self.stats: dict[int, LayerStats] = {}
        self.seen = 0

    def add(self, layer: int, q, k, v, o) -> None:
        """Rows of one whole sequence in one layer: q, o [T, H, D]; k, v [T, Hk, D]."""
        rows = [x[self.n_sink :] for x in (q, k, v, o)]
        order = torch.arange(len(rows[0]), device=q.device)
        if layer not in self.stats:
            self.stats[layer] = self.new_stats(layer)
        self.stats[layer].update(self.seen + order, *rows, self.n_sink + order)

    def new_stats(self, layer: int) -> LayerStats:
        """Empty sums of ``layer``."""
        return LayerStats(self.capacity, self.turning and self.turning.of_layer(layer))

    def advance(self, tokens: int) -> None:
        """All layers have seen a sequence of ``tokens``."""
        self.seen += max(0, tokens - self.n_sink)

    def finish(self, layers: int) -> list[Moments]:
        """Raises CalibrationError if a layer is missing or saw NaN."""
        if sorted(self.stats) != list(range(layers)):
            raise CalibrationError(
                f"saw attention in layers {sorted(self.stats)} of {layers}: models that mix in "
                "other kinds of layers are not supported"
            )
        moments = []
        for layer in range(layers):
            m = self.stats[layer].finish()
            if not all(bool(t.isfinite().all()) for t in (m.ktk, m.vtv, m.qtq, m.oto)):
                raise CalibrationError(f"layer {layer}: K, V or Q is NaN or infinite")
            if self.turning:
                m = replace(m, before=replace(m.before, doubt=self.turning.doubt))
            moments.append(m)
        return moments
