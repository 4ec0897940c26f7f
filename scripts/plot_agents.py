"""Plot what agents get at each number of users, from a bench_agents.py JSON.

    pip install '.[plots]'
    python -m scripts.plot_agents RESULTS.json OUT.png

Requests per second, first tokens, time per token and hit rate against users; dashed: the SLO.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

try:
    import matplotlib
except ImportError:
    sys.exit("plots need matplotlib: pip install '.[plots]'")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"bf16": "tab:blue", "fp8": "tab:orange", "int2": "tab:green"}


def curve(axis: plt.Axes, rows: list[dict], figure: str, style: str, cache: str) -> None:
    points = [(r["users"], r[figure]) for r in rows if r[figure] is not None]
    if points:
        axis.plot(*zip(*points, strict=True), style, color=COLOURS[cache], label=cache)


def plot(data: dict, target: Path) -> None:
    picture, axes = plt.subplots(1, 4, figsize=(15, 3.6))
    rate, first, each, hits = axes
    for cache in dict.fromkeys(r["cache"] for r in data["rows"]):
        rows = sorted((r for r in data["rows"] if r["cache"] == cache), key=lambda r: r["users"])
        curve(rate, rows, "requests_per_s", "o-", cache)
        curve(first, rows, "ttft_p50_s", "o-", cache)
        curve(first, rows, "ttft_p95_s", "o:", cache)
        curve(each, rows, "tpot_p50_ms", "o-", cache)
        curve(each, rows, "tpot_p95_ms", "o:", cache)
        curve(hits, rows, "cache_hit_rate", "o-", cache)
    slo = data["slo"]
    first.axhline(slo["ttft"], color="grey", linestyle="--", linewidth=0.8)
    each.axhline(1000 / slo["tokens_per_s"], color="grey", linestyle="--", linewidth=0.8)
    titles = ("requests per second", "first token, s: median, 95% dotted")
    titles += ("per token, ms: median, 95% dotted", "hit rate")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("users")
        axis.set_xticks(sorted({r["users"] for r in data["rows"]}))
        if axis in (first, each):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    rate.legend(frameon=False, fontsize=8)
    at = ", ".join(f"{cache} {users}" for cache, users in data["users_at_slo"].items())
    title = f"recorded agent sessions, {data['model']}, {data['device']}, memory fraction "
    picture.suptitle(f"{title}{data['mem_fraction']}, {data['date']}; users at the SLO: {at}")
    picture.tight_layout()
    picture.savefig(target, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    data = json.loads(args.source.read_text())
    if not data.get("rows"):
        sys.exit(f"{args.source} has no rows")
    plot(data, args.target)


if __name__ == "__main__":
    main()
