"""seal and what reads its blocks, against the reference; slots in pages of 128."""

import pytest
import torch

from oscar_sglang.kernels import codec_omni, reference
from oscar_sglang.kernels.codec import spec_of
from oscar_sglang.kernels.store import store

BLOCK = codec_omni.BLOCK
ON_GPU = pytest.mark.gpu
DIMS = [16, pytest.param(64, marks=ON_GPU), pytest.param(128, marks=ON_GPU)]


@pytest.fixture
def omni(lab, device):
    """A cache of codec omni with few exact tokens. Triton's interpreter truncates to BF16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    base = dict(codec_name="omni", kv_heads=1, n_sink=20, n_recent=8, dtype=dtype)
    return lambda **kw: lab(**base | kw)


def twin(omni, **kw):
    """Two equal caches: one for the kernels, one for the reference."""
    torch.manual_seed(3)
    first = omni(**kw)
    torch.manual_seed(3)
    return first, omni(**kw)


def step(kernels, spec, spans):
    """Store the same random rows of [(request, start, end)] in both; blocks must be equal."""
    n = sum(e - s for _, s, e in spans)
    q, k, v = kernels.qkv(n)
    store(kernels.view(), kernels.batch(spans), q, k, v, None)
    at = 0
    for b, s, e in spans:
        spec.reference_store(b, s, e, k[at : at + e - s], v[at : at + e - s])
        at += e - s
    assert_equal_stores(kernels, spec)


def assert_equal_stores(a, b):
    """Bytes of history and channels; a float32 sum in another order may move a number by one FP16
    rounding, and a code to the other side of a tie."""
    same = (a.seg.history.blocks[0] == b.seg.history.blocks[0]).float().mean()
    assert same > 0.99
    x, y = a.seg.history.channels[0], b.seg.history.channels[0]
    assert torch.equal(x.isnan(), y.isnan())
    close = 1e-2 if x.is_cuda else 2e-3  # a BF16 tie at a channel's end
    assert torch.allclose(x.nan_to_num().float(), y.nan_to_num().float(), rtol=close, atol=1e-6)
    x, y = a.seg.windows.recent_k[0], b.seg.windows.recent_k[0]
    assert torch.allclose(x.nan_to_num().float(), y.nan_to_num().float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dim", DIMS)
def test_chunks_seal_what_the_reference_seals(omni, dim):
    """Chunks that end in, at and beyond a block, several blocks in one, two requests at once; the
    second one's positions continue the first one's."""
    a, b = twin(omni, lens=(400, 300), dim=dim)
    step(a, b, [(0, 0, 100), (1, 0, 127)])
    step(a, b, [(0, 100, 127), (1, 127, 128)])
    step(a, b, [(0, 127, 390), (1, 128, 260)])


def test_decode_seals_at_the_last_token_of_a_block(omni):
    """One token a request: nothing is written but by position 127."""
    a, b = twin(omni, lens=(140, 140, 140), dim=16)
    step(a, b, [(0, 0, 126), (1, 0, 60), (2, 0, 127)])
    before = a.seg.history.blocks[0].clone()
    step(a, b, [(0, 126, 127), (1, 60, 61)])
    assert torch.equal(a.seg.history.blocks[0], before)
    step(a, b, [(0, 127, 128), (1, 61, 62), (2, 127, 128)])
    pages = [int(a.req_to_token[r, 0]) // BLOCK for r in (1, 3)]
    changed = (a.seg.history.blocks[0] != before).flatten(1).any(1).nonzero().flatten() // 8
    assert sorted(set(changed.tolist())) == sorted(pages)


def test_a_long_batch_of_short_requests(omni, monkeypatch):
    """Programs that look at several tokens find every end among them."""
    from oscar_sglang.kernels import seal

    monkeypatch.setattr(seal, "_FEW_TOKENS", 0)
    a, b = twin(omni, lens=(140, 140, 140), dim=16)
    step(a, b, [(0, 0, 127), (1, 0, 126), (2, 0, 127)])
    step(a, b, [(0, 127, 128), (1, 126, 130), (2, 127, 129)])


@pytest.mark.parametrize("option", ["all sink", "no norm"])
def test_variants(omni, option):
    a, b = twin(omni, lens=(150,), dim=16, n_sink=140 if option == "all sink" else 20)
    if option == "no norm":
        for x in (a, b):
            x.seg.spec = spec_of("omni", {"norm": "none"})
            x.seg.specs = [x.seg.spec]
    step(a, b, [(0, 0, 128)])


def test_skipped_and_padding_tokens_seal_nothing(omni):
    x = omni(lens=(140,), dim=16)
    x.fill((127,))
    before = x.seg.history.blocks[0].clone()
    q, k, v = x.qkv(1)
    tokens = x.batch([(0, 127, 128)])
    zero = torch.zeros_like(tokens.rows)
    for changed in (dict(slots=zero - 1), dict(rows=zero)):
        store(x.view(), tokens._replace(**changed), q, k, v, None)
        assert torch.equal(x.seg.history.blocks[0], before)


@pytest.mark.parametrize("value", [0.0, 3.0, 65504.0, 1e-40], ids=lambda v: f"{v:g}")
def test_degenerate_blocks_stay_finite(omni, value):
    x = omni(lens=(140,), dim=16)
    tokens = x.batch([(0, 0, 128)])
    q, k, v = (torch.full_like(t, value) for t in x.qkv(128))
    k[1, :, ::2] *= -1
    store(x.view(), tokens, q, k, v, None)
    k_hat, v_hat = reference.read_history(x.seg, 0, tokens.slots)
    assert k_hat.isfinite().all() and v_hat.isfinite().all()


# -- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim,n_sink", [(16, 20), (64, 16)])
def test_attend(omni, check, dim, n_sink):
    """Boundaries at a block, tiles of 32 tokens across two pages (sink 16), one request without
    history, an empty one."""
    lens = (300, 263, 130, 0)
    x = omni(lens=lens, dim=dim, n_sink=n_sink)
    x.fill(lens)
    check(x, list(lens))


def test_attend_several_query_tokens(omni, check):
    lens = (300, 266)
    x = omni(lens=lens, dim=16, n_recent=20, group=3)
    x.fill(lens)
    check(x, list(lens), q_lens=[5, 2], cap=3.0)


@pytest.mark.parametrize("dim", [16, 64])
def test_materialise(omni, dim):
    from oscar_sglang.kernels.materialise import materialise

    x = omni(lens=(300,), dim=dim, kv_heads=2)
    x.fill((300,))
    end = x.hist_end(0, 300)
    assert end == 256
    out = torch.full((2, 280, 2, dim), float("nan"), dtype=torch.float32, device=x.device)
    start, indptr, ends = (torch.tensor(t, device=x.device) for t in ([3], [0, 280], [end]))
    materialise(x.view(), x.req_to_token, x.rows, start, indptr, ends, 280, *out)
    want = torch.empty_like(out)
    slots = x.req_to_token[1, 3:283].long()
    reference.materialise(x.seg, 0, 1, slots, 3, end, *want)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-6)


def test_restore_reads_history_where_the_sink_cache_misses(omni):
    from oscar_sglang.kernels.restore import restore_sinks

    x = omni(lens=(140, 140), dim=32, n_sink=40)
    x.fill((140, 140))  # the second request's sinks push out some of the first's
    prefix = torch.tensor([128, 128], device=x.device)
    started = torch.tensor([True, True], device=x.device)
    hits = sum(
        reference.restore_sinks(x.seg, b + 1, x.req_to_token[b + 1, :40].long()) for b in (0, 1)
    )
    assert 0 < hits < 80
    want = x.seg.windows.sink_k.stack.clone()
    x.seg.windows.sink_k.stack.fill_(float("nan"))
    counters = torch.zeros(3, dtype=torch.int64, device=x.device)
    restore_sinks(x.seg, x.req_to_token, x.rows, prefix, started, counters)
    assert counters.tolist() == [hits, 80 - hits, 2]
    got = x.seg.windows.sink_k.stack[:, 1:3]
    assert torch.allclose(got.float(), want[:, 1:3].float(), rtol=1e-2, atol=1e-6)


def test_decode_step_over_sealed_blocks(omni, check_layer):
    """The facade with the block of the codec: the token that ends a block, then the next ones."""
    x = omni(lens=(260, 140), dim=32)
    x.fill((255, 127))
    check_layer(x, [(255, 127), (256, 128)])
