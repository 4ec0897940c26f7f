"""store against the reference: windows, codes, metadata, sink cache."""

import pytest
import torch

from oscar_sglang.kernels import codec, reference
from oscar_sglang.kernels.cuda_attend import has_layout
from oscar_sglang.kernels.cuda_store import has_codec
from oscar_sglang.kernels.store import store
from oscar_sglang.kernels.views import TokenBatch, prepare_queries, query_buffer


def assert_codes(x, y, rows, spec_range, factor, allow=0.02):
    """Codes and metadata of ``rows`` follow from y [T, Hk, D] (rotated by the reference).

    Metadata may differ by one FP16 rounding; given the kernel's own metadata and earlier codes,
    every code must be the nearest one, up to ties that float32 rounding of the rotation decides.
    """
    want = codec.value_range(y, spec_range)
    assert torch.allclose(rows.meta.float(), want.float(), rtol=2e-3, atol=1e-7)
    same = (rows.meta == want).all(-1)
    assert same.float().mean() > 1 - allow
    codes = codec.unpack(rows.packed)
    step, lo = rows.meta.float().unbind(-1)
    w, slack = y.double().clone(), 1e-3
    for j in range(y.shape[-1]):
        ideal = torch.where(step > 0, (w[..., j] - lo) / step, torch.zeros_like(step)).clamp(0, 3)
        assert ((codes[..., j] - ideal).abs() <= 0.5 + slack).all(), f"channel {j}"
        if factor is not None:
            error = w[..., j] - (codes[..., j] * step + lo)
            w[..., j + 1 :] -= error[..., None] * factor[:, j, j + 1 :].double()
    want_codes = (
        codec.round_codes(y, rows.meta)
        if factor is None
        else codec.feedback_codes(y, rows.meta, factor)
    )
    assert (codes == want_codes).all(-1).float().mean() > 1 - allow


def assert_rows(got, want, allow=0.03):
    """All but a few rows are the reference's byte for byte; float32 rounding of the rotation puts
    a number on the other side of a tie now and then."""
    assert got.meta.dtype == want.meta.dtype
    same = (got.packed == want.packed).all(-1) & (got.meta == want.meta).all(-1)
    assert same.float().mean() > 1 - allow


@pytest.fixture(params=["cuda", "triton"])
def triton_only(request, device):
    """Both forms on a GPU (head_dims without a CUDA form take the Triton one either way)."""
    if request.param == "cuda" and device.type == "cpu":
        pytest.skip("the CUDA form needs a GPU")
    return request.param == "triton"


SPANS = [(0, 0, 40), (1, 20, 21), (2, 3, 20)]


ON_GPU = pytest.mark.gpu
ROW_CODECS = [name for name, spec in codec.CODECS.items() if spec.block == 1]  # others: test_seal
SHAPES = [
    *((16, 1, name) for name in ROW_CODECS),
    # The interpreter is slow at the search of accurate; accurate-compact has it too.
    *(pytest.param(64, 16, n, marks=[ON_GPU] * (n == "accurate")) for n in ROW_CODECS),
    *(pytest.param(128, 16, name, marks=ON_GPU) for name in ROW_CODECS),
    (16, 1, "position42"),
    (64, 16, "position24"),
    pytest.param(128, 16, "position44", marks=ON_GPU),
]


@pytest.mark.parametrize("dim,page,codec_name", SHAPES)
def test_store_matches_the_reference(lab, rms, triton_only, codec_name, dim, page):
    x = lab(lens=(40, 21, 20), dim=dim, page=page, codec_name=codec_name, n_sink=7, n_recent=19)
    tokens = x.batch(SPANS)
    q, k, v = x.qkv(58)
    view = x.view()
    q_rot = query_buffer(view, 58, q.shape[1]).fill_(float("nan"))
    store(view, tokens, q, k, v, q_rot, triton_only)
    params = x.seg.params[0]
    k_rot, v_rot = codec.rotate(k, params.r_k), codec.rotate(v, params.r_v)
    want = prepare_queries(view, q)
    assert rms(q_rot[..., :dim], want[..., :dim]) < 3e-5  # queries: two 16-bit parts of R
    if view.means is not None:
        got, want = (t[..., dim:].view(torch.float16) for t in (q_rot, want))
        assert (got != want).float().mean() < 0.01 and torch.allclose(got, want, rtol=2e-3)
    k_rows, v_rows = x.seg.history.read(0, tokens.slots)
    assert_rows(k_rows, x.seg.spec.encode_k(params, k_rot, tokens.positions))
    assert_rows(v_rows, x.seg.spec.encode_v(params, v_rot))
    if x.seg.spec.meta.name == "affine" and "metric" not in x.seg.spec.search.tensors:
        assert_codes(x, k_rot, k_rows, x.seg.spec.k_range, params.factor)
        assert_codes(x, v_rot, v_rows, x.seg.spec.v_range, None)
    for i in range(58):
        row, pos, end = int(tokens.rows[i]), int(tokens.positions[i]), int(tokens.ends[i])
        w = x.seg.windows
        for sink, ring, want in (
            (w.sink_k, w.recent_k, k_rot[i]), (w.sink_v, w.recent_v, v_rot[i]),
        ):  # fmt: skip
            if pos < 7:
                assert rms(sink[0][row, pos], want) < 6e-3  # BF16; the interpreter truncates
            if pos >= end - 19:
                assert rms(ring[0][row, pos % 19], want) < 6e-3  # BF16; the interpreter truncates
    for i in (tokens.cache_index >= 0).nonzero().flatten().tolist():
        at = int(tokens.cache_index[i])
        assert int(x.seg.sinks.tag[at]) == int(tokens.slots[i])
        assert rms(x.seg.sinks.k[0][at], k_rot[i]) < 6e-3
        assert rms(x.seg.sinks.v[0][at], v_rot[i]) < 6e-3


def test_claim_agrees_with_the_reference(lab):
    x = lab(lens=(40, 40, 40), n_sink=32)
    spans = [(0, 0, 40), (1, 0, 40), (2, 0, 40)]
    tokens = x.batch(spans)
    sink = (tokens.positions < 32) & (tokens.slots > 0)
    want = torch.full_like(tokens.slots, -1)
    candidates = sink.nonzero().squeeze(-1)
    won = candidates[x.seg.sinks.winners(tokens.slots[candidates])]
    want[won] = tokens.slots[won] % len(x.seg.sinks.tag)
    assert torch.equal(tokens.cache_index, want)


def test_untouched_memory(lab, triton_only):
    """Only the slots, window rows and cache rows of the batch change; slot -1 writes nothing."""
    x = lab(lens=(30, 30), dim=32)
    tokens = x.batch([(0, 20, 24)])
    before = x.seg.history.blocks[0].clone()
    slots = tokens.slots.clone()
    slots[1] = -1
    q, k, v = x.qkv(4)
    store(
        x.view(),
        tokens._replace(slots=slots),
        q,
        k,
        v,
        torch.empty_like(q, dtype=torch.float32),
        triton_only,
    )
    everything = torch.arange(x.seg.history.num_slots, device=x.device)
    old, new = x.seg.history, x.seg.history.read(0, everything)
    old.blocks[0], kept = before, old.blocks[0]
    was = old.read(0, everything)
    old.blocks[0] = kept
    changed = torch.zeros(len(everything), dtype=torch.bool, device=x.device)
    for a, b in zip(new, was, strict=True):
        changed |= (a.packed != b.packed).flatten(1).any(1)
    assert set(changed.nonzero().flatten().tolist()) == set(slots[slots >= 0].tolist())
    ring = x.seg.windows.recent_k[0]
    written = ring.isfinite().all(-1).all(-1).nonzero().tolist()
    assert written == [[1, p % 32] for p in (20, 22, 23)]


def test_queries_can_be_skipped(lab, triton_only):
    """Without q_rot the same bytes are written."""
    x = lab(lens=(20,), dim=64)
    tokens = x.batch([(0, 0, 20)])
    q, k, v = x.qkv(20)
    q_rot = torch.empty(q.shape, device=x.device)
    store(x.view(), tokens, q, k, v, q_rot, triton_only)
    blocks = x.seg.history.blocks[0].clone()
    x.seg.history.blocks[0].fill_(0xFF)
    assert store(x.view(), tokens, q, k, v, None, triton_only) is None
    assert torch.equal(x.seg.history.blocks[0], blocks)


@pytest.mark.parametrize(
    "codec_name", ["feedback", "oscar", "lloyd", "compact", "accurate-compact", "position"]
)
@pytest.mark.parametrize(
    "value", [0.0, 1.0, 65504.0, -65504.0, 1e-40, 1e-7], ids=lambda v: f"{v:g}"
)
def test_degenerate_rows_stay_finite(lab, triton_only, codec_name, value):
    x = lab(lens=(8,), dim=64 if torch.cuda.is_available() else 16, codec_name=codec_name)
    tokens = x.batch([(0, 0, 2)])
    q, k, v = (torch.full_like(t, value) for t in x.qkv(2))
    k[1, :, ::2] *= -1
    store(x.view(), tokens, q, k, v, query_buffer(x.view(), 2, q.shape[1]), triton_only)
    spec, params = x.seg.spec, x.seg.params[0]
    k_hat, v_hat = reference.read_history(x.seg, 0, tokens.slots, tokens.positions)
    assert k_hat.isfinite().all() and v_hat.isfinite().all()
    v_rot = codec.rotate(v, params.r_v)
    want = spec.decode_v(params, spec.encode_v(params, v_rot))
    step = codec.value_range(v_rot, spec.v_range)[..., 0].float().abs().max()
    assert (v_hat - want).abs().max() <= 4 * (step + 1e-6)


@pytest.mark.parametrize(
    "codec_name",
    ["feedback", "compact", "lloyd", "position", pytest.param("accurate-compact", marks=ON_GPU)],
)
def test_rows_do_not_depend_on_their_batch(lab, triton_only, codec_name):
    """The same token alone and inside a long batch yields the same bytes."""
    x = lab(lens=(40,), dim=128 if torch.cuda.is_available() else 32, codec_name=codec_name)
    tokens = x.batch([(0, 0, 40)])
    q, k, v = x.qkv(40)
    store(x.view(), tokens, q, k, v, None, triton_only)
    together = x.seg.history.blocks[0].clone()
    one = TokenBatch(*(t[33:34] for t in tokens))
    store(x.view(), one, q[33:34], k[33:34], v[33:34], None, triton_only)
    assert torch.equal(x.seg.history.blocks[0], together)


def test_decode_step_equals_reference_attention(lab, rms):
    """store, plan, attend, merge in a row give what ``reference.attention`` gives."""
    from oscar_sglang.kernels.attend import Partials, attend
    from oscar_sglang.kernels.merge import merge
    from oscar_sglang.kernels.plan import plan_attend

    lens = (70, 5, 33)
    x = lab(lens=lens)
    x.fill([n - 1 for n in lens])
    q, k, v = x.qkv(3)
    seq = torch.tensor(lens, device=x.device)
    slots = torch.stack([x.req_to_token[b + 1, n - 1] for b, n in enumerate(lens)])
    plan = reference.plan_batch(x.seg, x.rows, seq - 1, seq, slots)
    scratch = torch.empty(2, 64, x.kv_heads, x.dim, device=x.device)
    want = reference.attention(x.seg, 0, plan, q, k, v, x.req_to_token, scratch, x.dim**-0.5)
    tokens = x.batch([(b, n - 1, n) for b, n in enumerate(lens)])
    part = Partials(3, 4, x.kv_heads, x.group, x.dim, x.device)
    q_rot = torch.empty(q.shape, device=x.device)
    out = torch.empty(q.shape, device=x.device)
    store(x.view(), tokens, q, k, v, q_rot)
    plan_attend(part.plan, x.rows, seq, x.seg.windows.recent_start, x.windows, 4)
    attend(part, x.view(), q_rot, x.req_to_token, x.dim**-0.5)
    merge(part, x.view(), out)
    assert rms(out, want) < 4e-3  # the fresh row is BF16 in the ring, float32 in the reference


def test_which_codecs_the_cuda_kernels_take():
    """What CUDA does not handle takes the Triton forms; a layout it cannot read is not guessed."""
    every = codec.CODECS
    assert all(has_layout(c.layout(2, 64)) for c in every.values())
    assert [name for name, c in every.items() if not has_codec(c)] == ["omni"]
