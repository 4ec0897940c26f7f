"""Items of a ``Record`` -> the ``results`` list: one object per codec and context."""

from __future__ import annotations

import math
import statistics
from typing import Any

from .run import Record

_MEANS = ("kl", "top1", "nll", "dnll", "agree")


def results(record: Record) -> list[dict[str, Any]]:
    """Means over documents. Fields: codec, method, sink, recent, swept, context, documents, bits,
    kl, top1, nll, dnll, perplexity, agree, induct, recall {context: accuracy}, layer_error [L],
    head_error [L][H]; induct and recall are those of the codec, whatever the context."""
    contexts = sorted({int(k.split("/")[1]) for k in record.items if k.startswith("text/")})
    found = []
    for label, job in record.jobs.items():
        shared = {"codec": label, **job, **_induction(record, label), **_recall(record, label)}
        rows = [shared | text for c in contexts if (text := _text(record, label, c))]
        found += rows or [shared | {"context": None, "bits": _bits(record, label, "")}]
    return found


def _items(record: Record, label: str, prefix: str) -> list[dict]:
    return [
        by_label[label]
        for key, by_label in record.items.items()
        if key.startswith(prefix) and label in by_label
    ]


def _bits(record: Record, label: str, prefix: str) -> float | None:
    bits = [item["bits"] for item in _items(record, label, prefix)]
    return round(statistics.mean(bits), 4) if bits else None


def _text(record: Record, label: str, context: int) -> dict[str, Any]:
    prefix = f"text/{context}/"
    items = _items(record, label, prefix)
    if not items:
        return {}
    row: dict[str, Any] = {"context": context, "documents": len(items)}
    row["bits"] = _bits(record, label, prefix)
    for name in _MEANS:
        if name in items[0]:
            row[name] = statistics.mean(i[name] for i in items)
    row["perplexity"] = math.exp(row["nll"])
    heads = [[statistics.mean(h) for h in zip(*layer, strict=True)] for layer in zip(
        *(i["error"] for i in items), strict=True
    )]  # fmt: skip
    row["head_error"] = [[float(f"{e:.4g}") for e in layer] for layer in heads]
    row["layer_error"] = [float(f"{statistics.mean(layer):.4g}") for layer in heads]
    return row


def _induction(record: Record, label: str) -> dict[str, float]:
    items = _items(record, label, "induct/")
    return {"induct": statistics.mean(i["induct"] for i in items)} if items else {}


def _recall(record: Record, label: str) -> dict[str, dict[str, float]]:
    right: dict[str, list[int]] = {}
    for key, by_label in record.items.items():
        if key.startswith("recall/") and label in by_label:
            counts = right.setdefault(key.split("/")[1], [0, 0])
            counts[0] += by_label[label]["right"]
            counts[1] += by_label[label]["asked"]
    return {"recall": {c: r / n for c, (r, n) in right.items()}} if right else {}
