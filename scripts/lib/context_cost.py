"""What context costs a decode step: inter-token latency as a line, and where lines cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
