"""store writes each window row once, whatever order a batch's tokens come in."""

import pytest
import torch

from oscar_sglang.kernels import codec
from oscar_sglang.kernels.store import store
from oscar_sglang.kernels.views import TokenBatch

SPANS = ((1, 0, 40), (2, 7, 9))  # request row, first position, end
N_SINK, N_RECENT = 7, 19


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("form", [pytest.param("cuda", marks=pytest.mark.gpu), "triton"])
def test_windows_hold_the_newest_rows_and_nothing_else(lab, rms, order, form):
    """Descending: whoever wrote a stale row of a long chunk would now do so last."""
    dim = 64 if form == "cuda" else 16
    x = lab(lens=(40, 9), dim=dim, n_sink=N_SINK, n_recent=N_RECENT)
    parts = [(r, p, e, int(x.req_to_token[r, p])) for r, a, e in SPANS for p in range(a, e)]
    if order == "descending":
        parts.reverse()
    columns = [torch.tensor(c, device=x.device) for c in zip(*parts, strict=True)]
    tokens = TokenBatch(*columns, torch.full_like(columns[0], -1))
    k, v = x.random(len(parts), x.kv_heads), x.random(len(parts), x.kv_heads)
    q = x.random(len(parts), x.kv_heads * x.group)
    store(x.view(), tokens, q, k, v, None, form == "triton")
    params, w = x.seg.params[0], x.seg.windows
    for stores, rows in (
        ((w.sink_k, w.recent_k), codec.rotate(k, params.r_k)),
        ((w.sink_v, w.recent_v), codec.rotate(v, params.r_v)),
    ):
        for held, wanted in zip(stores, _expected(parts), strict=True):
            found = held[0].isfinite().all(-1).all(-1).nonzero().tolist()
            assert {tuple(at) for at in found} == set(wanted)
            for at, i in wanted.items():
                assert rms(held[0][at], rows[i]) < 6e-3  # BF16; the interpreter truncates


def _expected(parts):
    """{(request row, window row): token of the batch} of the sink and of the ring."""
    sink = {(r, p): i for i, (r, p, _, _) in enumerate(parts) if p < N_SINK}
    ring = {(r, p % N_RECENT): i for i, (r, p, e, _) in enumerate(parts) if p >= e - N_RECENT}
    return sink, ring
