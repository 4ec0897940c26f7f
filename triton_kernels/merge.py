"""merge: combine the splits of ``attend``, undo V's rotation, write the model's dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attend import Partials
from .plan import COST_BEGIN, COST_END, FIELDS, HEADER, Q_LEN, Q_START, SPLITS
from .views import LayerView

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _merge_kernel(
    out, lse, o, ml, plan, r_v, columns, max_q,
    HAS_LSE: tl.constexpr, GP: tl.constexpr, Hk: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // max_q
    q_index = tl.program_id(0) % max_q
    head = tl.program_id(1)
    request = plan + HEADER + b * FIELDS
    if q_index < tl.load(request + Q_LEN):
        begin = tl.load(request + COST_BEGIN)
        end = tl.load(request + COST_END)
        splits = tl.load(request + SPLITS)
        g = tl.arange(0, GP)
        ok = g < G
        cols = tl.arange(0, D)
        m = tl.full([GP], -1.0e30, tl.float32)
        den = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        if end > begin:  # a context of length 0 has no splits
            for i in range(splits & 0xFFFF, (splits >> 16) + 1):
                part = ((i + b).to(tl.int64) * Hk + head) * columns + q_index * G + g
                m_i = tl.load(ml + part * 2, ok, -1.0e30)
                l_i = tl.load(ml + part * 2 + 1, ok, 0.0)
                used = l_i > 0
                o_i = tl.load(o + part[:, None] * D + cols[None, :], used[:, None], 0.0)
                m_new = tl.where(used, tl.maximum(m, m_i), m)
                fade = tl.exp2(m - m_new)
                weight = tl.where(used, tl.exp2(m_i - m_new), 0.0)
                den = den * fade + l_i * weight
                acc = acc * fade[:, None] + o_i * weight[:, None]
                m = m_new
        acc = acc * tl.where(den > 0, 1.0 / den, 0.0)[:, None]
        q_row = (tl.load(request + Q_START) + q_index).to(tl.int64) * (Hk * G) + head * G + g
        for first_col in tl.static_range(0, D, BC):  # a whole [D, D] may not fit in shared memory
            some = first_col + tl.arange(0, BC)
            back = tl.load(r_v + head * D * D + some[None, :] * D + cols[:, None])  # R^T
            result = tl.dot(acc, back, input_precision="tf32x3")
            at = q_row[:, None] * D + some[None, :]
            tl.store(out + at, result.to(out.dtype.element_ty), ok[:, None])
        if HAS_LSE:
            seen = tl.where(den > 0, (m + tl.log2(den)) * _LN2, -float("inf"))
            tl.store(lse + q_row, seen, ok)


def merge(
    part: Partials,
    view: LayerView,
    out: torch.Tensor,
    max_q: int = 1,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Finish what ``attend`` left in ``part``; a context of length 0 yields zeros and -inf.

    out    [T, H, D]  contiguous, model dtype, in the model's basis
    lse    [T, H]     float32, natural log; optional
    max_q  host bound on the query tokens of a request
    """
    kv_heads, dim = view.kv_heads, view.head_dim
    group = out.shape[1] // kv_heads
    _merge_kernel[(part.batch * max_q, kv_heads)](
        out=out,
        lse=part.ml if lse is None else lse,
        o=part.o,
        ml=part.ml,
        plan=part.plan,
        r_v=view.params.r_v,
        columns=part.columns,
        max_q=max_q,
        HAS_LSE=lse is not None,
        GP=max(16, triton.next_power_of_2(group)),
        Hk=kv_heads,
        G=group,
        D=dim,
        BC=min(64, dim),
        num_warps=4,
    )
    return out
