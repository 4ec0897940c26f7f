"""The README's table of codecs, from the memory plan and the committed measurements.

    python scripts/codec_table.py

Bits per element count everything a request costs: its history rows and its exact windows (sink 64,
recent 256), for the shape of Qwen3-8B. KL is that of the served pool (``eval_pool.py``).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from oscar_sglang.kernels.codec import CODECS
from oscar_sglang.kernels.layout import MemoryPlan, WindowLayout

RESULTS = Path(__file__).parent / "results"
CONTEXTS = (8192, 32768, 131072)
WHEN = {
    "feedback": "default; store and attention in CUDA",
    "accurate": "retrieval matters more than speed: a written key takes about 5x the multiply-adds",
    "compact": "6% more tokens than `feedback`",
    "accurate-compact": "both of the above: the least error at the fewest bits, the slowest store",
    "aligned": "the fastest store: no error feedback",
    "oscar": "comparing with the paper, or rotations imported from RotationZoo",
    "omni": "comparing with OScaR; pages of 128 tokens, no calibration",
    "lloyd": "comparing; few bits without a calibrated grid",
}


def bits(codec: str, context: int) -> float:
    """Bits per K/V element of one request of ``context`` tokens of Qwen3-8B."""
    spec, windows = CODECS[codec], WindowLayout()
    plan = MemoryPlan(
        layers=36,
        history=spec.layout(kv_heads=8, head_dim=128),
        windows=replace(windows, n_recent=spec.ring_tokens(windows.n_recent)),
        rows=2,
        sink_cache_rows=0,
        scratch_tokens=0,
        itemsize=2,
    )
    return plan.effective_bits(context)


def table() -> list[str]:
    """Markdown lines, one a codec."""
    measured = {
        r["codec"]: r for r in json.loads((RESULTS / "pool-quality-smollm2.json").read_text())
    }
    lines = [
        "| codec | bits at 8k / 32k / 128k | KL | top-1 | choose it when |",
        "|---|---|---|---|---|",
    ]
    for name in CODECS:
        row = measured[name]
        cost = " / ".join(f"{bits(name, n):.2f}" for n in CONTEXTS)
        quality = f"{row['kl']:.4f} | {row['top1']:.1%}"
        lines.append(f"| `{name}` | {cost} | {quality} | {WHEN[name]} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
