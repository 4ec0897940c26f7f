"""Plot inter-token latency against context as lines, from a bench_serving.py JSON.

    pip install '.[plots]'
    python -m scripts.plot_itl scripts/results/serving-h200.json [OUT.png] [--markdown]

Left: one stream on a longer and longer cached prefix; right: more and more streams of one length.
``--markdown`` prints slopes and break-even contexts: from how many tokens a cache is faster than
BF16. Both come from the file's decode rows only.
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
import numpy as np

from scripts.lib.context_cost import TITLES, Line, lines, markdown

COLOURS = {"bf16": "tab:blue", "fp8": "tab:orange", "int2": "tab:green"}


def draw(axis: plt.Axes, found: dict[str, Line], title: str) -> None:
    for cache, line in found.items():
        x, y = np.array(line.points).T
        slope, start = line.fit
        label = f"{cache}: {line.us_per_1k:.1f} µs per 1k"
        if line is not found["bf16"]:
            label += f" ({line.us_per_1k / found['bf16'].us_per_1k:.2f} of BF16's)"
        axis.plot(x / 1024, y, "o", color=COLOURS[cache])
        ends = np.array([0, x.max()])
        axis.plot(ends / 1024, start + slope * ends, color=COLOURS[cache], label=label)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("thousand tokens read per step")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)


def plot(data: dict, model: str, target: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    for axis, (vary, title) in zip(axes, TITLES.items(), strict=True):
        draw(axis, lines(data["rows"], model, vary), title)
    axes[0].set_ylabel("ms per output token")
    figure.suptitle(f"{model}, {data['device']}, dummy weights, {data['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--model", default="qwen3-8b", help="of the file's shapes [qwen3-8b]")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    args = parser.parse_args()
    data = json.loads(args.source.read_text())
    for vary, title in TITLES.items():
        if "bf16" not in lines(data["rows"], args.model, vary):
            sys.exit(f"{args.source}: no decode rows of bf16 for {args.model}: {title}")
    if args.target:
        plot(data, args.model, args.target)
    if args.markdown:
        print("\n".join(markdown(data["rows"], args.model)))


if __name__ == "__main__":
    main()
