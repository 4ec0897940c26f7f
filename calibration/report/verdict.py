"""The evaluation in words. Every sentence is derived from the numbers; none is always there."""

from __future__ import annotations

import statistics
from typing import Any

from ...config import DEFAULT_CODEC
from ..methods import family

TWO_BIT = 2.75  # bits; what counts as a 2-bit codec here
_GRADES = (
    (0.005, "next to nothing"),
    (0.02, "little"),
    (0.05, "noticeably"),
    (0.2, "a lot"),
    (float("inf"), "too much to serve"),
)
_MUCH_BETTER = 0.9  # of the KL: worth a sentence


def verdict(evaluation: dict[str, Any]) -> list[str]:
    """Sentences for an operator, most important first."""
    rows = main_rows(evaluation)
    best = best_served(rows)
    if best is None:
        return _recall_only(evaluation)
    exact: dict = next((r for r in evaluation["results"] if r["codec"] == "exact"), {})
    return [
        _cost(best, exact),
        *_rivals(best, rows),
        *_accurate(best, rows),
        *_layers(best),
        *_retrieval(best, exact),
        *_windows(best, evaluation["results"]),
    ]


def main_rows(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with text figures at the smallest context, without the exact cache."""
    rows = [r for r in evaluation["results"] if "kl" in r and not r.get("swept")]
    rows = [r for r in rows if r["codec"] != "exact"]
    first = min((r["context"] for r in rows), default=None)
    return [r for r in rows if r["context"] == first]


def best_served(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The default codec if it was run, else the 2-bit row with the smallest KL, else any."""
    named = [r for r in rows if r["codec"] == DEFAULT_CODEC]
    two_bit = [r for r in rows if r["bits"] <= TWO_BIT and "@" not in r["codec"]] or rows
    return named[0] if named else min(two_bit, key=lambda r: r["kl"], default=None)


def _cost(row: dict[str, Any], exact: dict[str, Any]) -> str:
    grade = next(word for limit, word in _GRADES if row["kl"] < limit)
    text = (
        f"{row['codec']} at {row['bits']:.2f} bits changes this model's predictions {grade}: "
        f"{row['kl']:.4f} nats of KL per token at {row['context']} tokens, the same most likely "
        f"token in {row['top1']:.1%} of positions"
    )
    if exact.get("perplexity"):
        change = row["perplexity"] / exact["perplexity"] - 1
        text += f", perplexity {exact['perplexity']:.2f} to {row['perplexity']:.2f} ({change:+.1%})"
    return text + "."


def _rivals(best: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    others = [
        r
        for r in rows
        if r["bits"] <= best["bits"] + 0.01
        and "@" not in r["codec"]
        and family(r["method"]) != "ours"
        and r["method"] != best["method"]
    ]
    if not others:
        return []
    rival = min(others, key=lambda r: r["kl"])
    if rival["kl"] <= best["kl"]:
        return [f"{rival['codec']} does better on this model: KL {rival['kl']:.4f}."]
    return [
        f"The best other method of no more bits, {rival['codec']}, costs "
        f"{rival['kl'] / max(best['kl'], 1e-9):.1f} times as much (KL {rival['kl']:.4f})."
    ]


def _accurate(best: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    limit = _MUCH_BETTER * best["kl"]
    mine = [r for r in rows if family(r["method"]) == "ours" and "@" not in r["codec"]]
    better = [r for r in mine if r["kl"] < limit]
    if not better:
        return []
    row = min(better, key=lambda r: r["kl"])
    return [f"Try {row['codec']}: KL {row['kl']:.4f} at {row['bits']:.2f} bits."]


def _layers(row: dict[str, Any]) -> list[str]:
    errors = row.get("layer_error") or []
    if len(errors) < 2:
        return []
    order = sorted(range(len(errors)), key=lambda i: -errors[i])
    middle = statistics.median(errors)
    worst = [i for i in order[:3] if errors[i] > 2 * middle]
    if not worst:
        return [f"No layer stands out: attention outputs are off by {middle:.2%} in the median."]
    names = ", ".join(f"{i} ({errors[i]:.1%})" for i in worst)
    several = "s" * (len(worst) > 1)
    suffer = "suffer" if several else "suffers"
    return [
        f"Layer{several} {names} {suffer} most; the median error of attention outputs is "
        f"{middle:.2%}."
    ]


def _retrieval(row: dict[str, Any], exact: dict[str, Any]) -> list[str]:
    found = []
    if "induct" in row and exact.get("induct"):
        found.append(
            f"Copying a random sequence: {row['induct']:.0%} right, {exact['induct']:.0%} with "
            "the exact cache."
        )
    if row.get("recall"):
        cells = (
            f"{v:.0%} at {int(c):,} tokens (exact {exact.get('recall', {}).get(c, 0):.0%})"
            for c, v in row["recall"].items()
        )
        found.append("Recalling facts: " + ", ".join(cells) + ".")
    return found


def _windows(best: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    """The cheapest windows whose KL is within a tenth of the default's."""
    rows = sweep_rows(results, best["method"], best["context"])
    enough = [r for r in rows if r["kl"] <= 1.1 * best["kl"]]
    if len(rows) < 3 or not enough:
        return []
    row = min(enough, key=lambda r: r["window_bytes"])
    if row["window_bytes"] >= best["window_bytes"]:
        return ["Smaller windows than those used cost quality."]
    return [
        f"Windows of {row['sink']} + {row['recent']} tokens are enough here: KL {row['kl']:.4f} "
        f"for {row['window_bytes'] / best['window_bytes']:.0%} of the window memory."
    ]


def sweep_rows(results: list[dict[str, Any]], method: str, context: int) -> list[dict[str, Any]]:
    """Rows of one method at one context, whatever their windows."""
    rows = [r for r in results if r["method"] == method and r["context"] == context and "kl" in r]
    return rows if len({(r["sink"], r["recent"]) for r in rows}) > 2 else []


def _recall_only(evaluation: dict[str, Any]) -> list[str]:
    rows = {r["codec"]: r for r in evaluation["results"]}
    exact = rows.pop("exact", {})
    found = []
    for row in rows.values():
        found += [f"{row['codec']}: {text}" for text in _retrieval(row, exact)]
    return found
