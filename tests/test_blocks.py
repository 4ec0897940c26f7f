"""Block codecs in the pool: which blocks are sealed, from what, and what may be read of them.

Everything is judged against the evaluator's encoding of the same rows (``calibration.served.Omni``)
and a dense attention that knows nothing of pools. One KV head of 16 channels, blocks of 128.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from oscar_sglang.calibration.methods import METHODS
from oscar_sglang.kernels import codec_omni, reference
from oscar_sglang.kernels.codec import CODECS, LayerParams, Rows
from oscar_sglang.kernels.hadamard import hadamard
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.kernels.stores import HistoryStore, SinkCache, WindowStore

OMNI = CODECS["omni"]
H, D, BLOCK = 2, 16, codec_omni.BLOCK
PAGES, REQUEST_ROWS, CONTEXT = 24, 4, 6 * BLOCK
N_SINK, N_RING = 20, 40 + BLOCK - 1  # at least 40 exact tokens
SCALE = D**-0.5


class Request:
    """Random q, k, v; ``pages`` hold its tokens."""

    def __init__(self, length: int, row: int, seed: int, pages: list[int]) -> None:
        g = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, H, D, generator=g)
        self.k = torch.randn(length, 1, D, generator=g) * 3 + torch.randn(D, generator=g)
        self.v = torch.randn(length, 1, D, generator=g)
        self.row, self.pages = row, pages

    def slots(self, a: int, b: int) -> torch.Tensor:
        position = torch.arange(a, b)
        return torch.tensor(self.pages)[position // BLOCK] * BLOCK + position % BLOCK


class Pool:
    """A one-layer pool whose unwritten memory is NaN and code 3."""

    def __init__(self, dtype=torch.float32) -> None:
        layout, windows = OMNI.layout(1, D), WindowLayout(N_SINK, N_RING)
        h = hadamard(D).float()[None]
        self.seg = reference.Segments(
            OMNI,
            [LayerParams(h, h)],
            HistoryStore(layout, 1, PAGES * BLOCK, "cpu"),
            WindowStore(windows, layout, 1, REQUEST_ROWS, dtype, "cpu"),
            SinkCache(layout, 1, 512, dtype, "cpu"),
        )
        self.seg.history.blocks[0].fill_(0xFF)
        self.seg.history.channels[0].fill_(torch.nan)
        for name in ("sink_k", "sink_v", "recent_k", "recent_v"):
            getattr(self.seg.windows, name)[0].fill_(torch.nan)
        self.table = torch.zeros(REQUEST_ROWS, CONTEXT, dtype=torch.int32)
        self.scratch = torch.empty(2, 100, 1, D)

    def start(self, r: Request, cached: int = 0) -> None:
        self.table[r.row, : len(r.k)] = r.slots(0, len(r.k)).int()
        self.seg.windows.recent_start[r.row] = cached
        if cached:
            hits = reference.restore_sinks(self.seg, r.row, r.slots(0, min(cached, N_SINK)))
            assert hits == N_SINK

    def step(self, *work: tuple[Request, int, int]) -> list[torch.Tensor]:
        """(request, prefix, end) each -> outputs."""
        batch = reference.plan_batch(
            self.seg,
            torch.tensor([r.row for r, _, _ in work]),
            torch.tensor([a for _, a, _ in work]),
            torch.tensor([b for _, _, b in work]),
            torch.cat([r.slots(a, b) for r, a, b in work]),
        )
        q, k, v = (torch.cat([getattr(r, x)[a:b] for r, a, b in work]) for x in "qkv")
        out = reference.attention(self.seg, 0, batch, q, k, v, self.table, self.scratch, SCALE)
        reference.store(self.seg, 0, batch, k, v)
        return out.split([b - a for _, a, b in work])

    def run(self, r: Request, cuts: list[int], start: int = 0) -> torch.Tensor:
        return torch.cat([self.step((r, a, b))[0] for a, b in pairwise([start, *cuts, len(r.k)])])

    def sealed(self, r: Request, blocks: int) -> torch.Tensor:
        """Every byte of the request's first blocks."""
        k, v = self.seg.history.read(0, r.slots(0, blocks * BLOCK))
        parts = [t.contiguous().view(torch.uint8).flatten() for t in (*k, *v)]
        pages = self.seg.history.channels[0][torch.tensor(r.pages[:blocks])]
        return torch.cat([*parts, pages.view(torch.uint8).flatten()])


def evaluated(r: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of whole blocks, sink tokens left out, as the evaluator decodes them."""
    method, whole = METHODS["omni"], len(r.k) // BLOCK * BLOCK
    part = slice(N_SINK, whole)
    encoded = method.encode(None, r.k[part], r.v[part], N_SINK)
    return method.decode(None, encoded)


def dense(r: Request, cuts: list[int], start: int = 0, recent_start: int = 0) -> torch.Tensor:
    """Attention with explicitly chosen exact or decoded rows."""
    k_hat, v_hat = evaluated(r)
    outs = []
    for a, b in pairwise([start, *cuts, len(r.k)]):
        first_exact = max(a + 1 - N_RING, recent_start)
        end = max(0, -(-first_exact // BLOCK) * BLOCK)
        k, v = r.k[:b].clone(), r.v[:b].clone()
        if end > N_SINK:
            k[N_SINK:end], v[N_SINK:end] = k_hat[: end - N_SINK], v_hat[: end - N_SINK]
        logits = torch.einsum("qhd,kd->hqk", r.q[a:b], k[:, 0]) * SCALE
        future = torch.arange(b) > torch.arange(a, b)[:, None]
        weights = logits.masked_fill(future, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,kd->qhd", weights, v[:, 0]))
    return torch.cat(outs)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got - want).norm() < 1e-5 * want.norm()


LENGTH = 3 * BLOCK + 50


@pytest.mark.parametrize("cuts", [[], [1], [127], [128], [129], [60, 200, 256, 390], [300]])
def test_chunks_match_dense_attention(cuts):
    pool, r = Pool(), Request(LENGTH, 1, 0, [5, 2, 9, 4])
    pool.start(r)
    assert_close(pool.run(r, cuts), dense(r, cuts))


def test_decode_matches_dense_attention():
    pool, r = Pool(), Request(LENGTH, 1, 1, [5, 2, 9, 4])
    pool.start(r)
    cuts = list(range(100, LENGTH))
    assert_close(pool.run(r, cuts), dense(r, cuts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sealed_blocks_do_not_depend_on_chunking(dtype):
    """First chunks of every residue of a block, then chunks of 70: the bytes of a run in one."""
    r = Request(2 * BLOCK + 5, 1, 2, [3, 7, 1])
    whole = Pool(dtype)
    whole.start(r)
    whole.run(r, [])
    expected = whole.sealed(r, 2)
    for first in range(1, BLOCK + 1):
        pool = Pool(dtype)
        pool.start(r)
        pool.run(r, list(range(first, len(r.k), 70)))
        assert torch.equal(pool.sealed(r, 2), expected), first


def test_sealed_blocks_are_the_evaluators():
    pool, r = Pool(), Request(LENGTH, 1, 3, [5, 2, 9, 4])
    pool.start(r)
    pool.run(r, [77, 200])
    part = slice(N_SINK, 3 * BLOCK)
    encoded = METHODS["omni"].encode(None, r.k[part], r.v[part], N_SINK)
    k, v = pool.seg.history.read(0, r.slots(N_SINK, 3 * BLOCK))
    assert torch.equal(k.packed, torch.cat(encoded.k[0::3]))
    assert torch.equal(k.meta, torch.cat(encoded.k[1::3]))
    assert torch.equal(
        pool.seg.history.channels[0][torch.tensor([5, 2, 9])], torch.stack(encoded.k[2::3])
    )
    for mine, theirs in zip(v, Rows(*encoded.v), strict=True):
        assert torch.equal(mine, theirs)


def test_only_whole_blocks_are_written():
    """A block one token short of its end has no byte in history; its last token writes all."""
    pool, r = Pool(), Request(2 * BLOCK, 1, 4, [6, 8])
    pool.start(r)
    pool.step((r, 0, 2 * BLOCK - 1))
    page_8 = pool.seg.history.blocks[0][8 * BLOCK // 16 : 9 * BLOCK // 16]
    assert (page_8 == 0xFF).all() and pool.seg.history.channels[0][8].isnan().all()
    pool.step((r, 2 * BLOCK - 1, 2 * BLOCK))
    k_hat, v_hat = reference.read_history(pool.seg, 0, r.slots(0, 2 * BLOCK))
    assert k_hat.isfinite().all() and v_hat.isfinite().all()


@pytest.mark.parametrize("shared", [1, 2])
def test_prefix_sharing_reads_sealed_blocks_and_leaves_them_alone(shared):
    pool, first = Pool(), Request(LENGTH, 1, 5, [5, 2, 9, 4])
    pool.start(first)
    pool.run(first, [150])
    before = pool.sealed(first, 3)
    second = Request(LENGTH, 2, 6, [*first.pages[:shared], 11, 12, 13])
    cached = shared * BLOCK
    for name in ("k", "v"):
        getattr(second, name)[:cached] = getattr(first, name)[:cached]
    pool.start(second, cached)
    cuts = [cached + 30, cached + 31]
    out = pool.run(second, cuts, cached)
    assert_close(out, dense(second, cuts, cached, recent_start=cached))
    assert torch.equal(pool.sealed(first, 3), before)


def test_a_row_and_pages_taken_over_from_an_aborted_request():
    """Stale rows of the ring and a half-written block never enter the new request's blocks."""
    pool, aborted = Pool(), Request(BLOCK + 90, 1, 7, [5, 2])
    pool.start(aborted)
    pool.run(aborted, [40])
    new = Request(2 * BLOCK + 10, 1, 8, [2, 5, 3])
    pool.start(new)
    out = pool.run(new, [33, 128, 190])
    fresh = Pool()
    fresh.start(new)
    assert torch.equal(fresh.run(new, [33, 128, 190]), out)
    assert torch.equal(fresh.sealed(new, 2), pool.sealed(new, 2))


def test_mixed_batch_and_padding_equal_requests_alone():
    pool = Pool()
    a, b = Request(2 * BLOCK, 1, 9, [5, 2]), Request(BLOCK + 3, 2, 10, [7, 8])
    padding = Request(1, 0, 11, [0])
    for r in (a, b):
        pool.start(r)
    pool.step((a, 0, 2 * BLOCK - 1), (b, 0, BLOCK - 1))
    out = pool.step((a, 2 * BLOCK - 1, 2 * BLOCK), (padding, 0, 1), (b, BLOCK - 1, BLOCK + 3))
    for r, cut, got in ((a, 2 * BLOCK - 1, out[0]), (b, BLOCK - 1, out[2])):
        alone = Pool()
        alone.start(r)
        alone.step((r, 0, cut))
        assert torch.allclose(alone.step((r, cut, len(r.k)))[0], got, atol=1e-6)
        assert torch.equal(alone.sealed(r, len(r.k) // BLOCK), pool.sealed(r, len(r.k) // BLOCK))


@pytest.mark.parametrize("head_dim, bits", [(64, 2.5), (128, 2.3125)])
def test_bytes(head_dim, bits):
    """K: 2 bits, a norm per token, step and lo per channel of a block; V: 2 bits, step and lo."""
    layout = OMNI.layout(2, head_dim)
    assert layout.bits_per_element == bits
    store = HistoryStore(layout, 1, 4 * BLOCK, "cpu")
    assert store.num_bytes * 8 / (2 * 2 * head_dim * 4 * BLOCK) == pytest.approx(
        layout.bits_per_element
    )


def test_keys_of_a_block_codec_have_no_codes_of_their_own():
    with pytest.raises(ValueError, match="in blocks"):
        OMNI.encode_k(LayerParams(torch.eye(D), torch.eye(D)), torch.zeros(1, 1, D))
