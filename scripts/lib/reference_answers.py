"""Answers of ``forced_decode.traffic`` in an .npz that is small enough to travel with the code."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def save(path: Path, cases: dict, top: int = 64) -> None:
    """The ``top`` likeliest tokens of every step."""
    arrays = {}
    for name, case in cases.items():
        arrays[f"{name}.cached"] = np.array(case["cached"])
        for i, answer in enumerate(case["answers"]):
            steps = [sorted(d.items(), key=lambda x: -x[1])[:top] for d in answer]
            arrays[f"{name}.{i}.tokens"] = np.array([[t for t, _ in s] for s in steps], np.uint32)
            arrays[f"{name}.{i}.logprobs"] = np.array([[p for _, p in s] for s in steps], "f4")
    np.savez_compressed(path, **arrays)


def load(path: Path) -> dict:
    with np.load(path) as z:
        cases = {k.removesuffix(".cached"): {"cached": z[k].tolist()} for k in z if "cached" in k}
        for name, case in cases.items():
            case["answers"] = [
                [
                    dict(zip(t, p, strict=True))
                    for t, p in zip(
                        z[f"{name}.{i}.tokens"].tolist(),
                        z[f"{name}.{i}.logprobs"].tolist(),
                        strict=True,
                    )
                ]
                for i in range(len(case["cached"]))
            ]
    return cases
