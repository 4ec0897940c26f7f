"""The table of codecs in calibration/README.md, from the memory plan and committed measurements.

    python -m scripts.codec_table

Bits per element count everything a request costs: its history rows and its exact windows (sink 64,
recent 256), for the shape of Qwen3-8B. KL is that of the served pool (``eval_pool.py``), times are
those of ``bench_kernels.py``: attention of a decode step, and a store that writes 1 or 8192 tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from oscar_sglang.kernels.codec import CODECS
from oscar_sglang.kernels.layout import MemoryPlan, WindowLayout

RESULTS = Path(__file__).parent / "results"
CONTEXTS = (8192, 32768, 131072)
DECODE = (32, 32768)  # batch, context
STORED = (1, 8192)  # tokens


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


def load(name: str):
    return json.loads((RESULTS / name).read_text())


def microseconds(codec: str, rows: list[dict]) -> str:
    """Of a layer: attention, and stores that end no block or, of a prompt, as many as it fills."""
    # Attention reads nothing of a codec but its codes and metadata.
    read = {"affine": "any", "compact": "compact", "scale": "lloyd", "channel": "omni"}
    case = {"codec": read[CODECS[codec].meta.name], "op": "decode_attention", "gqa": 4}
    (attend,) = (
        r["us"] for r in rows if case.items() <= r.items() and (r["batch"], r["context"]) == DECODE
    )
    store = []
    for tokens in STORED:
        case = {"codec": codec, "op": "store", "batch": tokens}
        store.append(min(r["us"] for r in rows if case.items() <= r.items()))
    return f"{attend:.0f} | " + " / ".join(f"{x:.1f}" if x < 10 else f"{x:.0f}" for x in store)


def table() -> list[str]:
    """Markdown lines, one a codec."""
    quality = {r["codec"]: r for r in load("pool-quality-smollm2.json")}
    rows = load("kernels-h200.json")["rows"]
    head = ("codec", "bits at 8k / 32k / 128k", "KL", "top-1", "attend, µs", "store, µs")
    lines = ["| " + " | ".join((*head, "choose it when")) + " |", "|---|---|---|---|---|---|---|"]
    for name in filter(quality.__contains__, CODECS):  # measured so far
        cost = " / ".join(f"{bits(name, n):.2f}" for n in CONTEXTS)
        kl, top1 = quality[name]["kl"], quality[name]["top1"]
        shown = (cost, f"{kl:.4f}", f"{top1:.1%}", microseconds(name, rows), CODECS[name].when)
        lines.append(f"| `{name}` | " + " | ".join(shown) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
