"""Timing and synthetic caches for bench_kernels.py. Needs a CUDA GPU."""

from __future__ import annotations

import math

import torch

from oscar_sglang.kernels import codec, reference
from oscar_sglang.kernels.attend import Partials
from oscar_sglang.kernels.decode import DecodeAttention, DecodeStep
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.kernels.stores import HistoryStore, SinkCache, WindowStore
from oscar_sglang.kernels.views import layer_view, prepare_queries

COLD_BYTES = 300e6  # rotated through per replay: several times the L2 cache
DEV = "cuda"


def graph_time(calls, budget_ms: float = 40.0) -> float:
    """Median microseconds of one call; ``calls`` (over different buffers) make up one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        once = _elapsed(stream, graph.replay)
        repeats = max(9, min(100, int(budget_ms / max(once, 1e-3))))
        times = sorted(_elapsed(stream, graph.replay) for _ in range(repeats))
    return times[len(times) // 2] * 1e3 / len(calls)


def _elapsed(stream, work) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end)


def ceilings(gib: int = 2) -> dict[str, float]:
    """GB/s of a copy (read + write) and of a read-only reduction, both outside a graph."""
    a = torch.empty(gib << 28, dtype=torch.int32, device=DEV).random_()
    b = torch.empty_like(a)
    stream = torch.cuda.current_stream()
    result = {}
    for name, work, moved in (
        ("copy_gbps", lambda: b.copy_(a), 8),
        ("read_gbps", lambda: a.view(-1, 1 << 20).amax(dim=1), 4),
    ):
        work()
        times = sorted(_elapsed(stream, work) for _ in range(15))
        result[name] = round(moved * a.numel() / times[7] / 1e6, 1)
    return result


def scattered_slots(tokens: int, page: int) -> torch.Tensor:
    """A random permutation of pages, [tokens] int32, page 0 left out."""
    pages = torch.randperm(tokens // page, device=DEV).int() + max(1, 16 // page)
    return (pages[:, None] * page + torch.arange(page, device=DEV, dtype=torch.int32)).flatten()


def spec_of(codec_name: str, dim: int, bits: tuple[int, int] = (2, 2)) -> codec.CodecSpec:
    """A codec as a layer with RoPE has it; ``bits`` of K and V, where they can be chosen."""
    spec = codec.CODECS[codec_name]
    if spec.meta.name != "position":
        return spec
    theta = [1e6 ** (-2 * i / dim) for i in range(dim // 2)]
    options = {"rope": vars(codec.Rope.of(theta, dim)), "bits": [bits]}
    return codec.layer_specs(spec, 1, options)[0]


def random_params(
    spec: codec.CodecSpec, kv_heads: int, dim: int, spread: float = 0.05
) -> codec.LayerParams:
    """Matrices of a codec, random; the grid holds what ``Cache`` fills slots with and what rows
    of standard normal numbers need. ``spread``: size of the factor's entries."""
    factor = (torch.randn(kv_heads, dim, dim, device=DEV) * spread).triu(1)
    a = torch.randn(kv_heads, dim, dim, device=DEV) / dim**0.5
    r_k = torch.linalg.qr(torch.randn(kv_heads, dim, dim, device=DEV)).Q
    grid = _POSITION_GRID if spec.meta.name == "position" else _GRID
    made = {
        "r_k": r_k,
        "q_k": r_k,  # of an orthogonal matrix the inverse transposed
        "mean": torch.randn(kv_heads, dim, device=DEV) / dim**0.5,
        "r_v": torch.linalg.qr(torch.randn(kv_heads, dim, dim, device=DEV)).Q,
        "factor": factor,
        "metric": a @ a.transpose(-1, -2) + 0.05 * torch.eye(dim, device=DEV),
        "grid": torch.tensor(grid, device=DEV).expand(kv_heads, 2, 3),
    }
    return codec.LayerParams(**{n: made[n].contiguous() for n in spec.tensors(dim)})


# step_log2, lo_first, lo_step (``codec_compact``) and the bytes of steps from 0.4 to 0.9.
_GRID = (-8.0, -6.0, 0.047)
_STEP_BYTES = (107, 126)
# The same of ``position``: of K, with the share of the mean in place of lo, and of V.
_POSITION_GRID = ((-4.5, -4.0, 0.03125), (-4.5, -6.0, 0.047))
_POSITION_STEP_BYTES, _SHARE_BYTES = (102, 139), (96, 160)


class Cache:
    """One layer holding ``copies`` batches of ``batch`` requests of ``context`` random tokens."""

    def __init__(
        self, batch, context, *, kv_heads=8, group=4, dim=128, page=16, windows=None,
        codec_name="feedback", bits=(2, 2),
    ):  # fmt: skip
        self.batch, self.context, self.kv_heads, self.group, self.dim = (
            batch, context, kv_heads, group, dim,
        )  # fmt: skip
        self.windows = windows or WindowLayout()
        spec = spec_of(codec_name, dim, bits)
        self.layout = layout = spec.layout(kv_heads, dim)
        self.page = page = max(page, spec.block)
        unit = max(64, page)
        self.copies = max(1, min(48, math.ceil(COLD_BYTES / self.needed_bytes())))
        requests = self.copies * batch
        self.tokens = -(-context // unit) * unit
        slots = requests * self.tokens + unit
        store = HistoryStore(layout, 1, slots, DEV)
        self._randomise(store, spec.meta.name)
        params = random_params(spec, kv_heads, dim)
        window = WindowStore(self.windows, layout, 1, requests + 1, torch.bfloat16, DEV)
        for x in (window.sink_k, window.sink_v, window.recent_k, window.recent_v):
            x[0].normal_()
        cache = SinkCache(layout, 1, 1024, torch.bfloat16, DEV)
        self.seg = reference.Segments(spec, [params], store, window, cache, context=self.tokens)
        self.view = layer_view(self.seg, 0)
        self.table = torch.full((requests + 1, self.tokens), -1, dtype=torch.int32, device=DEV)
        self.table[1:] = scattered_slots(requests * self.tokens, page).view(requests, -1)
        self.rows = torch.arange(1, requests + 1, device=DEV).view(self.copies, batch)
        self.lens = torch.full((batch,), context, dtype=torch.int64, device=DEV)
        shape = (self.copies, batch, kv_heads * group, dim)
        self.q = torch.stack(
            [prepare_queries(self.view, q) for q in torch.randn(shape, device=DEV)]
        )
        self.out = torch.empty(shape, dtype=torch.bfloat16, device=DEV)

    def _randomise(self, store, form: str):
        flat = store.blocks[0].view(-1).view(torch.int32)
        for i in range(0, flat.numel(), 1 << 28):
            flat[i : i + (1 << 28)].random_(-(2**31), 2**31 - 1)
        *_, meta = store.views(0)
        for x in store.channels:
            x[..., 0].uniform_(0.4, 0.9)
            x[..., 1].uniform_(-1.4, -0.6)
        for i in range(0, len(meta), 1 << 16):
            part = meta[i : i + (1 << 16)]
            if form == "compact":
                part[..., 0::2].random_(*_STEP_BYTES)
                part[..., 1::2].random_(80, 128)
                continue
            if form == "position":
                part[..., 0::2].random_(*_POSITION_STEP_BYTES)
                part[..., 1].random_(*_SHARE_BYTES)
                part[..., 3].random_(80, 128)
                continue
            if form == "channel":
                part[..., 0].uniform_(0.4, 0.9)
                part = part[..., 1:]  # of V
            step = torch.empty(*part.shape[:-1], part.shape[-1] // 2, device=DEV).uniform_(0.4, 0.9)
            if form == "scale":
                part[:] = step.half()
                continue
            part[..., 0::2] = step.half()
            part[..., 1::2] = (-1.5 * step + torch.empty_like(step).uniform_(-0.3, 0.3)).half()

    def needed_bytes(self) -> int:
        """Bytes one decode attention must read: windows in 16 bits, the rest packed."""
        exact = min(self.context, self.windows.tokens)
        row = self.kv_heads * self.dim
        packed = self.layout.bytes_per_slot
        return self.batch * (exact * row * 4 + (self.context - exact) * packed)

    def steps(self, form=None, triton_only=False) -> list[DecodeStep]:
        """A planned step per copy."""
        own = DecodeAttention(
            heads=self.kv_heads * self.group, kv_heads=self.kv_heads, head_dim=self.dim,
            dtype=torch.bfloat16, windows=self.windows, page_size=self.page,
            max_batch=self.batch, device=DEV, triton_only=triton_only, block=self.layout.block,
        )  # fmt: skip
        chosen, shape = own.choose(self.batch, 1)
        if form is not None:
            chosen, shape = form, (shape[0], form.splits, *shape[2:])
        pool = torch.empty(Partials.numel(*shape), device=DEV)
        made = []
        for rows in self.rows:
            step = DecodeStep(own, chosen, Partials(*shape, DEV, pool), 1)
            step.plan(rows, self.lens, self.seg.windows.recent_start)
            made.append(step)
        return made

    def calls(self, steps):
        return [
            lambda i=i, s=s: s(self.view, self.q[i], self.table, self.out[i], scale=self.dim**-0.5)
            for i, s in enumerate(steps)
        ]

    def error(self, steps, requests: int = 2) -> float:
        """Worst relative error of a few requests against float64; stops the run if it is not small.

        Tensor cores truncate as they add, so a long sum of uniform weights over random values,
        which cancel, loses relative (not absolute) accuracy: hence the second term.
        """
        self.out.fill_(float("nan"))
        for call in self.calls(steps):
            call()
        worst = 0.0
        for copy, b in [(0, 0), (self.copies - 1, self.batch - 1)][:requests]:
            q = self.q[copy, b, :, : self.dim]
            want, value_rms = self._reference(int(self.rows[copy, b]), q)
            off = (self.out[copy, b].double() - want).norm()
            worst = max(worst, float(off / want.norm()))
            if not off <= 3e-3 * want.norm() + 1e-4 * value_rms * want.numel() ** 0.5:
                raise SystemExit(f"wrong at {self.batch} x {self.context}: error {worst:.2e}")
        if not bool(self.out.isfinite().all()):
            raise SystemExit(f"not every output was written at {self.batch} x {self.context}")
        return worst

    def _reference(self, row: int, q: torch.Tensor) -> tuple[torch.Tensor, float]:
        n, hk = self.context, self.kv_heads
        k = torch.empty(n, hk, self.dim, device=DEV)
        v = torch.empty_like(k)
        cached, start = torch.tensor(n - 1), torch.tensor(0)  # before the last token
        end = int(reference.history_end(cached, start, self.windows, self.layout.block))
        slots = self.table[row, :n].long()
        step = 16384
        for i in range(0, n, step):
            part = slice(i, min(n, i + step))
            reference.materialise(self.seg, 0, row, slots[part], i, end, k[part], v[part])
        q = q.double().view(hk, self.group, self.dim)
        out = []
        for h in range(hk):
            weight = (q[h] @ k[:, h].double().T * self.dim**-0.5).softmax(-1)
            out.append(weight @ v[:, h].double() @ self.view.params.r_v[h].double().T)
        return torch.cat(out), float(v.square().mean().sqrt())
