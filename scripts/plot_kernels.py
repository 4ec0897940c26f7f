"""Plot speed-up of decode attention over BF16 against context, from a bench_kernels.py JSON.

pip install '.[plots]'
python -m scripts.plot_kernels scripts/results/kernels-h200.json OUT.png
"""

import json
import sys

try:
    import matplotlib
except ImportError:
    sys.exit("plots need matplotlib: pip install '.[plots]'")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from oscar_sglang.kernels.layout import HistoryLayout, WindowLayout


def ceiling(context: int) -> float:
    """BF16 bytes over ours at head_dim 128: what equal bandwidth would give."""
    bf16, packed = 4 * 128, HistoryLayout(1, 128).bytes_per_slot
    exact = min(context, WindowLayout().tokens)
    return context * bf16 / (exact * bf16 + (context - exact) * packed)


def main(source: str, target: str) -> None:
    data = json.load(open(source))
    rows = [
        r for r in data["rows"]
        if r["op"] == "decode_attention" and r["gqa"] == 4 and r["page_size"] == 16
        and r["kernel"] != "triton" and r["codec"] == "any" and "speedup_bf16" in r
    ]  # fmt: skip
    figure, axis = plt.subplots(figsize=(7, 4.2))
    for batch in sorted({r["batch"] for r in rows}):
        line = sorted((r["context"], r["speedup_bf16"]) for r in rows if r["batch"] == batch)
        axis.plot(*zip(*line, strict=True), marker="o", label=f"batch {batch}")
    contexts = sorted({r["context"] for r in rows})
    axis.plot(contexts, [ceiling(c) for c in contexts], "k--", label="byte ceiling")
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{c // 1024}k" for c in contexts])
    axis.set(xlabel="context (tokens)", ylabel="speed-up over the best BF16", ylim=0)
    axis.set_title(f"2-bit decode attention, {data['device']}, {data['date']}", fontsize=10)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=140)


if __name__ == "__main__":
    main(*sys.argv[1:3])
