"""Codec ``position``: K's mean before RoPE is subtracted where each token stands.

After RoPE K's mean turns with the position, so a codec that is fitted to it drifts with the
context. Here a key is coded without the share of the mean that it holds. With m the mean key before
RoPE of a KV head, averaged over the ``TILE`` positions of a tile and turned to the tile's first
position (``tile_mean``), and ``w = RoPE(m)`` at the first position of the key's tile:

    a     = (k . w) / |m|^2                        stored, where other codecs store lo
    y     = (k - a w) A                            A need not be orthogonal; queries take A^-T
    step  = 2 spread rms(y) / levels               levels 3 or 15: a layer's K has 2 or 4 bits
    codes = error feedback (``codec_affine``) between -levels/2 step and levels/2 step
    step *= (y G y^T) / (decoded G y^T)            within 1/MAX_GAIN .. MAX_GAIN: logits do not
                                                   shrink; G is E[q^T q] in A's basis
    decoded = (codes - levels/2) step + a w A

V is rounded between its row's shrunk minimum and maximum. step, a and V's (step, lo) are a byte
each, step in 1/32 octaves (``codec_compact``); each is rounded before what follows uses it.

RoPE is taken from ``Rope.table``, cosines and sines in FP16, and w A from ``lift``, an FP16 matrix:
the same numbers for every reader and writer, so that their rounding only makes w another vector and
is no error. A head whose mean does not turn (``Rope`` of zeros) has a constant w.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, replace

import torch

from .codec_affine import RangeRule, Rows, feedback_codes, pack, unpack
from .codec_compact import Compact, decode_meta, encode_meta
from .codec_parts import CodecSpec, Feedback

TILE = 16
PER_OCTAVE = 32
MAX_GAIN = 1.25
SPREADS = {2: 1.6, 4: 2.7}  # half the range of K's codes, in rms of the row; by bits
V_RATIOS = {2: 0.75, 4: 1.0}  # of V's minimum to maximum; by bits


@dataclass(frozen=True)
class Rope:
    """How a layer's K turns with the position: channel ``pairs[i]`` and ``pairs[i + D/2]`` by
    ``theta[i]`` radians a token (the scaled frequency; 0 for channels that do not turn).

    theta  D/2 numbers     pairs  D channels, each once
    """

    theta: tuple[float, ...]
    pairs: tuple[int, ...]

    def __post_init__(self) -> None:
        d = len(self.pairs)
        if 2 * len(self.theta) != d or sorted(self.pairs) != list(range(d)):
            raise ValueError("RoPE needs a frequency for each pair of channels, each channel once")

    @classmethod
    def of(cls, theta, head_dim: int, adjacent: bool = False) -> Rope:
        """``theta``: frequencies of the first ``2 len(theta)`` channels, which are pairs of
        neighbours, or (i, i + len(theta)); the channels after them do not turn."""
        n, rest = len(theta), list(range(2 * len(theta), head_dim))
        firsts = list(range(0, 2 * n, 2)) if adjacent else list(range(n))
        seconds = [i + 1 for i in firsts] if adjacent else [i + n for i in firsts]
        half = len(rest) // 2
        pairs = (*firsts, *rest[:half], *seconds, *rest[half:])
        return cls((*map(float, theta), *[0.0] * half), pairs)

    @classmethod
    def still(cls, head_dim: int) -> Rope:
        """No RoPE."""
        return cls.of((), head_dim)

    def table(self, tiles: int) -> torch.Tensor:
        """[tiles, D] float16: cosines and sines of ``theta`` at the first position of each tile."""
        return self.rows(torch.arange(tiles)).half()

    def rows(self, tiles: torch.Tensor) -> torch.Tensor:
        """Rows of ``table``, float64 on the device of ``tiles`` [n] int64."""
        angle = TILE * tiles.double()[:, None] * self._theta(tiles.device)
        return torch.cat([angle.cos(), angle.sin()], -1).half().double()

    def turn(self, x: torch.Tensor, positions: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Rotate x [T, ..., D] at ``positions`` [T], or take the rotation back; float64."""
        angle = positions.double()[:, None] * self._theta(x.device)
        angle = angle.view(len(x), *[1] * (x.ndim - 2), -1)
        return self._rotated(x.double(), angle.cos(), -angle.sin() if back else angle.sin())

    def mean_rows(self, mean: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """w [n, Hk, D] float64 of the tiles [n] int64; ``mean`` [Hk, D]."""
        cos, sin = self.rows(tiles)[:, None].chunk(2, -1)
        return self._rotated(mean.double()[None], cos, sin)

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x[..., self._index(x.device)].chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return turned[..., self._index(x.device).argsort()]

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a handful of small frozen objects
    def _theta(self, device) -> torch.Tensor:
        return torch.tensor(self.theta, dtype=torch.float64, device=device)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def _index(self, device) -> torch.Tensor:
        return torch.tensor(self.pairs, device=device)


def table_bytes(head_dim: int, context: int) -> int:
    """Of ``Rope.table`` for requests of ``context`` tokens."""
    return -(-context // TILE) * head_dim * 2


def mean_matrix(rope: Rope, mean: torch.Tensor) -> torch.Tensor:
    """N [Hk, D, D] float64 with ``w = table[tile] @ N``, and so ``q . w = table[tile] . (q N^T)``;
    ``mean`` [Hk, D]."""
    h = mean.shape[-1] // 2
    index = rope._index(mean.device)
    first, second = mean.double()[:, index].chunk(2, -1)
    n = torch.zeros(len(mean), 2 * h, 2 * h, dtype=torch.float64, device=mean.device)
    i = torch.arange(h, device=mean.device)
    n[:, i, index[:h]], n[:, i, index[h:]] = first, second
    n[:, h + i, index[:h]], n[:, h + i, index[h:]] = -second, first
    return n


def lift_of(rope: Rope, mean: torch.Tensor, r_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lift [Hk, D, D] float16 and unit [Hk] float32 with ``w A = table[tile] @ lift * unit``.

    unit is a power of two that brings the largest element into [2^13, 2^14), so that small ones
    are normal numbers; 1 where the mean is zero.
    """
    lifted = mean_matrix(rope, mean) @ r_k.double()
    largest = lifted.abs().amax((1, 2))
    exponent = torch.frexp(largest).exponent - 14  # largest in [2^(e - 1), 2^e)
    unit = torch.where(largest > 0, torch.exp2(exponent.double()), 1.0)
    return (lifted / unit[:, None, None]).half(), unit.float()


def tile_mean(rope: Rope, mean: torch.Tensor) -> torch.Tensor:
    """Mean of RoPE_j(mean) over the offsets j of a tile; mean [Hk, D] before RoPE, float64."""
    offsets = torch.arange(TILE, device=mean.device)
    rows = rope.turn(mean[None].expand(TILE, *mean.shape), offsets)
    return rows.mean(0)


def encode_k(
    k_rot: torch.Tensor, positions: torch.Tensor, rope: Rope, params, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """k_rot [T, Hk, D] f32 at ``positions`` [T] int64 -> codes [T, Hk, D] uint8 and the bytes of
    (step, a) [T, Hk, 2] uint8. ``params``: ``codec.LayerParams``."""
    levels, grid = 2**bits - 1, params.grid[:, 0]
    share = mean_share(k_rot, positions, rope, params)
    spread = torch.ones_like(share)  # a byte is encoded for step, too, and thrown away
    share = _stored(torch.stack([spread, share], -1), grid)[..., 1]
    y = k_rot - share[..., None] * mean_rot(positions, rope, params)
    step = y.square().mean(-1).sqrt() * (2 * SPREADS[bits] / levels)
    meta = _stored(torch.stack([step, share], -1), grid)
    centred = _centred(meta, levels)
    codes = feedback_codes(y, centred, params.factor, levels)
    step = meta[..., 0] * _gain(y, codes, centred, params.metric)
    return codes, encode_meta(torch.stack([step, share], -1), grid, PER_OCTAVE)


def decode_k(
    codes: torch.Tensor,
    packed: torch.Tensor,
    positions: torch.Tensor,
    rope: Rope,
    params,
    bits: int,
) -> torch.Tensor:
    """Codes [T, Hk, D] and bytes [T, Hk, 2] of keys at ``positions`` [T] -> [T, Hk, D] float32, in
    A's basis."""
    meta = decode_meta(packed, params.grid[:, 0], PER_OCTAVE)
    step, lo = _centred(meta, 2**bits - 1).unbind(-1)
    y = codes.float() * step[..., None] + lo[..., None]
    return y + meta[..., 1, None] * mean_rot(positions, rope, params)


def mean_share(k_rot: torch.Tensor, positions: torch.Tensor, rope: Rope, params) -> torch.Tensor:
    """a [T, Hk] float32: the share of the mean that each key holds. k . w is taken in A's basis,
    where w's dual is w A^-T."""
    norm = params.mean.double().square().sum(-1)
    tiles, which = (positions // TILE).unique(return_inverse=True)
    mean = rope.mean_rows(params.mean, tiles)
    dual = torch.einsum("nhd,hde->nhe", mean, params.q_k.double())[which]
    found = (k_rot.double() * dual).sum(-1) / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return torch.where(norm > 0, found, 0.0).float()


def mean_rot(positions: torch.Tensor, rope: Rope, params) -> torch.Tensor:
    """w A [T, Hk, D] float32."""
    lift, unit = lift_of(rope, params.mean, params.r_k)
    tiles, which = (positions // TILE).unique(return_inverse=True)
    rows = torch.einsum("nd,hde->nhe", rope.rows(tiles), lift.double())
    return (rows.float() * unit[:, None])[which]


def _stored(meta: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Metadata [T, Hk, 2] as a reader finds them, float32."""
    return decode_meta(encode_meta(meta, grid, PER_OCTAVE), grid, PER_OCTAVE)


def _centred(meta: torch.Tensor, levels: int) -> torch.Tensor:
    """(step, a) -> (step, lo) [..., 2] of codes that lie symmetrically about zero."""
    step = meta[..., 0]
    return torch.stack([step, step * (-0.5 * levels)], -1)


def _gain(
    y: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, metric: torch.Tensor
) -> torch.Tensor:
    """(y G y^T) / (decoded G y^T) [T, Hk] float32; 1 where it says nothing. Inside float64, so that
    it does not depend on the batch."""
    step, lo = meta.unbind(-1)
    decoded = codes.float() * step[..., None] + lo[..., None]
    g = torch.einsum("thd,hde->the", y.double(), metric.double())
    true, found = (y * g).sum(-1), (decoded * g).sum(-1)
    gain = torch.where((found > 0) & true.isfinite(), true / found, 1.0)
    return gain.nan_to_num(1.0).clamp(1 / MAX_GAIN, MAX_GAIN).float()


@dataclass(frozen=True)
class Unbiased(Feedback):
    """Feedback, and then a gain on the step: part of ``encode_k``."""

    number = 3
    tensors = ("factor", "metric")


@dataclass(frozen=True)
class Position(Compact):
    """See the module docstring; ``rope``: of a layer."""

    name = "position"
    form = 4
    mixed = True
    proven = False  # on an H200 two of the tests of large logits fail
    per_octave = PER_OCTAVE
    rope: Rope | None = None

    def tensors(self, head_dim):
        return {**super().tensors(head_dim), "q_k": (head_dim, head_dim), "mean": (head_dim,)}

    def encode_k(self, codec, params, y, positions):
        codes, meta = encode_k(y, _needed(positions), self.rope, params, codec.k_bits)
        return Rows(pack(codes, codec.k_bits), meta)

    def decode_k(self, codec, params, rows, positions, channels):
        codes, bits = unpack(rows.packed, codec.k_bits), codec.k_bits
        return decode_k(codes, rows.meta, _needed(positions), self.rope, params, bits)

    def layer_specs(self, codec, layers, options):
        """From an artifact's options:

        rope       {"theta": D/2 numbers, "pairs": D channels}  of ``Rope``
        rope_free  ids of layers that have none
        bits       for each layer (K's, V's)
        """
        rope = Rope(**{n: tuple(options["rope"][n]) for n in ("theta", "pairs")})
        free, still = options.get("rope_free", ()), Rope.still(len(rope.pairs))
        bits = options.get("bits") or [(codec.k_bits, codec.v_bits)] * layers
        if len(bits) != layers:
            raise ValueError(f"bits of {len(bits)} layers, expected {layers}")
        return [
            with_bits(with_rope(codec, still if i in free else rope), k, v)
            for i, (k, v) in enumerate(bits)
        ]

    def layer_options(self, specs):
        ropes = [spec.meta.rope for spec in specs]
        rope = max(ropes, key=lambda r: sum(map(bool, r.theta)))
        return {
            "rope": {name: list(value) for name, value in dataclasses.asdict(rope).items()},
            "rope_free": [i for i, r in enumerate(ropes) if r != rope],
            "bits": [[spec.k_bits, spec.v_bits] for spec in specs],
        }

    def check(self, head_dim):
        if self.rope is not None and len(self.rope.pairs) != head_dim:
            raise ValueError(f"RoPE of another head_dim than {head_dim}")

    def neutral_options(self, head_dim, layers):
        return {"rope": dataclasses.asdict(Rope.still(head_dim)), "bits": _spread(layers)}

    def kernel_floats(self, head_dim):
        """Of ``means.Means``, tables apart; ``partner``, of the layer, is counted for each head."""
        return head_dim * head_dim + 3 * head_dim + 2

    def table_bytes(self, head_dim, context):
        return table_bytes(head_dim, context)


def with_rope(codec: CodecSpec, rope: Rope) -> CodecSpec:
    """``position`` of a layer whose K turns so."""
    return replace(codec, meta=replace(codec.meta, rope=rope))


def with_bits(codec: CodecSpec, k_bits: int, v_bits: int) -> CodecSpec:
    """``position`` with other widths. Raises ValueError for widths without a rule."""
    if not {k_bits, v_bits} <= set(V_RATIOS):
        raise ValueError(f"K and V have 2 or 4 bits, got {k_bits} and {v_bits}")
    ranges = RangeRule("shrink", V_RATIOS[v_bits])
    return replace(codec, k_bits=k_bits, v_bits=v_bits, v_range=ranges)


def _needed(positions: torch.Tensor | None) -> torch.Tensor:
    if positions is None:
        raise ValueError("keys of position cannot be coded without their positions")
    return positions


def _spread(layers: int) -> list[list[int]]:
    """Widths of a calibration's default number, evenly over the layers' K and V in turn."""
    bits = [[2, 2] for _ in range(layers)]
    for i in range(count := layers // 6):
        bits[(2 * i + 1) * layers // (2 * count)][i % 2] = 4
    return bits
