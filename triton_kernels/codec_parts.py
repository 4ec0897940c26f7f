"""What a served codec is made of, and the description that composes it.

A codec turns a rotated K or V row (``row @ R``) into D codes and a few bytes, and back. It is a
``CodecSpec``: range rules (``RangeRule``), a ``Search`` for K's codes, a ``Metadata`` for what is
stored beside codes, and a few facts about it. Tensors of the artifact, bytes of a slot, the CPU
server, the evaluator, tables and charts and what the kernels compile follow from these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from .codec_affine import (
    RangeRule,
    Rows,
    decode,
    feedback_codes,
    pack,
    round_codes,
    to_half,
    unpack,
    value_range,
)
from .layout import BITS, HistoryLayout


class LayerParams(NamedTuple):
    """Device tensors of one layer's codec; None where ``CodecSpec.tensors`` does not name it.

    r_k, r_v  [Hk, D, D] float32  applied on the right of row vectors; orthogonal, but for r_k of
                                  ``position``
    factor    [Hk, D, D] float32  strictly upper triangular, row j = U[j, j+1:] / U[j, j] for
                                  G^-1 = U^T U
    metric    [Hk, D, D] float32  G, the query metric in the rotated basis, symmetric
    grid      [Hk, 2, 3] float32  metadata grid of K and of V (``codec_compact``)
    q_k       [Hk, D, D] float32  r_k^-T, applied to queries; where it is None they take r_k
    mean      [Hk, D]    float32  ``codec_position.tile_mean``
    """

    r_k: torch.Tensor
    r_v: torch.Tensor
    factor: torch.Tensor | None = None
    metric: torch.Tensor | None = None
    grid: torch.Tensor | None = None
    q_k: torch.Tensor | None = None
    mean: torch.Tensor | None = None

    @property
    def queries(self) -> torch.Tensor:
        """[Hk, D, D] that turns queries into the basis of rotated keys."""
        return self.r_k if self.q_k is None else self.q_k

    @property
    def k_back(self) -> torch.Tensor:
        """[Hk, D, D] that turns rotated keys back into the model's basis."""
        return self.queries.transpose(-1, -2)

    def to(self, device) -> LayerParams:
        return LayerParams._make(None if t is None else t.to(device) for t in self)


RoundMeta = Callable[[torch.Tensor], torch.Tensor]  # (step, lo) [T, Hk, 2] as it can be stored


@dataclass(frozen=True)
class Search(ABC):
    """How K's codes are chosen; V's are rounded.

    number   by which the store kernels know it
    tensors  fields of ``LayerParams`` that it reads, [Hk, D, D] each
    """

    number: ClassVar[int]
    tensors: ClassVar[tuple[str, ...]] = ()

    def encode(
        self, y: torch.Tensor, rule: RangeRule, params: LayerParams, storable: RoundMeta
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y [T, Hk, D] f32 -> codes [T, Hk, D] uint8 and storable (step, lo) [T, Hk, 2]."""
        meta = storable(value_range(y, rule))
        return self.codes(y, meta, params), meta

    @abstractmethod
    def codes(self, y: torch.Tensor, meta: torch.Tensor, params: LayerParams) -> torch.Tensor:
        """uint8 codes for this (step, lo)."""


@dataclass(frozen=True)
class Round(Search):
    """Each channel by itself."""

    number = 0

    def codes(self, y, meta, params):
        return round_codes(y, meta)


@dataclass(frozen=True)
class Feedback(Search):
    """Errors are spread over the channels still to come (``codec_affine``)."""

    number = 1
    tensors = ("factor",)

    def codes(self, y, meta, params):
        return feedback_codes(y, meta, params.factor)


@dataclass(frozen=True)
class Metadata(ABC):
    """What is stored beside a row's codes, and so how a row is encoded and decoded.

    name     of the kernels' form (``tile``, ``common.cu``), in upper case there
    form     its number; None: there are no kernels, and only the reference (a CPU) serves it
    numbers  metadata of a K row and of a V row, ``number_bytes`` each
    block    tokens whose keys are encoded together (``encode_block``)
    mixed    whether K and V of a layer may have 2 or 4 bits each
    proven   whether the tests of all its kernels have passed on a GPU of ``selftest.PROVEN_ON``
    choices  options of an artifact that have fixed values, the default first
    """

    name: ClassVar[str]
    form: ClassVar[int | None] = None
    numbers: ClassVar[tuple[int, int]] = (2, 2)
    number_bytes: ClassVar[int] = 2
    block: ClassVar[int] = 1
    mixed: ClassVar[bool] = False
    proven: ClassVar[bool] = False
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @abstractmethod
    def encode_k(self, codec: CodecSpec, params: LayerParams, y, positions) -> Rows: ...

    @abstractmethod
    def encode_v(self, codec: CodecSpec, params: LayerParams, y) -> Rows: ...

    @abstractmethod
    def decode_k(self, codec: CodecSpec, params: LayerParams, rows, positions, channels): ...

    @abstractmethod
    def decode_v(self, codec: CodecSpec, params: LayerParams, rows): ...

    def encode_block(
        self, k: torch.Tensor, v: torch.Tensor, sinks: int
    ) -> tuple[Rows, Rows, torch.Tensor]:
        """Of a block codec: rows and channels [Hk, D, 2] of the rotated k, v [n, Hk, D] float32 of
        one block, n = ``block`` or fewer; the first ``sinks`` are sink tokens."""
        raise NotImplementedError(f"metadata {self.name} have no blocks")

    def tensors(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shape per KV head of each field of ``LayerParams`` that it needs."""
        return {}

    def chosen(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Every one of ``choices`` as an artifact's ``options`` have it, else its default."""
        return {name: options.get(name, values[0]) for name, values in self.choices.items()}

    def configured(self, options: Mapping[str, Any]) -> Metadata:
        """As an artifact with these ``options`` has it."""
        return self

    def layer_specs(
        self, codec: CodecSpec, layers: int, options: Mapping[str, Any]
    ) -> list[CodecSpec]:
        """``codec`` as each of ``layers`` has it. Raises ValueError where ``options`` say none."""
        return [codec] * layers

    def layer_options(self, specs: Sequence[CodecSpec]) -> dict[str, Any]:
        """The options from which ``layer_specs`` makes ``specs``."""
        return {}

    def check(self, head_dim: int) -> None:
        """Raises ValueError for what does not belong to such heads."""
        return None

    def neutral_options(self, head_dim: int, layers: int) -> dict[str, Any]:
        """Options of an artifact without calibration."""
        return {}

    def kernel_floats(self, head_dim: int) -> int:
        """Float32 numbers a layer and KV head that kernels derive from ``tensors``."""
        return 0

    def table_bytes(self, head_dim: int, context: int) -> int:
        """Bytes that they derive once for all layers, for requests of ``context`` tokens."""
        return 0


@dataclass(frozen=True)
class Affine(Metadata):
    """step and lo in FP16."""

    name = "affine"
    form = 0
    proven = True

    def encode_k(self, codec, params, y, positions):
        grid = _grid(params, 0)
        codes, meta = codec.search.encode(
            y, codec.k_range, params, lambda meta: self.storable(meta, grid)
        )
        return Rows(pack(codes), self.written(meta, grid))

    def encode_v(self, codec, params, y):
        grid, levels = _grid(params, 1), 2**codec.v_bits - 1
        meta = self.storable(value_range(y, codec.v_range, levels), grid)
        return Rows(pack(round_codes(y, meta, levels), codec.v_bits), self.written(meta, grid))

    def decode_k(self, codec, params, rows, positions, channels):
        return self._decoded(rows, codec.k_bits, _grid(params, 0))

    def decode_v(self, codec, params, rows):
        return self._decoded(rows, codec.v_bits, _grid(params, 1))

    def _decoded(self, rows: Rows, bits: int, grid: torch.Tensor | None) -> torch.Tensor:
        return decode(unpack(rows.packed, bits), self.read(rows.meta, grid))

    def storable(self, meta: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
        """(step, lo) [T, Hk, 2] rounded to what can be stored, float32."""
        return to_half(meta).float()

    def written(self, meta: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
        """Storable (step, lo) as the numbers a slot holds."""
        return meta.half()

    def read(self, written: torch.Tensor, grid: torch.Tensor | None) -> torch.Tensor:
        """The reverse of ``written``, of any float dtype."""
        return written


def _grid(params: LayerParams, side: int) -> torch.Tensor | None:
    """[Hk, 3] of K (side 0) or V (1); None without metadata bytes."""
    return None if params.grid is None else params.grid[:, side]


@dataclass(frozen=True)
class CodecSpec:
    """A served codec.

    when    to choose it, for a table
    source  where it is published
    family  ``ours``, or ``published`` elsewhere: how charts and verdicts tell it from others
    fit     how calibration finds its bases (``calibration.fit``): ``best`` of several a head,
            ``mean``, ``oscar``, ``before_rope``, or ``none``, where there is nothing to measure
    """

    name: str
    summary: str
    k_range: RangeRule
    v_range: RangeRule
    search: Search = Round()
    meta: Metadata = Affine()
    when: str = ""
    source: str = "here"
    family: str = "ours"
    fit: str = "best"
    k_bits: int = BITS  # of a layer
    v_bits: int = BITS

    @property
    def block(self) -> int:
        """Tokens that are encoded together."""
        return self.meta.block

    @property
    def needs_data(self) -> bool:
        """Whether calibration has anything to measure."""
        return self.fit != "none"

    @property
    def k_feedback(self) -> bool:
        """Whether K's codes need the feedback factor."""
        return "factor" in self.search.tensors

    def ring_tokens(self, recent: int) -> int:
        """Rows of a ring that leaves the last ``recent`` tokens exact: history ends at a block, so
        up to block - 1 tokens more are not in it."""
        return recent + self.block - 1

    def layout(self, kv_heads: int, head_dim: int) -> HistoryLayout:
        m = self.meta
        return HistoryLayout(
            kv_heads, head_dim, *m.numbers, m.number_bytes, m.block, self.k_bits, self.v_bits
        )

    def tensors(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shape per KV head of each float32 tensor a layer keeps, by field of ``LayerParams``."""
        square = (head_dim, head_dim)
        return {
            **dict.fromkeys(("r_k", "r_v", *self.search.tensors), square),
            **self.meta.tensors(head_dim),
        }

    def encode_k(
        self, params: LayerParams, k_rot: torch.Tensor, positions: torch.Tensor | None = None
    ) -> Rows:
        """Encode rotated keys [T, Hk, D] float32 of tokens at ``positions`` [T] int64 of their
        requests; only ``position`` asks for those. Raises ValueError for a block codec, whose keys
        are encoded together (``Metadata.encode_block``)."""
        return self.meta.encode_k(self, params, k_rot, positions)

    def encode_v(self, params: LayerParams, v_rot: torch.Tensor) -> Rows:
        """Encode rotated values [T, Hk, D] float32."""
        return self.meta.encode_v(self, params, v_rot)

    def decode_k(
        self,
        params: LayerParams,
        rows: Rows,
        positions: torch.Tensor | None = None,
        channels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Keys [T, Hk, D] float32 of tokens at ``positions`` [T] int64, still rotated; ``channels``
        [T, Hk, D, 2]: those of each token's block, of a block codec."""
        return self.meta.decode_k(self, params, rows, positions, channels)

    def decode_v(self, params: LayerParams, rows: Rows) -> torch.Tensor:
        """Values [T, Hk, D] float32, still rotated."""
        return self.meta.decode_v(self, params, rows)
