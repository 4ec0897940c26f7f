"""Device helpers shared by the Triton kernels: code packing, block addresses, metadata, ranges.

Everything is row-major ``[rows, D]`` in natural channel order; a packed row is ``D/8`` 16-bit
halves (``layout``). Block addresses count 16-bit units. FORM is what a row's metadata are
(``codec_parts.Metadata``): AFFINE two halves, COMPACT and POSITION one half of two bytes, SCALE one
half, CHANNEL one of K and two of V; in bits 3 and 4 it says whether K's and V's codes have 4 bits.
Every form is read as ``values * step + lo``: the values are the codes, the levels of
``codec_lloyd``, the unit keys of ``codec_omni``, whose step is the norm, or the codes of K of
``codec_position`` from their middle on, whose lo is the share of the position's mean.

``grid`` is what a layer keeps besides: COMPACT and POSITION ``LayerParams.grid``, CHANNEL the
history's channels [pages, Hk, D, 2] FP16; others read none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import codec_omni, codec_position, layout
from .codec_compact import Compact
from .codec_lloyd import INNER, OUTER, THRESHOLD, Scale
from .codec_omni import Channel
from .codec_parts import Affine
from .codec_position import Position

_METADATA = Affine, Compact, Scale, Channel, Position  # by form
FORMS = {meta.name: meta.form for meta in _METADATA}
AFFINE, COMPACT, SCALE, CHANNEL, POSITION = (tl.constexpr(meta.form) for meta in _METADATA)
PAGE = tl.constexpr(codec_omni.BLOCK)  # tokens that share channels
TURN = tl.constexpr(codec_position.TILE)  # positions that share a row of the table of POSITION
BLOCK = tl.constexpr(layout.BLOCK)  # slots of a block
_CHUNK = tl.constexpr(layout.MAX_CHUNK_BYTES // 2)  # halves of a token that lie together
# By form: halves of a token's metadata, and of those K's.
_META = tl.constexpr(tuple(sum(m.numbers) * m.number_bytes // 2 for m in _METADATA))
_K_META = tl.constexpr(tuple(m.numbers[0] * m.number_bytes // 2 for m in _METADATA))
ROUND_MAGIC = tl.constexpr(12582912.0)  # adding 1.5 * 2^23 rounds |x| < 2^22 to even, as rint does
FP16_MAX = tl.constexpr(65504.0)
_INNER, _OUTER, _THRESHOLD = map(tl.constexpr, (INNER, OUTER, THRESHOLD))


def form_of(spec) -> int:
    """FORM of a ``codec.CodecSpec``. Raises ValueError where kernels have none."""
    if spec.meta.form is None:
        raise ValueError(
            f"codec {spec.name} has no kernels: only the reference serves it, on a CPU"
        )
    return spec.meta.form + 8 * (spec.k_bits == 4) + 16 * (spec.v_bits == 4)


def interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter (chosen at import)."""
    return not isinstance(pack_codes, triton.runtime.jit.JITFunction)


@triton.jit
def pack_codes(codes, ROWS: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr):
    """codes [ROWS, D] int32 below 2^BITS -> halves [ROWS, D BITS / 16] uint16."""
    planes = tl.reshape(codes, [ROWS, 16 // BITS, D * BITS // 16])
    shift = BITS * tl.arange(0, 16 // BITS)
    return tl.sum(planes << shift[None, :, None], 1).to(tl.uint16)


@triton.jit
def unpack_codes(halves, ROWS: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr):
    """halves [ROWS, D BITS / 16] uint16 -> codes [ROWS, D] int32."""
    shift = BITS * tl.arange(0, 16 // BITS)
    planes = (halves.to(tl.int32)[:, None, :] >> shift[None, :, None]) & (2**BITS - 1)
    return tl.reshape(planes, [ROWS, D])


@triton.jit
def head_base(slot, head, FORM: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr):
    """Offset of one head's block of ``slot`` [n] int64, 16-bit units -> [n] int64."""
    META: tl.constexpr = _META[FORM % 8]
    BITS: tl.constexpr = 4 + 2 * (FORM // 8 % 2) + 2 * (FORM // 16 % 2)  # K's and V's
    return ((slot // BLOCK) * Hk + head) * (BLOCK * (BITS * D // 16 + META))


@triton.jit
def half_offsets(
    slot, head, KV: tl.constexpr, FORM: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr
):
    """Offsets of the halves of K (KV=0) or V (KV=1) rows of ``slot`` [n] -> [n, halves] int64."""
    HALVES: tl.constexpr = D * (2 + 2 * (FORM // (8 << KV) % 2)) // 16  # of a row
    CH: tl.constexpr = _CHUNK if HALVES >= _CHUNK else HALVES
    BEFORE: tl.constexpr = KV * BLOCK * (D * (2 + 2 * (FORM // 8 % 2)) // 16)  # of K
    i = tl.arange(0, HALVES)
    token = (slot % BLOCK).to(tl.int32)
    inner = BEFORE + ((i // CH)[None, :] * BLOCK + token[:, None]) * CH + (i % CH)[None, :]
    return head_base(slot, head, FORM, Hk, D)[:, None] + inner


@triton.jit
def meta_offset(
    slot, head, KV: tl.constexpr, FORM: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr
):
    """Offset of the first half of a K or V row's metadata -> [n] int64."""
    META: tl.constexpr = _META[FORM % 8]
    K_META: tl.constexpr = _K_META[FORM % 8]
    BITS: tl.constexpr = 4 + 2 * (FORM // 8 % 2) + 2 * (FORM // 16 % 2)
    CODES: tl.constexpr = BLOCK * (BITS * D // 16)
    return head_base(slot, head, FORM, Hk, D) + CODES + (slot % BLOCK) * META + K_META * KV


@triton.jit
def load_meta(
    blocks, grid, slot, ok, head,
    KV: tl.constexpr, FORM: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """(step, lo) of rows as float32 [n]; masked rows are finite whatever stale bytes they hold."""
    PAIR: tl.constexpr = KV == 1 if FORM == CHANNEL else FORM == AFFINE
    at = blocks + meta_offset(slot, head, KV, FORM, Hk, D)
    half = tl.load(at, mask=ok, other=0)
    if FORM == COMPACT or FORM % 8 == POSITION:
        step, lo = from_bytes(
            (half & 255).to(tl.float32), (half >> 8).to(tl.float32), grid, head, KV, FORM
        )
    else:
        step = half.to(tl.float16, bitcast=True).to(tl.float32)
        if PAIR:
            lo = tl.load(at + 1, mask=ok, other=0).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            lo = tl.zeros_like(step)
    return step, lo


@triton.jit
def channel_offset(page, head, Hk: tl.constexpr, D: tl.constexpr):
    """Offset of a page's channels of one head, FP16 units; int64 like ``page``."""
    return (page * Hk + head) * (2 * D)


@triton.jit
def load_row(
    blocks, grid, slot, ok, head,
    KV: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rows of ``slot`` [ROWS] as (values [ROWS, D] float32, step, lo [ROWS] float32); values are
    exact in FP16, but for K of CHANNEL."""
    halves = tl.load(blocks + half_offsets(slot, head, KV, FORM, Hk, D), ok[:, None], 0)
    step, lo = load_meta(blocks, grid, slot, ok, head, KV, FORM, Hk, D)
    BITS: tl.constexpr = 2 + 2 * (FORM // (8 << KV) % 2)
    codes = unpack_codes(halves, ROWS, BITS, D)
    if FORM == SCALE:
        size = tl.where((codes == 1) | (codes == 2), _INNER, _OUTER)
        values = tl.where(codes < 2, -size, size)
    elif FORM == CHANNEL and KV == 0:
        cols = 2 * tl.arange(0, D)
        at = channel_offset(slot // PAGE, head, Hk, D)[:, None] + cols[None, :]
        values = codes.to(tl.float32) * tl.load(grid + at, ok[:, None], 0.0).to(tl.float32)
        values += tl.load(grid + at + 1, ok[:, None], 0.0).to(tl.float32)
    elif FORM % 8 == POSITION and KV == 0:
        values = codes.to(tl.float32) - 0.5 * (2**BITS - 1)
    else:
        values = codes.to(tl.float32)
    return values, step, lo


@triton.jit
def _grid_of(grid, head, KV: tl.constexpr):
    at = grid + (head * 2 + KV) * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def from_bytes(step_byte, lo_byte, grid, head, KV: tl.constexpr, FORM: tl.constexpr):
    """``codec_compact.decode_meta``: bytes as float32 [n] -> step, lo."""
    PER_OCTAVE: tl.constexpr = 32.0 if FORM % 8 == POSITION else 16.0
    step_log2, lo_first, lo_step = _grid_of(grid, head, KV)
    return tl.exp2(step_log2 + step_byte / PER_OCTAVE), lo_first + lo_byte * lo_step


@triton.jit
def to_bytes(step, lo, grid, head, KV: tl.constexpr, FORM: tl.constexpr):
    """``codec_compact.encode_meta``: step, lo [n] -> bytes as float32."""
    PER_OCTAVE: tl.constexpr = 32.0 if FORM % 8 == POSITION else 16.0
    step_log2, lo_first, lo_step = _grid_of(grid, head, KV)
    octaves = (tl.log2(tl.maximum(step, 1.1754944e-38)) - step_log2) * PER_OCTAVE
    offset = tl.div_rn(lo - lo_first, tl.zeros_like(lo) + lo_step)
    return _to_byte(octaves), _to_byte(offset)


@triton.jit
def _to_byte(x):
    return (tl.minimum(tl.maximum(x, 0.0), 255.0) + ROUND_MAGIC) - ROUND_MAGIC


@triton.jit
def storable(step, lo, grid, head, KV: tl.constexpr, FORM: tl.constexpr):
    """Affine (step, lo) rounded to what can be stored, float32."""
    if FORM == COMPACT or FORM % 8 == POSITION:
        step_byte, lo_byte = to_bytes(step, lo, grid, head, KV, FORM)
        step, lo = from_bytes(step_byte, lo_byte, grid, head, KV, FORM)
    else:
        step, lo = to_fp16(step), to_fp16(lo)
    return step, lo


@triton.jit
def to_fp16(x):
    """Nearest finite FP16 value, as float32."""
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def store_meta(
    blocks, grid, slot, ok, head, step, lo,
    KV: tl.constexpr, FORM: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write storable (step, lo) [n]; SCALE has no lo, nor has K of CHANNEL."""
    PAIR: tl.constexpr = KV == 1 if FORM == CHANNEL else FORM == AFFINE
    at = blocks + meta_offset(slot, head, KV, FORM, Hk, D)
    if FORM == COMPACT or FORM % 8 == POSITION:
        step_byte, lo_byte = to_bytes(step, lo, grid, head, KV, FORM)
        pair = step_byte.to(tl.int32) | (lo_byte.to(tl.int32) << 8)
        tl.store(at, pair.to(tl.uint16), ok)
    else:
        tl.store(at, step.to(tl.float16).to(tl.uint16, bitcast=True), ok)
        if PAIR:
            tl.store(at + 1, lo.to(tl.float16).to(tl.uint16, bitcast=True), ok)


@triton.jit
def row_scale(y, D: tl.constexpr):
    """``codec.value_range`` of rule rms, ratio 1: y [n, D] float32 -> scale [n], FP16 values."""
    return to_fp16(tl.sqrt_rn(tl.sum(y * y, 1) / D))


@triton.jit
def nearest_level(y, scale):
    """Codes of ``codec_lloyd``: y [n, D], scale [n] -> int32 [n, D]."""
    safe = tl.where(scale > 0, scale, 1.0)[:, None]
    unit = tl.where((scale > 0)[:, None], tl.div_rn(y, safe + tl.zeros_like(y)), 0.0)
    above = (unit > -_THRESHOLD).to(tl.int32) + (unit > 0).to(tl.int32)
    return above + (unit > _THRESHOLD).to(tl.int32)


@triton.jit
def nearest_code(w, inv, lo, LEVELS: tl.constexpr = 3):
    """clip(rint((w - lo) * inv), 0, LEVELS) as float32."""
    x = tl.minimum(tl.maximum((w - lo) * inv, 0.0), LEVELS * 1.0)
    return (x + ROUND_MAGIC) - ROUND_MAGIC


@triton.jit
def _rank_limit(y, rank, D: tl.constexpr):
    """|y| of ascending rank ``rank`` in each row: y [n, D] -> [n, 1]."""
    left = tl.abs(y)
    cols = tl.arange(0, D)[None, :]
    for _ in range(D - 1 - rank):
        left = tl.where(cols == tl.argmax(left, 1)[:, None], -1.0, left)
    return tl.max(left, 1)[:, None]


@triton.jit
def row_range(y, ratio, rank, RANK_RULE: tl.constexpr, D: tl.constexpr, LEVELS: tl.constexpr = 3):
    """``codec.value_range``: y [n, D] float32 -> step, lo [n] float32, already FP16 values.

    ratio: half the shrink ratio (shrink rule); rank: int(ratio * D) (rank rule).
    """
    if RANK_RULE:
        tau = _rank_limit(y, rank, D)
        clipped = tl.minimum(tl.maximum(y, -tau), tau)
        low = tl.min(clipped, 1)
        high = tl.max(clipped, 1)
    else:
        bottom = tl.min(y, 1)
        span = tl.max(y, 1) - bottom
        half = span * ratio
        mid = bottom + span * 0.5
        low = mid - half
        high = mid + half
    return to_fp16(tl.div_rn(high - low, LEVELS * 1.0)), to_fp16(low)


@triton.jit
def inverse_step(step):
    """1 / step, 0 for a constant row."""
    safe = tl.where(step > 0, step, 1.0)
    return tl.where(step > 0, tl.div_rn(safe * 0.0 + 1.0, safe), 0.0)


@triton.jit
def mean_rows(turns, lift, units, tile, needed, head, N: tl.constexpr, D: tl.constexpr):
    """w A of the position tiles ``tile`` [N] where ``needed``: float32 [N, D] (``means``)."""
    BK: tl.constexpr = 64 if D > 64 else D  # a whole [256, 256] does not fit in shared memory
    cols = tl.arange(0, D)
    y = tl.zeros([N, D], tl.float32)
    for k in tl.static_range(0, D, BK):
        some = k + tl.arange(0, BK)
        row = tl.load(turns + tile[:, None] * D + some[None, :], needed[:, None], 0.0)
        matrix = tl.load(lift + (head * D + cols[None, :]) * D + some[:, None])
        y = tl.dot(row, matrix, y)
    return y * tl.load(units + head * 2 + 1)
