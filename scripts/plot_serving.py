"""Plot speed-ups of the 2-bit cache over BF16 and FP8 per scenario, from a bench_serving.py JSON.

    pip install '.[plots]'
    python -m scripts.plot_serving scripts/results/serving-h200.json [OUT.png] [--markdown]

``--markdown`` prints the table of scripts/README.md. Times count inversely: more than 1 is faster.
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

from scripts.lib.serving_rows import BASELINES, label, markdown, ordered

COLOURS = {"bf16": "tab:blue", "fp8": "tab:orange"}
HEIGHT = 0.38  # of a bar; two share a line


def draw(axis: plt.Axes, rows: list[dict], model: str) -> None:
    """One line a case, one bar a baseline, on a log axis: 2x and 1/2x are as far from 1."""
    for i, row in enumerate(rows):
        for k, cache in enumerate(BASELINES):
            if (ratio := row.get("speedup_" + cache)) is None:
                continue
            at = i + (k - 0.5) * HEIGHT
            axis.barh(at, ratio - 1, HEIGHT, left=1, color=COLOURS[cache])
            side, shift = ("left", 1.02) if ratio >= 1 else ("right", 0.98)
            axis.text(ratio * shift, at, f"{ratio:.2f}", va="center", ha=side, fontsize=7)
    axis.axvline(1, color="grey", linewidth=0.8)
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16, 32]
    found = [r["speedup_" + c] for r in rows for c in BASELINES if "speedup_" + c in r]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axis.set_xlim(min(0.8, min(found) / 1.4), max(2, max(found) * 1.8))
    axis.set_yticks(range(len(rows)), [label(r) for r in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_title(model, fontsize=10)


def plot(data: dict, target: Path) -> None:
    with_speedup = [r for r in ordered(data["rows"]) if any(k.startswith("speedup") for k in r)]
    if not with_speedup:
        sys.exit("no int2 row has a baseline in this file")
    models = sorted({r["model"] for r in with_speedup})
    groups = [[r for r in with_speedup if r["model"] == m] for m in models]
    height = 1.2 + 0.32 * max(map(len, groups))
    figure, axes = plt.subplots(1, len(models), figsize=(6.2 * len(models), height), squeeze=False)
    for axis, rows, model in zip(axes[0], groups, models, strict=True):
        draw(axis, rows, model)
    bars = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[c]) for c in BASELINES]
    axes[0][0].legend(bars, ["over BF16", "over FP8"], frameon=False, fontsize=8)
    title = f"2-bit KV cache, serving, {data['device']}, dummy weights, {data['date']}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    args = parser.parse_args()
    data = json.loads(args.source.read_text())
    if args.target:
        plot(data, args.target)
    if args.markdown:
        print("\n".join(markdown(data["rows"])))


if __name__ == "__main__":
    main()
