"""Heads of 80, 96 and 112 channels: padded to rows of 128, or rows of their own?

    python -m scripts.eval_head_dim --json OUT [--seeds N]

Random Llamas of two layers (no small model with such heads has real weights), codec ``feedback``
calibrated on ids that they sample themselves; sink 16, recent 64. "padded" is what is served:
Hadamard of 128 over zeros. "native" turns rows of the head's own length, with a cosine transform
where there is no Hadamard matrix. Bits count codes and metadata of history, per channel of the
model. KL (nats) is that of the next token from the exact cache, at positions that read history.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from oscar_sglang.calibration import Plan, QuantisedCache, calibrate, fit
from oscar_sglang.calibration.collect import load_model
from oscar_sglang.kernels import layout
from oscar_sglang.kernels.codec import CODECS
from oscar_sglang.kernels.hadamard import hadamard
from scripts.lib.provenance import header
from scripts.lib.tiny_models import family, random_ids

HEAD_DIMS, CODEC = (80, 96, 112), "feedback"
WINDOWS = layout.WindowLayout(16, 64)
CONTEXT, FIRST = 512, 128


def cosine(d: int) -> torch.Tensor:
    """Orthonormal DCT-II [d, d] float64 (rows: input), its first column constant."""
    n = torch.arange(d, dtype=torch.float64)
    found = torch.cos(math.pi / d * (n[:, None] + 0.5) * n) * math.sqrt(2 / d)
    found[:, 0] = 1 / math.sqrt(d)
    return found


@contextmanager
def native():
    """Every head_dim has a layout of its own."""
    dims = layout.SUPPORTED_HEAD_DIMS + HEAD_DIMS
    with (
        mock.patch.object(layout, "SUPPORTED_HEAD_DIMS", dims),
        mock.patch.object(fit, "hadamard", lambda d: cosine(d) if d in HEAD_DIMS else hadamard(d)),
    ):
        yield


@torch.no_grad()
def measure(folder: Path, head_dim: int, ids: torch.Tensor) -> dict[str, float]:
    """Bits and KL with what ``stored_head_dim`` says now."""
    artifact = calibrate(Plan(folder, tokens=4096), CODEC)
    model = load_model(folder, "cpu")
    exact = model(ids[None]).logits[0, FIRST:].log_softmax(-1)
    with QuantisedCache(model, artifact, WINDOWS):
        found = model(ids[None]).logits[0, FIRST:].log_softmax(-1)
    channels = layout.stored_head_dim(head_dim)
    bits = CODECS[CODEC].layout(1, channels).bits_per_element * channels / head_dim
    return {"bits": bits, "kl": float((exact.exp() * (exact - found)).sum(-1).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="models of each head_dim (default 3)")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", help="of this checkout, where it has no git")
    args = parser.parse_args()
    (ids,), rows = random_ids(CONTEXT), []
    for d in HEAD_DIMS:
        found: dict[str, list[dict]] = {"padded": [], "native": []}
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as work:
                folder = family("llama-64", Path(work), sharp=True, seed=seed, head_dim=d)
                found["padded"].append(measure(folder, d, ids))
                with native():
                    found["native"].append(measure(folder, d, ids))
        for form, results in found.items():
            kl = [r["kl"] for r in results]
            row = {"head_dim": d, "form": form, "bits": results[0]["bits"]}
            row |= {"kl": statistics.mean(kl), "kl_of_models": kl}
            rows.append(row)
            print(f"{d:4} {form:7} {row['bits']:.2f} bits, KL {row['kl']:.5f}", flush=True)
    head = {
        **header("CPU", args.commit, ("torch", "transformers")),
        "baselines": ["transformers, float32, exact cache"],
    }
    args.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
