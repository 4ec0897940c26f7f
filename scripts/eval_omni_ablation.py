"""Which part of codec ``omni`` does the work? OScaR's ablation on a real model's keys and values.

    python -m scripts.eval_omni_ablation --model DIR --tokens NPZ --json OUT [--documents N]

For both parts, either and none: KL from the exact cache with keys and values coded, and with the
keys alone; and what is left of the keys, |k - k_hat|^2 / |k|^2, and of the logits' variation over
tokens. Per-channel blocks of 128 tokens throughout; sink 64, recent 256; each document's last 129
rows on all before them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from oscar_sglang.calibration.collect import load_model
from oscar_sglang.calibration.continuation import Cache, Document, capture
from oscar_sglang.calibration.evaluation.units import ROWS, compare
from oscar_sglang.calibration.method import Encoded
from oscar_sglang.calibration.methods import ABLATIONS, METHODS
from oscar_sglang.calibration.served import Omni
from scripts.lib.provenance import header

SINK, RECENT = 64, 256
PARTS = {
    "both": METHODS["omni"],
    "rotation": ABLATIONS["omni-rotation"],
    "scaling": ABLATIONS["omni-scaling"],
    "neither": ABLATIONS["omni-channels"],
}


class KeysOnly(Omni):
    """Keys of ``omni``, values as they are."""

    def encode(self, params, k, v, first=0) -> Encoded:
        coded = super().encode(params, k, v, first)
        return Encoded(coded.k, (*coded.v, v))

    def decode(self, params, encoded):
        return super().decode(params, Encoded(encoded.k, encoded.v[:2]))[0], encoded.v[2]


def key_errors(doc: Document, method: Omni, end: int) -> tuple[float, float]:
    """Relative squared error of the keys of positions [SINK, end) and of the logits of the last
    queries on them, each query's mean left out (softmax does not see it); means over layers."""
    keys, logits = [], []
    for k, v, q in zip(doc.k, doc.v, doc.q, strict=True):
        k, v = k[SINK:end].float(), v[SINK:end].float()
        error = k - method.decode(None, method.encode(None, k, v, SINK))[0]
        grouped = q.float().view(k.shape[1], -1, *q.shape[1:])  # [Hk, G, n, D]
        off, true = (torch.einsum("hgnd,thd->hgnt", grouped, x) for x in (error, k))
        off, true = (x - x.mean(-1, keepdim=True) for x in (off, true))
        keys.append(float(error.square().sum() / k.square().sum()))
        logits.append(float(off.square().sum() / true.square().sum()))
    return statistics.mean(keys), statistics.mean(logits)


@torch.no_grad()
def measure(model, ids: torch.Tensor) -> dict[str, dict[str, float]]:
    """Figures of one document by part."""
    doc, found = capture(model, ids, ROWS), {}
    layers = [None] * len(doc.k)
    for part, method in PARTS.items():
        alone = KeysOnly(method.name, method.summary, **method.options)
        kl = {}
        for name, judged in (("kl", method), ("kl_keys_only", alone)):
            cache = Cache(doc, judged, layers, SINK, RECENT, ROWS)
            kl[name] = compare(doc.logits, cache.logits(ids[None, -ROWS:])[0], ids[-ROWS:])["kl"]
        keys, logits = key_errors(doc, method, cache.sealed)
        found[part] = {**kl, "key_error": keys, "logit_error": logits}
        print(part, {k: round(x, 4) for k, x in found[part].items()}, flush=True)
    return found


def main() -> None:
    import numpy as np

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="NPZ whose test_* are documents")
    parser.add_argument("--documents", type=int, help="the first N of them (default: all)")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", help="of this checkout, where it has no git")
    args = parser.parse_args()
    with np.load(args.tokens) as z:
        names = [k for k in z.files if k.startswith("test_")][: args.documents]
        texts = {k: torch.from_numpy(z[k][: args.context].astype(np.int64)) for k in names}
    model, documents = load_model(args.model, "cpu"), {}
    for name, ids in texts.items():
        print(name, flush=True)
        documents[name] = measure(model, ids)
    rows = [
        {"part": p, **{k: statistics.mean(d[p][k] for d in documents.values()) for k in figures}}
        for p, figures in next(iter(documents.values())).items()
    ]
    head = {
        **header("CPU", args.commit, ("torch", "transformers")),
        "baselines": ["transformers, float32, exact cache"],
    }
    args.json.write_text(
        json.dumps({**head, "rows": rows, "documents": documents}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
