"""Kernel tests: one body for a GPU and for Triton's interpreter on a CPU (tiny shapes there)."""

import pytest
import torch
import triton

from oscar_sglang.kernels import codec, reference
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.kernels.stores import HistoryStore, SinkCache, WindowStore
from tests.support.emulated import compiler, cuda  # noqa: F401  fixtures


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def triton_mode(device):
    from oscar_sglang.kernels import tile

    compiled = isinstance(triton.language.sum, triton.JITFunction)  # its own, imported before
    if device.type == "cpu" and (compiled or not tile.interpreted()):
        pytest.skip("Triton was imported before TRITON_INTERPRET=1 was set")
    torch.manual_seed(0)


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp_min(1e-300))


def orthogonal(heads: int, dim: int, device) -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(heads, dim, dim, dtype=torch.float64))
    return q.float().contiguous().to(device)


def codec_params(spec: codec.CodecSpec, heads: int, dim: int, device) -> codec.LayerParams:
    """Parameters as ``calibration.fit`` makes them, from a random query metric; the grid holds
    rows whose mean is 0.5 and deviation 1."""
    a = torch.randn(heads, dim, dim, dtype=torch.float64) / dim**0.5
    plain = a @ a.transpose(-1, -2)
    trace = plain.diagonal(dim1=-2, dim2=-1).mean(-1)
    metric = plain + 0.05 * trace[:, None, None] * torch.eye(dim, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(metric)).transpose(-1, -2)
    unit = upper / upper.diagonal(dim1=-2, dim2=-1)[..., None]
    made = {
        "r_k": orthogonal(heads, dim, device),
        "r_v": orthogonal(heads, dim, device),
        "factor": unit.triu(1).float().contiguous().to(device),
        "metric": metric.float().to(device),
        "grid": torch.tensor([[-7.9, -6.1, 0.047], [-8.2, -7.3, 0.053]]).repeat(heads, 1, 1),
    }
    if spec.meta.name == "position":  # 8 octaves; the mean's share; keys' basis not orthogonal
        stretch = torch.rand(heads, 1, dim, dtype=torch.float64) + 0.5
        r_k = made["r_k"].cpu().double() * stretch @ orthogonal(heads, dim, "cpu").double()
        made |= {
            "r_k": r_k.float(),
            "q_k": torch.linalg.inv(r_k).transpose(1, 2).contiguous().float(),
            "metric": plain.float(),
            "mean": torch.randn(heads, dim) * 2 / dim**0.5,
            "grid": torch.tensor([[-4.3, -2.6, 0.021], [-4.9, -7.3, 0.053]]).repeat(heads, 1, 1),
        }
    return codec.LayerParams(**{n: made[n].to(device) for n in spec.tensors(dim)})


class Lab:
    """A one-layer cache filled by the reference, with slots scattered at page granularity."""

    def __init__(
        self, device, kv_heads=2, group=2, dim=64, n_sink=16, n_recent=32, lens=(100,), page=16,
        codec_name="feedback", dtype=torch.bfloat16, spread=1.0, first_slot_block=1, poison=True,
        adjacent=False,
    ):  # fmt: skip
        self.device, self.kv_heads, self.group, self.dim, self.dtype = (
            device, kv_heads, group, dim, dtype,
        )  # fmt: skip
        spec = codec.CODECS[codec_name.rstrip("24")]  # position42: 4 bits for K
        if spec.meta.name == "position":  # RoPE of all but a quarter of the channels
            theta = 0.3 ** torch.arange(3 * dim // 8, dtype=torch.float64)
            rope = codec.Rope.of(theta.tolist(), dim, adjacent)
            bits = codec_name.removeprefix("position") or "22"
            spec = codec.with_bits(codec.with_rope(spec, rope), *map(int, bits))
        if spec.block > 1:  # pages are blocks, and the ring holds at least one
            page, n_recent = spec.block, spec.ring_tokens(n_recent)
            first_slot_block = spec.block // 16
        self.block = spec.block
        self.lens, self.page = list(lens), page
        self.windows = WindowLayout(n_sink, n_recent)
        params = codec_params(spec, kv_heads, dim, device)
        rows, longest = len(lens) + 2, max([*lens, 1])
        self.max_context = -(-(longest + 32) // page) * page
        pages = len(lens) * self.max_context // page
        slots = first_slot_block * 16 + (pages + 1) * page
        layout = spec.layout(kv_heads, dim)
        self.seg = reference.Segments(
            spec,
            [params],
            HistoryStore(layout, 1, slots, device),
            WindowStore(self.windows, layout, 1, rows, dtype, device),
            SinkCache(layout, 1, 61, dtype, device),
            context=self.max_context,
        )
        if poison:
            self._poison()
        order = torch.randperm(pages) * page + max(page, first_slot_block * 16)
        table = (order[:, None] + torch.arange(page)).view(len(lens), self.max_context)
        self.req_to_token = torch.full((rows, self.max_context), -1, dtype=torch.int32)
        self.rows = torch.arange(len(lens)) + 1
        for b, n in enumerate(lens):
            self.req_to_token[b + 1, : n + 32] = table[b, : n + 32].int()
        self.req_to_token = self.req_to_token.to(device)
        self.rows = self.rows.to(device)
        self.spread = spread

    def _poison(self):
        """NaN windows, NaN metadata and 0xFF codes wherever nothing is written later."""
        self.seg.history.blocks[0].fill_(0xFF)
        for x in self.seg.history.channels:
            x.fill_(float("nan"))
        for x in (self.seg.windows.sink_k, self.seg.windows.recent_k):
            x[0].fill_(float("nan"))
        for x in (self.seg.windows.sink_v, self.seg.windows.recent_v):
            x[0].fill_(float("nan"))

    def random(self, n, heads):
        x = (torch.randn(n, heads, self.dim) + 0.5) * self.spread
        return x.to(self.dtype).to(self.device)

    def fill(self, upto):
        """Store positions [0, upto[b]) of each request through the reference."""
        for b, n in enumerate(upto):
            if n > 0:
                self.reference_store(
                    b, 0, n, self.random(n, self.kv_heads), self.random(n, self.kv_heads)
                )

    def reference_store(self, b, start, end, k, v):
        plan = reference.plan_batch(
            self.seg,
            self.rows[b : b + 1],
            torch.tensor([start], device=self.device),
            torch.tensor([end], device=self.device),
            self.req_to_token[b + 1, start:end],
        )
        reference.store(self.seg, 0, plan, k, v)

    def batch(self, spans):
        """TokenBatch of [(request, start, end)] with the sink rows claimed."""
        from oscar_sglang.kernels.plan import claim_sinks
        from oscar_sglang.kernels.views import TokenBatch

        cat = [torch.arange(s, e) for _, s, e in spans]
        rows = torch.cat([torch.full((e - s,), b + 1) for b, s, e in spans])
        positions, ends = torch.cat(cat), torch.cat([torch.full((e - s,), e) for _, s, e in spans])
        slots = torch.cat([self.req_to_token[b + 1, s:e].cpu().long() for b, s, e in spans])
        move = [t.to(self.device) for t in (rows, positions, ends, slots)]
        index = torch.empty_like(move[3])
        claim = torch.full_like(self.seg.sinks.tag, -1, dtype=torch.int32)
        claim_sinks(self.seg.sinks.tag, claim, move[1], move[3], self.windows.n_sink, index)
        assert (claim == -1).all()
        return TokenBatch(*move, index)

    def qkv(self, n):
        """q, k, v as strided views into one projection output."""
        sizes = (self.kv_heads * self.group, self.kv_heads, self.kv_heads)
        return self.random(n, sum(sizes)).split(sizes, 1)

    def view(self):
        from oscar_sglang.kernels.views import layer_view

        return layer_view(self.seg, 0)

    def hist_end(self, b, seq_len, q_len=1):
        w = self.windows
        low = max(int(self.seg.windows.recent_start[b + 1]), seq_len - w.n_recent)
        return max(0, min(seq_len - q_len, max(w.n_sink, low + -low % self.block)))

    def dense(self, b, seq_len, q_len=1):
        """K, V [S, Hk, D] float32 of a request from the segment that holds each position."""
        k = torch.empty(seq_len, self.kv_heads, self.dim, device=self.device)
        v = torch.empty_like(k)
        slots = self.req_to_token[b + 1, :seq_len].long()
        reference.materialise(self.seg, 0, b + 1, slots, 0, self.hist_end(b, seq_len, q_len), k, v)
        return k, v

    def attention(self, b, q_rot, seq_len, scale, cap=0.0):
        """float64 attention of query rows [n, H, D], the last n positions -> out, lse."""
        n = len(q_rot)
        k, v = (x.double() for x in self.dense(b, seq_len, n))
        k, v = (x.repeat_interleave(self.group, 1) for x in (k, v))
        logits = torch.einsum("nhd,shd->nhs", q_rot.double(), k) * scale
        if cap:
            logits = cap * torch.tanh(logits / cap)
        position = torch.arange(seq_len, device=self.device)
        q_pos = torch.arange(seq_len - n, seq_len, device=self.device)
        logits = logits.masked_fill(position > q_pos[:, None, None], -torch.inf)
        out = torch.einsum("nhs,shd->nhd", logits.softmax(-1), v)
        back = self.seg.params[0].r_v.double().transpose(-1, -2)
        back = back.repeat_interleave(self.group, 0)
        return torch.einsum("nhd,hde->nhe", out, back), logits.logsumexp(-1)


@pytest.fixture
def lab(device):
    return lambda **kw: Lab(device, **kw)


@pytest.fixture
def rms():
    return relative_rms


def run_attention(lab, seq_lens, q_lens=None, splits=5, cap=0.0, spread=1.0, form=None):
    """plan + attend + merge with every buffer poisoned -> out, lse, and what float64 gives.

    form: a ``cuda_attend.Form``; None runs the Triton kernels.
    """
    from oscar_sglang.kernels import attend, cuda_attend, merge
    from oscar_sglang.kernels.plan import plan_attend
    from oscar_sglang.kernels.views import prepare_queries

    ragged = q_lens is not None
    q_lens = q_lens or [1] * len(seq_lens)
    total, heads, max_q = sum(q_lens), lab.kv_heads * lab.group, max(q_lens)
    view = lab.view()
    queries = torch.randn(total, heads, lab.dim, device=lab.device) * spread
    if view.means is not None:
        queries = prepare_queries(view, queries)
    q = queries[..., : lab.dim]
    splits = form.splits if form else splits
    part = attend.Partials(
        len(seq_lens), splits, lab.kv_heads, max_q * lab.group, lab.dim, lab.device
    )
    part.o.fill_(float("nan"))
    part.ml.fill_(float("nan"))
    indptr = torch.tensor([0, *q_lens]).cumsum(0).to(lab.device)
    lens = torch.tensor(seq_lens, device=lab.device)
    recent_start = lab.seg.windows.recent_start
    plan_attend(
        part.plan, lab.rows, lens, recent_start, lab.windows, splits,
        indptr if ragged else None, block=lab.block,
    )  # fmt: skip
    queries = queries.clone()  # plan and attend are never neighbours in a stream (``plan_attend``)
    scale = lab.dim**-0.5
    dtype = lab.dtype if form else torch.float32
    out = torch.full((total, heads, lab.dim), float("nan"), device=lab.device, dtype=dtype)
    lse = torch.full((total, heads), float("nan"), device=lab.device)
    if form:
        cuda_attend.attend(form, part, view, queries, lab.req_to_token, scale, cap)
        cuda_attend.merge(part, view, out, max_q, lse)
    else:
        attend.attend(part, view, queries, lab.req_to_token, scale, cap)
        merge.merge(part, view, out, max_q, lse)
    want = torch.zeros(out.shape, dtype=torch.float64, device=lab.device)
    want_lse = torch.full_like(lse, -torch.inf, dtype=torch.float64)
    for b, (s, n) in enumerate(zip(seq_lens, q_lens, strict=True)):
        at = slice(int(indptr[b]), int(indptr[b]) + n)
        if s:
            want[at], want_lse[at] = lab.attention(b, q[at], s, scale, cap)
    return out, lse, want, want_lse


def check_attention(lab, seq_lens, q_lens=None, tol=2e-3, logit_tol=1e-4, **kw):
    """Kernel error only: the reference reads the same cache. ``tol`` is relative RMS, ``logit_tol``
    a share of the LSE: what codes, steps and q rounded to FP16 do to large logits."""
    out, lse, want, want_lse = run_attention(lab, seq_lens, q_lens, **kw)
    assert not out.isnan().any()
    error = relative_rms(out, want)
    assert error < tol
    finite = want_lse.isfinite()
    assert torch.equal(finite, lse.isfinite())
    error = (lse.double() - want_lse)[finite].abs()
    assert error.numel() == 0 or error.max() < 5e-3 + logit_tol * want_lse[finite].abs().max()


@pytest.fixture
def run():
    return run_attention


@pytest.fixture
def check():
    return check_attention


@pytest.fixture
def check_layer():
    return check_decode_layers


def check_decode_layers(lab, steps):
    """Decode steps of the Triton kernels, each storing a token at these positions of the requests
    and attending to it, against float64 attention over the cache that results."""
    from oscar_sglang.kernels.decode import DecodeAttention
    from oscar_sglang.kernels.views import TokenBatch

    heads, n = lab.kv_heads * lab.group, len(lab.lens)
    attention = DecodeAttention(
        heads=heads, kv_heads=lab.kv_heads, head_dim=lab.dim, dtype=lab.dtype, windows=lab.windows,
        page_size=lab.page, max_batch=n, device=lab.device, triton_only=True, block=lab.block,
    )  # fmt: skip
    run = attention.step(n)
    for positions in steps:
        last = torch.tensor(positions, device=lab.device)
        slots = lab.req_to_token[lab.rows, last].long()
        run.plan(lab.rows, last + 1, lab.seg.windows.recent_start)
        q, k, v = (lab.random(n, h) for h in (heads, lab.kv_heads, lab.kv_heads))
        where = TokenBatch(lab.rows, last, last + 1, slots, torch.full_like(slots, -1))
        out = torch.empty(q.shape, device=lab.device)
        run.layer(lab.view(), where, q, k, v, lab.req_to_token, out, scale=0.125)
        rotated = codec.rotate(q, lab.seg.params[0].queries)
        for b, position in enumerate(positions):
            want = lab.attention(b, rotated[b : b + 1], position + 1, 0.125)[0]
            assert relative_rms(out[b : b + 1], want) < 2e-3
