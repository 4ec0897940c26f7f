"""The interface of everything that can be judged: served codecs and published baselines alike.

    params  = method.fit(moments)                 one layer
    encoded = method.encode(params, k, v, first)  k, v [T, Hk, D] of positions first, first + 1, ..
    k_hat, v_hat = method.decode(params, encoded) [T, Hk, D] float32 in the model's basis

``Encoded`` holds the tensors a cache would hold, so that ``bits`` counts bytes, not a formula.
A method with ``block`` > 1 seals tokens in blocks aligned to position 0: ``encode`` gets whole
blocks (only the first may start inside one, after the sink window).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .stats import Moments


@dataclass(frozen=True)
class Encoded:
    """Stored form of K and V rows of one layer, from position ``first`` on: any tensors, all of
    them counted."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    first: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def bits(self, elements: int) -> float:
        """Bits per element, for ``elements`` numbers of K and V together."""
        return 8 * self.num_bytes / elements


class Method(ABC):
    """A codec of whole K/V rows; subclasses are stateless.

    family  as ``CodecSpec.family``, or ``baseline``
    mixed   whether layers may have different widths (``fit_model``)
    """

    block = 1
    needs_stats = True
    family = "baseline"
    mixed = False

    def __init__(self, name: str, summary: str) -> None:
        self.name = name
        self.summary = summary

    @abstractmethod
    def fit(self, moments: Moments | None) -> Any:
        """Parameters of one layer; ``moments`` may be None unless ``needs_stats``."""

    def fit_model(
        self, moments: Sequence[Moments | None], scores: Any = None, context: int = 0
    ) -> list[Any]:
        """Parameters of every layer. ``scores`` (``widths``) and ``context`` are for a method that
        chooses with all layers in view, or for a context length."""
        return [self.fit(m) for m in moments]

    @abstractmethod
    def encode(self, params: Any, k: torch.Tensor, v: torch.Tensor, first: int = 0) -> Encoded: ...

    @abstractmethod
    def decode(self, params: Any, encoded: Encoded) -> tuple[torch.Tensor, torch.Tensor]: ...


class Side(ABC):
    """A codec of K alone or of V alone; data-free unless it says otherwise."""

    block = 1
    needs_stats = False

    def fit(self, moments: Moments | None) -> Any:
        """Parameters of one layer; None for data-free codecs."""
        return None

    @abstractmethod
    def encode(self, params: Any, x: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
        """x [T, Hk, D] float32 of positions first.. -> what is stored."""

    @abstractmethod
    def decode(self, params: Any, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The stored tensors -> [T, Hk, D] float32 in the model's basis."""


class TwoSided(Method):
    """A method whose K and V are coded independently."""

    def __init__(self, name: str, summary: str, k: Side, v: Side) -> None:
        super().__init__(name, summary)
        self.sides = k, v
        self.block = max(k.block, v.block)
        self.needs_stats = k.needs_stats or v.needs_stats

    def fit(self, moments: Moments | None) -> tuple[Any, Any]:
        return tuple(side.fit(moments) for side in self.sides)

    def encode(self, params, k, v, first=0) -> Encoded:
        rows = zip(self.sides, params, (k, v), strict=True)
        return Encoded(*(side.encode(p, x.float(), first) for side, p, x in rows))

    def decode(self, params, encoded):
        rows = zip(self.sides, params, (encoded.k, encoded.v), strict=True)
        return tuple(side.decode(p, parts) for side, p, parts in rows)


def block_pieces(first: int, length: int, block: int) -> list[slice]:
    """Slices of rows first .. first + length that share an aligned block of positions."""
    start = (-first) % block or block
    cuts = list(range(start, length, block))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True) if a < b]
