"""attend + merge against float64 attention over the same cache (kernel error only)."""

import pytest
import torch

from oscar_sglang.kernels import attend as attend_mod
from oscar_sglang.kernels.merge import merge
from oscar_sglang.kernels.plan import plan_attend


def run(lab, seq_lens, q_lens=None, splits=5, cap=0.0, impl=attend_mod.attend, spread=1.0):
    """Returns (out, lse, expected out, expected lse); poisons every buffer first."""
    ragged = q_lens is not None
    q_lens = q_lens or [1] * len(seq_lens)
    total, heads = sum(q_lens), lab.kv_heads * lab.group
    q = torch.randn(total, heads, lab.dim, device=lab.device) * spread
    part = attend_mod.Partials(
        len(seq_lens), splits, lab.kv_heads, max(q_lens) * lab.group, lab.dim, lab.device
    )
    part.o.fill_(float("nan"))
    part.ml.fill_(float("nan"))
    indptr = torch.tensor([0, *q_lens]).cumsum(0).to(lab.device)
    plan_attend(
        part.plan,
        lab.rows,
        torch.tensor(seq_lens, device=lab.device),
        lab.seg.windows.recent_start,
        lab.windows,
        splits,
        indptr if ragged else None,
    )
    scale = lab.dim**-0.5
    impl(part, lab.view(), q, lab.req_to_token, scale, cap)
    out = torch.full((total, heads, lab.dim), float("nan"), device=lab.device)
    lse = torch.full((total, heads), float("nan"), device=lab.device)
    merge(part, lab.view(), out, max(q_lens), lse)
    want = torch.zeros_like(out, dtype=torch.float64)
    want_lse = torch.full_like(lse, -torch.inf, dtype=torch.float64)
    for b, (s, n) in enumerate(zip(seq_lens, q_lens, strict=True)):
        at = slice(int(indptr[b]), int(indptr[b]) + n)
        if s:
            want[at], want_lse[at] = lab.attention(b, q[at], s, scale, cap)
    return out, lse, want, want_lse


def check(lab, rms, seq_lens, q_lens=None, tol=2e-3, **kw):
    out, lse, want, want_lse = run(lab, seq_lens, q_lens, **kw)
    assert not out.isnan().any()
    assert rms(out, want) < tol
    finite = want_lse.isfinite()
    assert torch.equal(finite, lse.isfinite())
    error = (lse.double() - want_lse)[finite].abs()
    assert error.numel() == 0 or error.max() < 5e-3


LENS = [(1,), (15, 16, 17), (49, 63, 64, 65), (100, 1, 0, 33)]


@pytest.mark.parametrize("lens", LENS, ids=str)
def test_lengths(lab, rms, lens):
    x = lab(lens=lens)
    x.fill(lens)
    check(x, rms, list(lens))


@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_splits(lab, rms, splits):
    x = lab(lens=(130, 50))
    x.fill((130, 50))
    check(x, rms, [130, 50], splits=splits)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("n_sink,n_recent", [(16, 32), (5, 19)])
def test_pages_and_windows(lab, rms, page, n_sink, n_recent):
    x = lab(lens=(90, 41), page=page, n_sink=n_sink, n_recent=n_recent)
    x.fill((90, 41))
    check(x, rms, [90, 41])


@pytest.mark.parametrize("kv_heads,group,dim", [(1, 1, 16), (3, 2, 32), (1, 16, 128), (2, 5, 256)])
def test_shapes(lab, rms, kv_heads, group, dim):
    x = lab(lens=(70,), kv_heads=kv_heads, group=group, dim=dim)
    x.fill((70,))
    check(x, rms, [70], splits=3)


def test_several_query_tokens(lab, rms):
    lens = (80, 20, 4)
    x = lab(lens=lens, group=3)
    x.fill(lens)
    check(x, rms, list(lens), q_lens=[5, 1, 4])


def test_soft_cap(lab, rms):
    x = lab(lens=(80,))
    x.fill((80,))
    check(x, rms, [80], cap=2.0, spread=3.0)


def test_cached_prefix_starts_the_ring_late(lab, rms):
    x = lab(lens=(100,))
    x.seg.windows.recent_start[1] = 90
    x.fill((90,))
    x.seg.windows.recent_k[0].fill_(float("nan"))
    x.seg.windows.recent_v[0].fill_(float("nan"))
    x.reference_store(0, 90, 100, x.random(10, 2), x.random(10, 2))
    check(x, rms, [100])


@pytest.mark.parametrize("codec_name", ["feedback", "aligned", "oscar"])
def test_large_values(lab, rms, codec_name):
    x = lab(lens=(80,), spread=2000.0, codec_name=codec_name, dtype=torch.bfloat16)
    x.fill((80,))
    check(x, rms, [80], spread=1e-3)


def test_peaked_softmax(lab, rms):
    x = lab(lens=(120,), spread=4.0)
    x.fill((120,))
    check(x, rms, [120], spread=4.0, tol=3e-3)


def test_padding_rows_are_inert(lab, rms):
    """Row 0 with any content changes nothing for the others."""
    x = lab(lens=(80, 1))
    x.fill((80, 1))
    x.rows[1] = 0
    out, _, want, _ = run(x, [80, 1])
    assert rms(out[:1], want[:1]) < 2e-3
