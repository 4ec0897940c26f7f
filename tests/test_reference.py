"""Three-segment attention against a dense computation that knows nothing of pools."""

from __future__ import annotations

import pytest
import torch

from oscar_sglang.kernels import codec, reference
from oscar_sglang.kernels.codec import CODECS, LayerParams, with_bits, with_rope
from oscar_sglang.kernels.codec_position import Rope
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.kernels.stores import HistoryStore, SinkCache, WindowStore

H, HK, D, ROWS, SLOTS = 6, 2, 64, 5, 2048
SCALE = D**-0.5


def make_segments(windows, cache_rows=512, layers=1, name="feedback"):
    g = torch.Generator().manual_seed(1)

    def rotation():
        q = torch.linalg.qr(torch.randn(HK, D, D, generator=g, dtype=torch.float64))[0]
        return q.float()

    params = [
        LayerParams(rotation(), rotation(), (torch.randn(HK, D, D, generator=g) * 0.02).triu(1))
        for _ in range(layers)
    ]
    specs = [CODECS[name]] * layers
    if name == "position":
        specs, params = zip(*(with_position(p, g) for p in params), strict=True)
    layouts = [spec.layout(HK, D) for spec in specs]
    return reference.Segments(
        CODECS[name],
        list(params),
        HistoryStore(layouts, layers, SLOTS, "cpu"),
        WindowStore(windows, layouts[0], layers, ROWS, torch.float32, "cpu"),
        SinkCache(layouts[0], layers, cache_rows, torch.float32, "cpu"),
        list(specs),
    )


def with_position(params, g):
    """Spec and parameters of codec ``position``: another basis for queries than for keys, K of 4
    bits."""
    rope = Rope.of([1000 ** (-i / 8) for i in range(8)], D)
    stretch = torch.linspace(0.5, 2, D)
    params = params._replace(
        r_k=(params.r_k * stretch).contiguous(),
        q_k=(params.r_k / stretch).contiguous(),
        metric=torch.eye(D).repeat(HK, 1, 1),
        grid=torch.tensor([-3.0, -3.0, 6 / 255]).repeat(HK, 2, 1),
        mean=torch.randn(HK, D, generator=g),
    )
    return with_bits(with_rope(CODECS["position"], rope), 4, 2), params


class Sequence:
    """Random q, k, v of a request, its slots (scattered) and its row."""

    def __init__(self, length, row, seed, slots=None):
        g = torch.Generator().manual_seed(seed)
        self.row = row
        self.q = torch.randn(length, H, D, generator=g)
        self.k = torch.randn(length, HK, D, generator=g) + 2 * torch.randn(HK, D, generator=g)
        self.v = torch.randn(length, HK, D, generator=g)
        self.slots = slots


class Pool:
    def __init__(self, windows, tile=100, **kwargs):
        self.windows = windows
        self.seg = make_segments(windows, **kwargs)
        self.req_to_token = torch.zeros(ROWS, 1024, dtype=torch.int32)
        self.scratch = torch.full((2, tile, HK, D), torch.nan)
        order = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.free = order.tolist()

    def give_slots(self, seq):
        if seq.slots is None:
            seq.slots = torch.tensor([self.free.pop() for _ in range(len(seq.k))])
        self.req_to_token[seq.row, : len(seq.k)] = seq.slots.int()

    def start(self, seq, prefix):
        """What the backend does when a request takes its row; returns sink-cache hits."""
        self.give_slots(seq)
        self.seg.windows.recent_start[seq.row] = prefix
        if not prefix:
            return 0
        cached = min(prefix, self.windows.n_sink)
        return reference.restore_sinks(self.seg, seq.row, seq.slots[:cached])

    def step(self, *work, layer=0, logit_cap=0.0):
        """work: (sequence, prefix, end) -> outputs per sequence."""
        batch = reference.plan_batch(
            self.seg,
            torch.tensor([s.row for s, _, _ in work]),
            torch.tensor([p for _, p, _ in work]),
            torch.tensor([e for _, _, e in work]),
            torch.cat([s.slots[p:e] for s, p, e in work]),
        )
        q, k, v = (torch.cat([getattr(s, x)[p:e] for s, p, e in work]) for x in "qkv")
        out = reference.attention(
            self.seg, layer, batch, q, k, v, self.req_to_token, self.scratch, SCALE, logit_cap
        )
        reference.store(self.seg, layer, batch, k, v)
        return out.split([e - p for _, p, e in work])


def decoded(seg, seq):
    """The sequence's K and V as a 2-bit reader sees them, in the model's basis."""
    spec, p, at = seg.specs[0], seg.params[0], torch.arange(len(seq.k))
    k_rot, v_rot = codec.rotate(seq.k, p.r_k), codec.rotate(seq.v, p.r_v)
    k = spec.decode_k(p, spec.encode_k(p, k_rot, at), at)
    v = spec.decode_v(p, spec.encode_v(p, v_rot))
    return codec.rotate(k, p.k_back), codec.rotate(v, p.r_v.mT)


def dense(seq, k2, v2, prefix, end, windows, recent_start=0, cap=0.0, lost_sinks=()):
    """Rows prefix..end-1, each over explicitly chosen exact or decoded rows."""
    hist_end = min(prefix, max(windows.n_sink, recent_start, prefix + 1 - windows.n_recent))
    coded = torch.zeros(end, dtype=torch.bool)
    coded[windows.n_sink : hist_end] = True
    coded[list(lost_sinks)] = True
    k = torch.where(coded[:, None, None], k2[:end], seq.k[:end]).double()
    v = torch.where(coded[:, None, None], v2[:end], seq.v[:end]).double()
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", seq.q[prefix:end].double(), k) * SCALE
    if cap:
        logits = cap * torch.tanh(logits / cap)
    q_pos, k_pos = torch.arange(prefix, end)[:, None], torch.arange(end)[None]
    logits = logits.masked_fill(k_pos > q_pos, -torch.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v).float()


def assert_close(a, b):
    assert torch.isfinite(a).all()
    assert (a - b).norm() / b.norm() < 2e-5


WINDOWS = [WindowLayout(4, 16), WindowLayout(1, 1), WindowLayout(64, 256)]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 50, 333])
@pytest.mark.parametrize("name", ["feedback", "position"])
def test_chunks_and_decode_match_dense(windows, chunk, name):
    pool, seq = Pool(windows, name=name), Sequence(333, row=2, seed=3)
    pool.start(seq, 0)
    k2, v2 = decoded(pool.seg, seq)
    for prefix in range(0, 333, chunk):
        end = min(prefix + chunk, 333)
        (out,) = pool.step((seq, prefix, end))
        assert_close(out, dense(seq, k2, v2, prefix, end, windows))


def test_logit_cap():
    pool, seq = Pool(WINDOWS[0]), Sequence(60, row=1, seed=4)
    pool.start(seq, 0)
    pool.step((seq, 0, 40))
    (out,) = pool.step((seq, 40, 60), logit_cap=5.0)
    assert_close(out, dense(seq, *decoded(pool.seg, seq), 40, 60, WINDOWS[0], cap=5.0))


@pytest.mark.parametrize("hit", [1, 3, 4, 20, 77, 119])
@pytest.mark.parametrize("cache_rows", [512, 1])
@pytest.mark.parametrize("name", ["feedback", "position"])
def test_prefix_hit_reads_sinks_exactly_and_the_rest_as_codes(hit, cache_rows, name):
    windows = WINDOWS[0]
    pool = Pool(windows, cache_rows=cache_rows, name=name)
    first = Sequence(120, row=1, seed=5)
    pool.start(first, 0)
    pool.step((first, 0, 120))
    turn = Sequence(120, row=3, seed=5, slots=first.slots.clone())
    turn.slots[hit:] = torch.tensor([pool.free.pop() for _ in range(120 - hit)])
    hits = pool.start(turn, hit)
    cached = min(hit, windows.n_sink)
    lost = range(cached) if cache_rows == 1 else ()
    if cache_rows == 1:  # the row holds the last sink token only
        lost = [i for i in range(cached) if i != windows.n_sink - 1]
    assert hits == cached - len(lost)
    k2, v2 = decoded(pool.seg, turn)
    for prefix, end in ((hit, 119), (119, 120)) if hit < 119 else ((119, 120),):
        (out,) = pool.step((turn, prefix, end))
        expected = dense(turn, k2, v2, prefix, end, windows, recent_start=hit, lost_sinks=lost)
        assert_close(out, expected)


def test_mixed_batch_equals_requests_alone():
    """A decode, a chunk on a prefix and a fresh prompt in one batch, against each alone."""
    windows = WINDOWS[0]
    lengths, prefixes = (90, 70, 33), (89, 40, 0)
    together = Pool(windows)
    seqs = [Sequence(n, row=i + 1, seed=6 + i) for i, n in enumerate(lengths)]
    for seq, prefix in zip(seqs, prefixes, strict=True):
        together.start(seq, 0)
        if prefix:
            together.step((seq, 0, prefix))
    outs = together.step(*zip(seqs, prefixes, lengths, strict=True))
    for out, seq, prefix, n in zip(outs, seqs, prefixes, lengths, strict=True):
        alone = Pool(windows)
        seq.slots = None
        alone.start(seq, 0)
        if prefix:
            alone.step((seq, 0, prefix))
        assert torch.allclose(out, alone.step((seq, prefix, n))[0], atol=1e-6)


def test_windows_carry_sink_tokens_of_large_norm():
    """Attention sinks of 50 times the norm: a coded row is off by a share of its own norm."""
    windows = WINDOWS[0]
    pool, seq = Pool(windows), Sequence(200, row=1, seed=16)
    for x in (seq.k, seq.v):
        x[: windows.n_sink] *= 50
    pool.start(seq, 0)
    pool.step((seq, 0, 190))
    (out,) = pool.step((seq, 190, 200))
    exact = dense(seq, seq.k, seq.v, 190, 200, windows)
    k2, v2 = decoded(pool.seg, seq)
    without = dense(seq, k2, v2, 190, 200, windows, lost_sinks=range(190))
    assert (out - exact).norm() < (without - exact).norm() / 5


def test_row_reuse_never_shows_the_previous_request():
    windows = WINDOWS[0]
    pool, old = Pool(windows), Sequence(100, row=1, seed=7)
    pool.start(old, 0)
    pool.step((old, 0, 100))
    new = Sequence(50, row=1, seed=8)
    pool.start(new, 0)
    pool.step((new, 0, 30))
    (out,) = pool.step((new, 30, 50))
    assert_close(out, dense(new, *decoded(pool.seg, new), 30, 50, windows))


def test_poisoned_free_slots_and_foreign_rows_are_never_read():
    windows = WINDOWS[0]
    pool, seq = Pool(windows), Sequence(100, row=1, seed=9)
    for block in pool.seg.history.blocks:
        block.fill_(0xFF)  # codes 3, NaN metadata
    for tensors in (pool.seg.windows.sink_k, pool.seg.windows.recent_v, pool.seg.sinks.k):
        tensors[0].fill_(torch.nan)
    pool.start(seq, 0)
    pool.step((seq, 0, 60))
    (out,) = pool.step((seq, 60, 100))
    assert_close(out, dense(seq, *decoded(pool.seg, seq), 60, 100, windows))


def test_padding_row_and_slot_write_to_themselves_only():
    windows = WINDOWS[0]
    pool, seq = Pool(windows), Sequence(40, row=1, seed=10)
    pool.start(seq, 0)
    pool.step((seq, 0, 40))
    before = [t.clone() for t in (*pool.seg.history.blocks, *pool.seg.windows.sink_k)]
    tags = pool.seg.sinks.tag.clone()
    padding = Sequence(1, row=0, seed=11, slots=torch.tensor([0]))
    pool.step((padding, 0, 1), (padding, 0, 1))
    after = (*pool.seg.history.blocks, *pool.seg.windows.sink_k)
    assert torch.equal(tags, pool.seg.sinks.tag)
    assert torch.equal(before[0][1:], after[0][1:]) and torch.equal(before[1][1:], after[1][1:])


@pytest.mark.parametrize("name", ["feedback", "position"])
def test_codes_do_not_depend_on_chunking_batch_or_slots(name):
    windows, length = WINDOWS[2], 150
    stored = []
    for chunk, extra in ((length, 0), (17, 0), (64, 2), (1, 0)):
        pool, seq = Pool(windows, name=name), Sequence(length, row=1, seed=12)
        others = [Sequence(length, row=2 + i, seed=13 + i) for i in range(extra)]
        for s in (seq, *others):
            pool.start(s, 0)
        for prefix in range(0, length, chunk):
            end = min(prefix + chunk, length)
            pool.step(*((s, prefix, end) for s in (seq, *others)))
        k, v = pool.seg.history.read(0, seq.slots)
        stored.append(torch.cat([k.packed, k.meta.view(torch.uint8), v.packed], -1))
    assert all(torch.equal(stored[0], other) for other in stored[1:])


def test_merge_with_empty_sides():
    some = reference.attend(torch.randn(3, H, D), torch.randn(5, HK, D), torch.randn(5, HK, D), 1)
    none = reference.Partial.empty(3, H, D, "cpu")
    for merged in (reference.merge(some, none), reference.merge(none, some)):
        assert torch.equal(merged.out, some.out) and torch.allclose(merged.lse, some.lse)
    nothing = reference.merge(none, none)
    assert not nothing.out.any() and (nothing.lse == -torch.inf).all()


def test_sink_cache_collisions_leave_one_winner():
    seg = make_segments(WINDOWS[0], cache_rows=4)
    slots = torch.tensor([1, 5, 9, 2])
    winners = seg.sinks.winners(slots)
    assert winners.tolist() == [False, False, True, True]
    seg.sinks.claim(slots[winners])
    assert seg.sinks.hits(slots).tolist() == [False, False, True, True]
