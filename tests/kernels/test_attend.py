"""attend + merge against float64 attention over the same cache (kernel error only)."""

import pytest
import torch

from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.kernels.plan import FIELDS, HEADER, HIST_END, plan_attend, plan_size
from oscar_sglang.kernels.reference import first_exact, history_end

LENS = [(1,), (15, 16, 17), (49, 63, 64, 65), (100, 1, 0, 33)]


@pytest.mark.parametrize("lens", LENS, ids=str)
def test_lengths(lab, check, lens):
    x = lab(lens=lens)
    x.fill(lens)
    check(x, list(lens))


@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_splits(lab, check, splits):
    x = lab(lens=(130, 50))
    x.fill((130, 50))
    check(x, [130, 50], splits=splits)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("n_sink,n_recent", [(16, 32), (5, 19)])
def test_pages_and_windows(lab, check, page, n_sink, n_recent):
    x = lab(lens=(90, 41), page=page, n_sink=n_sink, n_recent=n_recent)
    x.fill((90, 41))
    check(x, [90, 41])


@pytest.mark.parametrize("kv_heads,group,dim", [(1, 1, 16), (3, 2, 32), (1, 16, 128), (2, 5, 256)])
def test_shapes(lab, check, kv_heads, group, dim):
    x = lab(lens=(70,), kv_heads=kv_heads, group=group, dim=dim)
    x.fill((70,))
    check(x, [70], splits=3)


def test_several_query_tokens(lab, check):
    lens = (80, 20, 4)
    x = lab(lens=lens, group=3)
    x.fill(lens)
    check(x, list(lens), q_lens=[5, 1, 4])


def test_soft_cap(lab, check):
    x = lab(lens=(80,))
    x.fill((80,))
    check(x, [80], cap=2.0, spread=3.0)


def test_cached_prefix_starts_the_ring_late(lab, check):
    x = lab(lens=(100,))
    x.seg.windows.recent_start[1] = 90
    x.fill((90,))
    x.seg.windows.recent_k[0].fill_(float("nan"))
    x.seg.windows.recent_v[0].fill_(float("nan"))
    x.reference_store(0, 90, 100, x.random(10, 2), x.random(10, 2))
    check(x, [100])


@pytest.mark.parametrize("codec_name", ["lloyd", "compact", "accurate", "position"])
@pytest.mark.parametrize("dim", [16, 64])
def test_codecs(lab, check, codec_name, dim):
    x = lab(lens=(90, 41), dim=dim, codec_name=codec_name, n_sink=5, n_recent=19)
    x.fill((90, 41))
    check(x, [90, 41])


@pytest.mark.parametrize(
    "dim,codec_name", [(16, "position42"), (64, "position24"), (32, "position44")]
)
def test_widths(lab, check, dim, codec_name):
    x = lab(lens=(90, 41), dim=dim, codec_name=codec_name, n_sink=5, n_recent=19)
    x.fill((90, 41))
    check(x, [90, 41])


@pytest.mark.parametrize("codec_name", ["feedback", "aligned", "oscar", "lloyd", "position"])
def test_large_values(lab, check, codec_name):
    x = lab(lens=(80,), spread=2000.0, codec_name=codec_name, dtype=torch.bfloat16)
    x.fill((80,))
    check(x, [80], spread=1e-3)


def test_peaked_softmax(lab, check):
    x = lab(lens=(120,), spread=4.0)
    x.fill((120,))
    check(x, [120], spread=4.0, tol=3e-3)


def test_padding_rows_are_inert(lab, rms, run):
    """Row 0 with any content changes nothing for the others."""
    x = lab(lens=(80, 1))
    x.fill((80, 1))
    x.rows[1] = 0
    out, _, want, _ = run(x, [80, 1])
    assert rms(out[:1], want[:1]) < 2e-3


@pytest.mark.parametrize("max_q", [1, 3])
def test_decode_attention_facade(lab, rms, max_q):
    from oscar_sglang.kernels.decode import DecodeAttention

    lens = (70, 9)
    x = lab(lens=lens)
    x.fill(lens)
    heads = x.kv_heads * x.group
    attention = DecodeAttention(
        heads=heads, kv_heads=x.kv_heads, head_dim=x.dim, dtype=x.dtype, windows=x.windows,
        page_size=16, max_batch=3, max_q=max_q, device=x.device, triton_only=True,
    )  # fmt: skip
    step = attention.step(2, max_q)
    indptr = torch.tensor([0, max_q, 2 * max_q], device=x.device)
    seq_lens = torch.tensor(lens, device=x.device)
    step.plan(x.rows, seq_lens, x.seg.windows.recent_start, indptr if max_q > 1 else None)
    q = torch.randn(2 * max_q, heads, x.dim, device=x.device)
    out = torch.empty_like(q)
    step(x.view(), q, x.req_to_token, out, scale=0.125)
    for b, n in enumerate(lens):
        mine = slice(b * max_q, (b + 1) * max_q)
        assert rms(out[mine], x.attention(b, q[mine], n, 0.125)[0]) < 2e-3
    with pytest.raises(ValueError, match="exceed"):
        attention.step(200, max_q)


@pytest.mark.parametrize("codec_name", ["feedback", "position"])
def test_layer_is_store_then_attention(lab, check_layer, codec_name):
    """The next token of each request, stored and attended by one call."""
    lens = (70, 9)
    x = lab(lens=lens, codec_name=codec_name)
    x.fill(lens)
    check_layer(x, [lens])


@pytest.mark.parametrize("block", [1, 128])
def test_history_ends_where_the_reference_says(device, block):
    """The kernel's copy of ``first_exact``, for one query token and for several."""
    g = torch.Generator().manual_seed(0)
    windows, n = WindowLayout(21, 40 + block - 1), 64
    seq_lens = torch.randint(0, 700, (n,), generator=g)
    start = torch.randint(0, 700, (n + 1,), generator=g) // block * block
    q_lens = torch.minimum(torch.randint(1, 17, (n,), generator=g), seq_lens)
    rows = torch.arange(1, n + 1)
    for lens in (None, q_lens):
        indptr = None if lens is None else torch.cat([torch.zeros(1), lens]).cumsum(0).long()
        plan = torch.zeros(plan_size(n, 8), dtype=torch.int32, device=device)
        moved = (None if x is None else x.to(device) for x in (rows, seq_lens, start, indptr))
        at, lengths, ring, queries = moved
        plan_attend(plan, at, lengths, ring, windows, 8, queries, block=block)
        found = plan[HEADER.value :][: n * FIELDS.value].view(n, -1)[:, HIST_END.value].cpu()
        cached = seq_lens - (1 if lens is None else lens)
        want = first_exact(seq_lens, start[1:], windows.n_sink, windows.n_recent, block)
        want = torch.minimum(cached, want).clamp_min(0)
        assert torch.equal(found.long(), want)
        if lens is None:
            seen = seq_lens > 0
            ends = history_end(cached, start[1:], windows, block)
            assert torch.equal(found.long()[seen], ends[seen])
