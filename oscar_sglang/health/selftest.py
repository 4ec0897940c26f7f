"""Do the kernels agree with the reference on this machine?

Run by ``oscar-sglang doctor``, and by a server on a GPU whose kernels are not ``proven`` there.
Small random requests are stored by the kernels and, apart, by the reference on the CPU; then one
decode step over the kernels' own cache is compared with the reference's attention over it, and its
own rows with the reference's. So a wrong store and a wrong attend are told apart.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..config import KERNELS_VARIABLE, OscarError
from ..kernels import cuda_store, reference
from ..kernels.codec import CODECS, CodecSpec, LayerParams
from ..kernels.decode import DecodeAttention
from ..kernels.layout import WindowLayout
from ..kernels.plan import claim_sinks
from ..kernels.store import store
from ..kernels.stores import HistoryStore, SinkCache, WindowStore
from ..kernels.views import LayerView, TokenBatch, layer_view, query_buffer

logger = logging.getLogger(__name__)

# Compute capabilities of GPUs on which the tests of all CUDA kernels have passed.
PROVEN_ON = ((9, 0),)
# Rows whose codes or metadata differ may do so by a tie of float32 rounding: below 1% here.
EQUAL_ROWS = 0.97
# Relative RMS. Exact rows are BF16; attend multiplies in FP16 and writes BF16.
WINDOW_ERROR = 8e-3
ATTENTION_ERROR = 1e-2


@dataclass(frozen=True)
class Shape:
    """What is tried. The first request has a history of several blocks, the last none."""

    head_dim: int = 128
    kv_heads: int = 8
    group: int = 4
    lens: tuple[int, ...] = (700, 345, 40)
    windows: WindowLayout = WindowLayout(64, 256)
    page: int = 16
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Agreement:
    """Shares and relative RMS errors of one comparison."""

    equal_rows: float
    window_error: float
    attention_error: float

    @property
    def sound(self) -> bool:
        return (
            self.equal_rows >= EQUAL_ROWS
            and self.window_error <= WINDOW_ERROR
            and self.attention_error <= ATTENTION_ERROR
        )  # a NaN fails

    def __str__(self) -> str:
        return (
            f"{self.equal_rows:.2%} of rows store as the reference's (at least {EQUAL_ROWS:.0%}), "
            f"exact rows within {self.window_error:.1e} (limit {WINDOW_ERROR:.0e}), "
            f"attention within {self.attention_error:.1e} (limit {ATTENTION_ERROR:.0e})"
        )


_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.cpu().double(), want.cpu().double()
    return float((got - want).norm() / want.norm())


def _params(shape: Shape, g: torch.Generator) -> LayerParams:
    matrices = torch.randn(
        2, shape.kv_heads, shape.head_dim, shape.head_dim, generator=g, dtype=torch.float64
    )
    r_k, r_v = torch.linalg.qr(matrices)[0].float().contiguous()
    factor = torch.randn(r_k.shape, generator=g) * 0.2 / shape.head_dim**0.5
    return LayerParams(r_k, r_v, factor.triu(1) + torch.eye(shape.head_dim))


class _Pool:
    """One layer of a cache, and slots scattered page by page."""

    def __init__(
        self, shape: Shape, spec: CodecSpec, params: LayerParams, table: torch.Tensor, device
    ) -> None:
        layout = spec.layout(shape.kv_heads, shape.head_dim)
        rows, slots = table.shape[0], table.numel() + shape.page
        self.shape, self.device, self.table = shape, device, table.to(device)
        self.seg = reference.Segments(
            spec,
            [params.to(device)],
            HistoryStore(layout, 1, slots, device),
            WindowStore(shape.windows, layout, 1, rows, shape.dtype, device),
            SinkCache(layout, 1, slots, shape.dtype, device),
            context=table.shape[1],
        )

    def batch(self, starts: list[int], ends: list[int]) -> reference.Batch:
        rows = torch.arange(1, len(ends) + 1)
        slots = torch.cat(
            [self.table[r, a:b] for r, a, b in zip(rows.tolist(), starts, ends, strict=True)]
        )
        parts = torch.stack([rows, torch.tensor(starts), torch.tensor(ends)]).to(self.device)
        return reference.plan_batch(self.seg, parts[0], parts[1], parts[2], slots)

    def tokens(self, batch: reference.Batch) -> TokenBatch:
        index, tag = torch.empty_like(batch.slots), self.seg.sinks.tag
        claim = torch.full_like(tag, -1, dtype=torch.int32)
        n_sink = self.shape.windows.n_sink
        claim_sinks(tag, claim, batch.positions, batch.slots, n_sink, index)
        return TokenBatch(batch.token_rows, batch.positions, batch.ends, batch.slots, index)


def compare(
    device,
    triton_only: bool,
    shape: Shape = Shape(),
    spec: CodecSpec = CODECS["feedback"],
    params: LayerParams | None = None,
) -> Agreement:
    """Store ``shape.lens`` less one token each, then one decode step, by kernels and reference.

    ``params``: of one layer and ``shape.kv_heads`` heads; random ones, of ``feedback``, without.
    """
    g = torch.Generator().manual_seed(0)
    requests, longest = len(shape.lens), -(-max(shape.lens) // shape.page) * shape.page
    pages = (requests + 1) * longest // shape.page
    order = torch.randperm(pages, generator=g).view(requests + 1, -1, 1) + 1
    table = (order * shape.page + torch.arange(shape.page)).flatten(1).int()
    params = _params(shape, g) if params is None else params
    ours, other = (_Pool(shape, spec, params, table, d) for d in (torch.device(device), "cpu"))
    heads, cached = shape.kv_heads * shape.group, [n - 1 for n in shape.lens]

    def random(tokens: int) -> _Rows:
        sizes = (heads, shape.kv_heads, shape.kv_heads)
        rows = torch.randn(tokens, sum(sizes), shape.head_dim, generator=g) + 0.3
        q, k, v = rows.to(shape.dtype).split(sizes, 1)
        return q, k, v

    def to(pool: _Pool, rows: _Rows) -> _Rows:
        q, k, v = (x.to(pool.device) for x in rows)
        return q, k, v

    rows, view = random(sum(cached)), layer_view(ours.seg, 0)
    reference.store(other.seg, 0, other.batch([0] * requests, cached), *rows[1:])
    begun = ours.batch([0] * requests, cached)
    store(view, ours.tokens(begun), *to(ours, rows), None, triton_only)

    rows = random(requests)
    mine, batch = to(ours, rows), ours.batch(cached, list(shape.lens))
    scratch = torch.empty(2, longest, shape.kv_heads, shape.head_dim, device=ours.device)
    scale = shape.head_dim**-0.5
    want = reference.attention(ours.seg, 0, batch, *mine, ours.table, scratch, scale)
    attention = DecodeAttention(
        heads=heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype,
        windows=shape.windows, page_size=shape.page, max_batch=requests, device=ours.device,
        triton_only=triton_only, block=spec.block,
    )  # fmt: skip
    q_rot = query_buffer(view, requests, heads)
    tokens = ours.tokens(batch)
    stored = cuda_store.supported(view, tokens, *mine, q_rot) or not cuda_store.has_codec(spec)
    if not triton_only and not (attention.cuda and stored):  # both would run the Triton kernels
        raise RuntimeError("the CUDA kernels do not support what the self-test runs")
    out = torch.empty(mine[0].shape, dtype=shape.dtype, device=ours.device)
    step = attention.step(requests)
    step.plan(batch.rows, batch.seq_lens, ours.seg.windows.recent_start)
    step.layer(view, tokens, *mine, ours.table, out, scale=scale)
    reference.store(other.seg, 0, other.batch(cached, list(shape.lens)), *rows[1:])
    return Agreement(*_stored(ours, other), _error(out, want))


def _stored(ours: _Pool, other: _Pool) -> tuple[float, float]:
    """Share of equal history rows, largest error of the exact stores."""
    block = other.seg.spec.block
    slots = torch.cat([other.table[i + 1, : n - n % block] for i, n in enumerate(ours.shape.lens)])
    equal = torch.ones(len(slots), ours.shape.kv_heads, dtype=torch.bool)
    mine = ours.seg.history.read(0, slots.to(ours.device).long())
    for got, want in zip(mine, other.seg.history.read(0, slots.long()), strict=True):
        equal &= (got.packed.cpu() == want.packed).all(-1) & (got.meta.cpu() == want.meta).all(-1)
    a, b = ours.seg, other.seg
    assert torch.equal(a.sinks.tag.cpu(), b.sinks.tag)
    pairs = [(getattr(a.windows, n)[0], getattr(b.windows, n)[0]) for n in _WINDOWS]
    pairs += [(a.sinks.k[0], b.sinks.k[0]), (a.sinks.v[0], b.sinks.v[0])]
    return equal.float().mean().item(), max(_error(x, y) for x, y in pairs)


def proven(device: torch.device, codec: str) -> bool:
    """Whether the kernels need no comparison here before they serve."""
    return CODECS[codec].meta.proven and torch.cuda.get_device_capability(device) in PROVEN_ON


def check_backend(attention: DecodeAttention, views: list[LayerView]) -> None:
    """Compare CUDA kernels with the reference before serving, where no test has done so: of each
    kind of layer one."""
    for view in {v.spec: v for v in views}.values():
        if attention.cuda and not proven(attention.device, view.spec.name):
            check_served(attention, view.spec, view.params)


def check_served(attention: DecodeAttention, spec: CodecSpec, params: LayerParams) -> None:
    """Compare what a server is about to use; raises OscarError where it is unsound."""
    windows, page = attention.windows, attention.page_size
    exact = -(-windows.tokens // page) * page
    shape = Shape(
        attention.head_dim,
        attention.kv_heads,
        attention.heads // attention.kv_heads,
        # A history of several blocks; a decode step that ends a block or page; no history.
        lens=(exact + 3 * max(page, 128) + 28, exact + page, 40),
        windows=windows,
        page=page,
        dtype=attention.dtype,
    )
    way_out = f"${KERNELS_VARIABLE}=triton serves with the portable kernels"
    try:
        found = compare(attention.device, not attention.cuda, shape, spec, params)
    except Exception as error:
        raise OscarError(
            f"the kernels of codec {spec.name} fail here: {error}; {way_out}"
        ) from error
    if not found.sound:
        raise OscarError(f"the kernels of codec {spec.name} are wrong here: {found}; {way_out}")
    logger.info("oscar: kernels of codec %s against the reference: %s", spec.name, found)


_WINDOWS = ("sink_k", "sink_v", "recent_k", "recent_v")
