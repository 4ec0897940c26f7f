"""What context costs a decode step: inter-token latency as a line, and where lines cross."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

TITLES = {"context": "one stream, longer context", "batch": "more streams of 32k"}


@dataclass(frozen=True)
class Line:
    """Milliseconds per output token against tokens read per step, least squares.

    points  (tokens, ms) that were measured
    """

    points: tuple[tuple[int, float], ...]

    @property
    def fit(self) -> tuple[float, float]:
        """(ms per token read, ms at none)."""
        slope, start = np.polyfit(*np.array(self.points, float).T, 1)
        return float(slope), float(start)

    @property
    def us_per_1k(self) -> float:
        """Microseconds that 1024 more tokens of context cost a step."""
        return self.fit[0] * 1024 * 1e3

    @property
    def residual(self) -> float:
        """Largest distance of a point from the line, as a share of the point."""
        slope, start = self.fit
        return max(abs(start + slope * x - y) / y for x, y in self.points)

    def break_even(self, other: Line) -> tuple[int, bool] | None:
        """Tokens from which this line is below ``other``, and whether that is within what was
        measured; None where it never is. Below the shortest measured context, that one is named."""
        (a, b), (c, d) = self.fit, other.fit
        if a >= c:
            return None
        shortest = max(self.points[0][0], other.points[0][0])
        crossing = (b - d) / (c - a)
        return (round(crossing), True) if crossing >= shortest else (shortest, False)


def lines(rows: list[dict], model: str, vary: str) -> dict[str, Line]:
    """By cache, of the rows of ``decode``; only points that every cache has.

    vary  "context": one stream, longer and longer; "batch": more streams of the one context that
          has several, so the tokens read are those of all streams
    """
    mine = [r for r in rows if r["model"] == model and r["scenario"] == "decode"]
    if vary == "context":
        mine = [r for r in mine if r["batch"] == 1]
    else:
        contexts = {r["context"] for r in mine if r["batch"] > 1}
        mine = [r for r in mine if r["context"] in contexts]
    found: dict[str, dict[int, float]] = {}
    for r in mine:
        found.setdefault(r["cache"], {})[r["context"] * r["batch"]] = r["tpot_ms"]
    if not found:
        return {}
    shared = sorted(set.intersection(*map(set, found.values())))
    if len(shared) < 2:
        return {}
    return {cache: Line(tuple((x, ms[x]) for x in shared)) for cache, ms in found.items()}


def markdown(rows: list[dict], model: str) -> Iterator[str]:
    """Table lines: slopes, and from how many tokens a cache is faster than BF16."""
    yield f"| {model} | cache | µs per 1k tokens | of BF16's | faster than BF16 from |"
    yield "|---|---|---|---|---|"
    for vary, title in TITLES.items():
        found = lines(rows, model, vary)
        for cache, line in found.items():
            share = f"{line.us_per_1k / found['bf16'].us_per_1k:.2f}"
            cells = (title, cache, f"{line.us_per_1k:.1f}", share, _since(line, found["bf16"]))
            yield f"| {' | '.join(cells)} |"


def _since(line: Line, exact: Line) -> str:
    if line is exact:
        return ""
    if (crossing := line.break_even(exact)) is None:
        return "never"
    tokens, within = crossing
    return f"{tokens / 1024:.1f}k" if within else f"the shortest measured, {tokens / 1024:g}k"
