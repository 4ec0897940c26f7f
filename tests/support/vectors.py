"""Deterministic inputs of the committed test vectors (numpy, float64).

An LCG gives uniform numbers; sums of four approximate a normal distribution. Each vector file
names its seed and holds the codes a float64 implementation finds; every code is at least 0.0035
of a step away from a rounding tie, so a float32 implementation must reproduce all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

DATA = Path(__file__).parents[1] / "data"


class Vectors(NamedTuple):
    k: np.ndarray  # [T, D]
    rotation: np.ndarray  # [D, D]
    metric: np.ndarray  # [D, D] in the rotated basis
    expected: dict


def _normal(seed: int, *shape: int) -> np.ndarray:
    count = 4 * int(np.prod(shape))
    uniform = np.empty(count)
    state = seed
    for i in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        uniform[i] = (state // 256) / 2**24
    sums = uniform.reshape(-1, 4).sum(1)
    return np.round((sums - 2) * np.sqrt(3), 4).reshape(shape)


def hadamard(d: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.kron([[1, 1], [1, -1]], h)
    return h / np.sqrt(d)


def load(d: int) -> Vectors:
    expected = json.loads((DATA / f"vectors_{d}.json").read_text())
    t, base = expected["T"], expected["seed"] * 7
    mean = 3 * _normal(base + 1, d)
    mix = _normal(base + 2, d, d) / np.sqrt(d)
    k = mean + _normal(base + 3, t, d) @ mix
    axes = _normal(base + 4, d, d) / np.sqrt(d)
    query = axes @ np.diag(2.0 ** (-np.arange(d) * 8 / d)) @ axes.T
    mirror = mean / np.linalg.norm(mean)
    mirror[0] -= 1
    mirror /= np.linalg.norm(mirror)
    rotation = (np.eye(d) - 2 * np.outer(mirror, mirror)) @ hadamard(d)
    return Vectors(k, rotation, rotation.T @ query @ rotation, expected)


def feedback_factor(metric: np.ndarray, damping: float = 0.05) -> np.ndarray:
    """Strictly upper triangular factor of the codec, from the rotated metric."""
    d = len(metric)
    damped = metric + damping * np.trace(metric) / d * np.eye(d)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    return np.triu(upper / np.diag(upper)[:, None], 1)


def codes(packed: list[list[int]]) -> np.ndarray:
    """The files pack channels 4i..4i+3 in byte i, lowest bits first (ours differ)."""
    data = np.array(packed, dtype=np.uint8)
    return np.stack([data >> (2 * j) & 3 for j in range(4)], -1).reshape(len(data), -1)
