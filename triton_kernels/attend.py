"""attend: split-KV attention of a few query tokens over sink | history | recent, in Triton.

The portable form: any head_dim of the layout, runs under the interpreter, cross-checks the CUDA
form (``cuda_attend``). Both read the same plan and leave the same partial results for ``merge``:

    o   [splits + B, Hk, columns, D] float32   sum of p * v, not normalised
    ml  [splits + B, Hk, columns, 2] float32   log2 reference m of p = 2^(logit - m), and sum of p

A *column* is a (query token, query head of the KV head) pair: ``column = i * G + g``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .plan import (
    COST_BEGIN,
    COST_END,
    FIELDS,
    HEADER,
    HIST_END,
    Q_LEN,
    Q_START,
    ROW,
    SEQ_LEN,
    SPLIT,
    TILE_TOKENS,
    WINDOW_COST,
    WINDOW_TOKENS,
    plan_size,
    request_chunks,
)
from .tile import (
    BLOCK,
    CHANNEL,
    PAGE,
    POSITION,
    TURN,
    channel_offset,
    half_offsets,
    load_meta,
    load_row,
    unpack_codes,
)
from .views import LayerView

_COLUMNS = 16  # of a program
_EMPTY = tl.constexpr(-1.0e30)


@triton.jit
def _capped(logits, cap_log2, CAP: tl.constexpr):
    """Soft-capped logits, log2 units; tanh by exp2, which saturates instead of overflowing."""
    if CAP:
        e = tl.exp2(tl.abs(logits) * (-2.0 * 1.4426950408889634 / cap_log2))
        capped = cap_log2 * (1.0 - e) / (1.0 + e)
        logits = tl.where(logits < 0, -capped, capped)
    return logits


@triton.jit
def _online(m, den, acc, logits, visible):
    """Move the soft-max reference; returns (m, den, rescaled acc, p)."""
    logits = tl.where(visible, logits, -float("inf"))
    m_new = tl.maximum(m, tl.max(logits, 1))
    p = tl.exp2(logits - m_new[:, None])
    fade = tl.exp2(m - m_new)
    return m_new, den * fade + tl.sum(p, 1), acc * fade[:, None], p


@triton.jit
def _window_chunk(
    state_m, state_den, acc, q, k_base, v_base, index, pos, end, q_pos, head, scale, cap_log2,
    CAP: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """16 exact rows at k_base[index], v_base[index]; q [C, D] float32 unscaled."""
    cols = tl.arange(0, D)
    at = ((index * Hk + head) * D)[:, None] + cols[None, :]
    ok = pos < end
    k = tl.load(k_base + at, ok[:, None], 0.0).to(tl.float32)
    v = tl.load(v_base + at, ok[:, None], 0.0).to(tl.float32)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    visible = ok[None, :] & (pos[None, :] <= q_pos[:, None])
    logits = _capped(logits, cap_log2, CAP)
    state_m, state_den, acc, p = _online(state_m, state_den, acc, logits, visible)
    return state_m, state_den, tl.dot(p, v, acc, input_precision="ieee")


@triton.jit
def _in_fp16(x):
    """x [C, D] float32 as FP16 in [-1, 1] and what to multiply it with, [C]."""
    largest = tl.max(tl.abs(x), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    return (x / largest[:, None]).to(tl.float16), largest


@triton.jit
def _channel_logits(
    q, blocks, channels, slot, ok, head, TN: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr
):
    """q k of TN tokens of one page, [C, TN] float32: its channels' steps go into q, their lo into
    one number a query, the tokens' norms onto the products. q [C, D] float32."""
    cols = 2 * tl.arange(0, D)
    page = tl.max(tl.where(ok, slot // PAGE, 0), 0)
    at = channels + channel_offset(page, head, Hk, D) + cols
    folded, unit = _in_fp16(q * tl.load(at).to(tl.float32)[None, :])
    offset = tl.sum(q * tl.load(at + 1).to(tl.float32)[None, :], 1)
    halves = tl.load(blocks + half_offsets(slot, head, 0, CHANNEL, Hk, D), ok[:, None], 0)
    codes = unpack_codes(halves, TN, 2, D)
    norm, _ = load_meta(blocks, channels, slot, ok, head, 0, CHANNEL, Hk, D)
    products = tl.dot(folded, tl.trans(codes.to(tl.float16))) * unit[:, None]
    return (products + offset[:, None]) * norm[None, :]


@triton.jit
def _history_tile(
    state_m, state_den, acc, q, q16, q_unit, q_sum, mixed, blocks, grid, turns, slot, pos, lo_pos,
    end, head, scale, cap_log2,
    CAP: tl.constexpr, FORM: tl.constexpr, TN: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """TN packed rows. Codes enter the products as they are; step and lo are applied to logits and
    probabilities. q [C, D] float32, scaled by ``scale``; or q16 [C, D] FP16 in [-1, 1], q_unit [C]
    its scale, q_sum [C] its row sum; mixed [C, D] FP16 is C(q) of POSITION."""
    ok = (pos >= lo_pos) & (pos < end)
    if FORM == CHANNEL:
        logits = _channel_logits(q, blocks, grid, slot, ok, head, TN, Hk, D) * scale
    elif FORM % 8 == POSITION:
        codes, step, share = load_row(blocks, grid, slot, ok, head, 0, FORM, TN, Hk, D)
        products = tl.dot(q16, tl.trans(codes.to(tl.float16))) * q_unit[:, None]
        turn = (pos // TURN)[:, None] * D + tl.arange(0, D)[None, :]
        means = tl.dot(mixed, tl.trans(tl.load(turns + turn, ok[:, None], 0.0))) * scale
        logits = products * step[None, :] + means * share[None, :]
    else:
        codes, step, lo = load_row(blocks, grid, slot, ok, head, 0, FORM, TN, Hk, D)
        products = tl.dot(q16, tl.trans(codes.to(tl.float16)))
        logits = products * step[None, :] + q_sum[:, None] * lo[None, :]
        logits = logits * q_unit[:, None]
    logits = _capped(logits, cap_log2, CAP)
    state_m, state_den, acc, p = _online(state_m, state_den, acc, logits, ok[None, :])
    codes, step, lo = load_row(blocks, grid, slot, ok, head, 1, FORM, TN, Hk, D)
    unit = tl.maximum(tl.max(step, 0), 1.0e-30)  # keeps p * step inside FP16
    weights = (p * (step / unit)[None, :]).to(tl.float16)
    acc += tl.dot(weights, codes.to(tl.float16)) * unit + tl.sum(p * lo[None, :], 1)[:, None]
    return state_m, state_den, acc


@triton.jit
def _attend_kernel(
    o, ml, plan, q, q_half, blocks, grids, turns, sink_k, sink_v, ring_k, ring_v, req_to_token,
    stride_req, n_sink, n_recent, scale, cap_log2, columns,
    CAP: tl.constexpr, FORM: tl.constexpr, C: tl.constexpr,
    Hk: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    # A block's tokens lie in one page, a tile's may not.
    TN: tl.constexpr = BLOCK if FORM == CHANNEL else TILE_TOKENS
    WIDTH: tl.constexpr = D * 3 // 2 if FORM % 8 == POSITION else D  # ``LayerView.query_width``
    split = tl.program_id(0)
    head = tl.program_id(1)
    col = tl.program_id(2) * C + tl.arange(0, C)
    cols = tl.arange(0, D)
    mine = plan + HEADER + tl.load(plan + 2) * FIELDS + split * SPLIT
    b = tl.load(mine)
    line = tl.load(mine + 1)
    line_end = tl.load(mine + 2)
    if line < line_end:
        while line < line_end:
            request = plan + HEADER + b * FIELDS
            row = tl.load(request + ROW).to(tl.int64)
            seq_len = tl.load(request + SEQ_LEN)
            hist_end = tl.load(request + HIST_END)
            q_start = tl.load(request + Q_START)
            q_len = tl.load(request + Q_LEN)
            origin = tl.load(request + COST_BEGIN)
            stop = tl.minimum(line_end, tl.load(request + COST_END))
            sink_chunks, recent_chunks, _ = request_chunks(seq_len, hist_end, n_sink)
            window_chunks = sink_chunks + recent_chunks
            q_index = col // G
            have = q_index < q_len
            q_at = (q_start + q_index).to(tl.int64) * (Hk * G) + head * G + col % G
            qf = tl.load(q + q_at[:, None] * WIDTH + cols[None, :], have[:, None], 0.0)
            qf = qf.to(tl.float32)
            q_pos = seq_len - q_len + q_index
            m = tl.full([C], _EMPTY, tl.float32)
            den = tl.zeros([C], tl.float32)
            acc = tl.zeros([C, D], tl.float32)
            first = tl.minimum((line - origin + WINDOW_COST - 1) // WINDOW_COST, window_chunks)
            last = tl.minimum((stop - origin + WINDOW_COST - 1) // WINDOW_COST, window_chunks)
            for chunk in range(first, last):
                if chunk < sink_chunks:
                    pos = chunk * WINDOW_TOKENS + tl.arange(0, WINDOW_TOKENS)
                    index = row * n_sink + pos
                    m, den, acc = _window_chunk(
                        m, den, acc, qf, sink_k, sink_v, index, pos, tl.minimum(seq_len, n_sink),
                        q_pos, head, scale, cap_log2, CAP, Hk, D,
                    )  # fmt: skip
                else:
                    pos = (chunk - sink_chunks) * WINDOW_TOKENS + tl.arange(0, WINDOW_TOKENS)
                    pos += tl.maximum(n_sink, hist_end)
                    index = row * n_recent + pos % n_recent
                    m, den, acc = _window_chunk(
                        m, den, acc, qf, ring_k, ring_v, index, pos, seq_len,
                        q_pos, head, scale, cap_log2, CAP, Hk, D,
                    )  # fmt: skip
            q16, q_unit = _in_fp16(qf)
            q_sum = tl.sum(q16.to(tl.float32), 1)
            mixed = q16
            if FORM % 8 == POSITION:
                beside = (q_at * (2 * WIDTH) + 2 * D)[:, None] + cols[None, :]
                mixed = tl.load(q_half + beside, have[:, None], 0.0)
            tiles_from = origin + window_chunks * WINDOW_COST
            base = n_sink // BLOCK * BLOCK
            for tile in range(tl.maximum(line - tiles_from, 0), stop - tiles_from):
                for part_of_tile in tl.static_range(TILE_TOKENS // TN):
                    pos = base + tile * TILE_TOKENS + part_of_tile * TN + tl.arange(0, TN)
                    inside = (pos >= n_sink) & (pos < hist_end)
                    at = row * stride_req + pos
                    slot = tl.load(req_to_token + at, inside, 0).to(tl.int64)
                    m, den, acc = _history_tile(
                        m, den, acc, qf, q16, q_unit * scale, q_sum, mixed, blocks, grids, turns,
                        slot, pos, n_sink, hist_end, head, scale, cap_log2, CAP, FORM, TN, Hk, D,
                    )  # fmt: skip
            part = (((split + b).to(tl.int64) * Hk) + head) * columns + col
            tl.store(o + part[:, None] * D + cols[None, :], acc, have[:, None])
            tl.store(ml + part * 2, m, have)
            tl.store(ml + part * 2 + 1, den, have)
            line = stop
            b += 1


class Partials:
    """Static buffers between attend and merge for one batch size, and the plan of a step.

    ``splits`` bounds the grid; ``columns`` is max query tokens x G. Views into ``pool`` (a flat
    float32 tensor of ``numel`` elements or more) when given, so that batch sizes can share it.
    """

    def __init__(
        self,
        batch: int,
        splits: int,
        kv_heads: int,
        columns: int,
        head_dim: int,
        device,
        pool: torch.Tensor | None = None,
    ) -> None:
        self.batch, self.splits, self.columns = batch, splits, columns
        rows = (splits + batch) * kv_heads * columns
        if pool is None:
            numel = self.numel(batch, splits, kv_heads, columns, head_dim)
            pool = torch.empty(numel, dtype=torch.float32, device=device)
        shape = (splits + batch, kv_heads, columns)
        self.o = pool[: rows * head_dim].view(*shape, head_dim)
        self.ml = pool[rows * head_dim : rows * (head_dim + 2)].view(*shape, 2)
        self.plan = torch.zeros(plan_size(batch, splits), dtype=torch.int32, device=device)

    @staticmethod
    def numel(batch: int, splits: int, kv_heads: int, columns: int, head_dim: int) -> int:
        return (splits + batch) * kv_heads * columns * (head_dim + 2)


def choose_splits(kv_heads: int, columns: int, sms: int) -> int:
    """Split count that fills a device of ``sms`` processors, whatever the lengths will be."""
    return max(1, 4 * sms // (kv_heads * triton.cdiv(columns, _COLUMNS)))


def attend(
    part: Partials,
    view: LayerView,
    q_rot: torch.Tensor,
    req_to_token: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
) -> None:
    """Partial attention of every split of ``part.plan`` (``plan.plan_attend``).

    q_rot         [T, H, D]          contiguous, rotated, any float dtype; of ``position`` what
                                     ``store`` leaves in a ``views.query_buffer``
    req_to_token  [R, max_context]   int32
    """
    kv_heads, dim, means = view.kv_heads, view.head_dim, view.means
    assert q_rot.shape[2] == view.query_width
    group = q_rot.shape[1] // kv_heads
    log2e = math.log2(math.e)
    grid = (part.splits, kv_heads, triton.cdiv(part.columns, _COLUMNS))
    _attend_kernel[grid](
        o=part.o,
        ml=part.ml,
        plan=part.plan,
        q=q_rot,
        q_half=q_rot if means is None else q_rot.view(torch.float16),
        blocks=view.blocks.view(torch.uint16),
        grids=view.grid,
        turns=q_rot if means is None else means.turns,
        sink_k=view.sink_k,
        sink_v=view.sink_v,
        ring_k=view.ring_k,
        ring_v=view.ring_v,
        req_to_token=req_to_token,
        stride_req=req_to_token.stride(0),
        n_sink=view.windows.n_sink,
        n_recent=view.windows.n_recent,
        scale=scale * log2e,
        cap_log2=logit_cap * log2e,
        columns=part.columns,
        CAP=logit_cap > 0,
        FORM=view.form,
        C=_COLUMNS,
        Hk=kv_heads,
        G=group,
        D=dim,
        num_warps=4,
    )
