"""Time the kernels against FA3, FlashInfer and SGLang's Triton decode on one GPU.

    python -m scripts.bench_kernels --out scripts/results/kernels-h200.json [--quick]
    python -m scripts.bench_kernels --compare position --out FILE      one codec beside feedback

Every number is the median of CUDA-graph replays over caches that do not fit in L2, windows and the
inverse rotation included; a wrong result stops the run. Ceilings are measured outside a graph.
``copy_share`` is the bytes an operation needs over the time, as a share of copy bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch

from oscar_sglang.kernels import codec, codec_omni, codec_position
from oscar_sglang.kernels.materialise import materialise
from oscar_sglang.kernels.means import Means
from oscar_sglang.kernels.rotate import join_prefix, rotate_queries
from oscar_sglang.kernels.store import store
from oscar_sglang.kernels.views import TokenBatch, prepare_queries, query_buffer
from scripts.lib import bench_baselines as baselines
from scripts.lib.bench_common import DEV, Cache, ceilings, graph_time, random_params
from scripts.lib.provenance import header

PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")
# Those of the targets first, so that --quick and an interrupted run hold them.
TARGETS = [
    (1, 8192), (1, 32768), (1, 131072), (8, 32768), (32, 32768), (32, 131072), (8, 131072),
    (1, 1024),
]  # fmt: skip
MORE = [(8, 8192), (32, 8192), (64, 8192)]
GQA8 = [(1, 131072), (8, 32768), (32, 32768)]
TRITON = [(1, 32768), (8, 32768)]
OTHER_PAGES = [(1, 32768, 1), (8, 32768, 1), (8, 32768, 64)]
LAYER = (1, 102400)
# Attention reads a codec's metadata only: one codec of each kind that is not FP16 step and lo.
OTHER_METADATA = ("compact", "position", "lloyd", "omni")
CODEC_SHAPES = [(1, 32768), (8, 32768), (32, 32768)]
STORE_CODECS = ("feedback", "aligned", "oscar")  # at every size; the others at CODEC_TOKENS
CODEC_TOKENS = (1, 64, 8192)
MODEL_LAYERS = 64  # layers whose codec matrices are rotated through: more than L2 holds


class Bench:
    def __init__(self, out: Path | None, commit: str | None) -> None:
        self.start, self.out = time.time(), out
        self.header = header(torch.cuda.get_device_name(), commit, PACKAGES)
        self.header["versions"]["cuda"] = torch.version.cuda
        self.rows: list[dict] = []
        self.ceilings = ceilings()
        self.base: dict[tuple, dict] = {}

    def add(self, op: str, us: float, needed: int = 0, **fields) -> dict:
        row = {"op": op, "us": round(us, 2), **fields}
        if needed:
            row["copy_share"] = round(needed / us / 1e3 / self.ceilings["copy_gbps"], 3)
        self.rows.append(row)
        print(f"[{time.time() - self.start:5.1f}] {json.dumps(row)}", flush=True)
        self.save()
        return row

    def save(self) -> None:
        if self.out is None:
            return
        result = {**self.header, **self.ceilings, "rows": self.rows}
        self.out.write_text(json.dumps(result, indent=1) + "\n")

    def baseline(self, batch: int, context: int, gqa: int) -> dict:
        """{"bf16": us, "fp8": us, "all": {...}} of the fastest baselines."""
        key = (batch, context, gqa)
        if key not in self.base:
            cache = baselines.Bf16Cache(batch, context, group=gqa)
            every = baselines.best(cache, "bf16")
            if key in [(b, c, 4) for b, c in TRITON]:
                try:
                    every["sglang_triton_bf16"] = round(baselines.sglang_triton(cache), 2)
                except Exception as problem:
                    print(f"  sglang_triton: {problem!r:.150}", flush=True)
            cache.to_fp8()
            low = baselines.best(cache, "fp8")
            self.base[key] = {
                "bf16": min(every.values(), default=None),
                "fp8": min(low.values(), default=None),
                "all": every | low,
            }
            del cache
            torch.cuda.empty_cache()
        return self.base[key]

    def decode(
        self, batch, context, page=16, gqa=4, form=None, triton_only=False, codec_name=None,
        bits=(2, 2), against=None,
    ) -> float:  # fmt: skip
        """``codec_name`` None: FP16 step and lo, as most codecs store them. ``against``: µs of
        another codec, in place of the baselines."""
        base = self.baseline(batch, context, gqa) if against is None else _NO_BASELINE
        name = codec_name or "feedback"
        cache = Cache(batch, context, group=gqa, page=page, codec_name=name, bits=bits)
        steps = cache.steps(form, triton_only)
        error = cache.error(steps)
        us = graph_time(cache.calls(steps))
        speedups = {
            f"speedup_{k}": round(base[k] / us, 2) for k in ("bf16", "fp8") if base[k] is not None
        }
        if against:
            speedups["against_feedback"] = round(us / against, 3)
        chosen = "triton" if triton_only else steps[0].form.kernel
        self.add(
            "decode_attention", us, cache.needed_bytes(), codec=codec_name or "any",
            context=context, batch=batch, page_size=cache.page, gqa=gqa, kernel=chosen,
            error=float(f"{error:.2e}"), baselines=base["all"], **speedups,
            **({} if bits == (2, 2) else {"bits": bits}),
        )  # fmt: skip
        del cache
        torch.cuda.empty_cache()
        return us


_NO_BASELINE = {"bf16": None, "fp8": None, "all": {}}


def codec_params(count: int, like: str = "accurate-compact") -> list:
    """``count`` layers' matrices that serve every codec, or those of ``position``."""
    return [random_params(codec.CODECS[like], 8, 128, 0.02) for _ in range(count)]


def codec_views(view, params: list) -> list:
    """``view`` with each of ``params``, of which it gets what its codec has."""
    names = view.spec.tensors(view.head_dim)
    if view.means is not None:
        params = codec_params(len(params), view.spec.name)
    own = [codec.LayerParams(**{n: getattr(p, n) for n in names}) for p in params]
    if view.means is None:
        return [view._replace(params=p) for p in own]
    means = Means.of([view.spec] * len(own), own, codec_position.TILE * len(view.means.turns))
    return [view._replace(params=p, means=means.layer(i)) for i, p in enumerate(own)]


def fresh(tokens: int, dim: int = 128, first: int = 1024):
    """q, k, v views of a fused projection, and where the tokens from position ``first`` on go."""
    position = torch.arange(first, first + tokens, device=DEV)
    row, none = torch.ones_like(position), torch.full_like(position, -1)
    where = TokenBatch(row, position, torch.full_like(position, first + tokens), position, none)
    qkv = torch.randn(tokens, 48, dim, device=DEV).bfloat16()
    return where, *qkv.split([32, 8, 8], 1)


def prefill_layer_us(tokens: int) -> float:
    """One Qwen3-8B layer's own prefill: its four projections and causal attention."""
    x = {n: torch.randn(tokens, n, device=DEV).bfloat16() for n in (4096, 12288)}
    shapes = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
    weights = [torch.randn(i, o, device=DEV).bfloat16() * 0.02 for i, o in shapes]
    q = torch.randn(1, 32, tokens, 128, device=DEV).bfloat16()
    k, v = torch.randn(2, 1, 32, tokens, 128, device=DEV).bfloat16()

    def layer():
        for (i, _), w in zip(shapes, weights, strict=True):
            x[i] @ w
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return graph_time([layer])


def check_store(cache: Cache) -> None:
    """Stop unless nearly all rows get the reference's codes (float32 ties may differ)."""
    view = cache.view
    where, q, k, v = fresh(64)
    q_rot = query_buffer(view, 64, 32)
    store(view, where, q, k, v, q_rot)
    params = view.params
    k_rot, v_rot = codec.rotate(k, params.r_k), codec.rotate(v, params.r_v)
    key = view.spec.encode_k(params, k_rot, where.positions)
    want = key, view.spec.encode_v(params, v_rot)
    for got, rows in zip(cache.seg.history.read(0, where.slots), want, strict=True):
        same = (got.packed == rows.packed).all(-1) & (got.meta == rows.meta).all(-1)
        if same.float().mean() < 0.97:
            share = float(same.float().mean())
            raise SystemExit(f"store of {view.spec.name}: only {share:.3f} of the rows agree")
    q_want = prepare_queries(view, q)[..., :128]
    off = (q_rot[..., :128] - q_want).norm() / q_want.norm()
    if not off < 1e-4:
        raise SystemExit(f"store: rotated queries are off by {float(off):.2e}")


def bench_seal(bench: Bench, params: list) -> None:
    """Store of ``omni``: a step that ends no block, one that ends one, a prompt of 64."""
    cache = Cache(1, 16384, codec_name="omni")
    where, q, k, v = fresh(2 * cache.page)
    store(cache.view, where, q, k, v, None)
    got = cache.seg.history.read(0, where.slots)[0].packed
    k_rot = codec.rotate(k, cache.view.params.r_k).bfloat16().float()
    blocks = k_rot.split(cache.page)
    want = torch.cat([codec_omni.encode_k(block).packed for block in blocks])
    if (share := float((got == want).all(-1).float().mean())) < 0.97:
        raise SystemExit(f"store of omni: only {share:.3f} of the rows agree")
    views = codec_views(cache.view, params)
    for tokens, blocks in ((1, 0), (1, 1), (64, 0), (64, 1), (8192, 64)):
        where, q, k, v = fresh(tokens, first=1152 - tokens if blocks == 1 else 1024)
        q_rot = torch.empty(tokens, 32, 128, device=DEV)
        some = views if tokens < 8192 else views[:4]
        us = graph_time([partial(store, w, where, q, k, v, q_rot) for w in some])
        bench.add(
            "store", us, codec="omni", batch=tokens, blocks=blocks, page_size=cache.page, gqa=4
        )


def bench_store(bench: Bench) -> None:
    names = [name for name, spec in codec.CODECS.items() if spec.block == 1]
    caches = {name: Cache(1, 16384, codec_name=name) for name in names}
    for cache in caches.values():
        check_store(cache)
    layer = prefill_layer_us(8192)
    bench.add("layer_prefill_bf16", layer, batch=8192)
    for tokens in (1, 8, 64, 256, 8192):
        params = codec_params(MODEL_LAYERS if tokens < 8192 else 4)
        where, q, k, v = fresh(tokens)
        for name in names if tokens in CODEC_TOKENS else STORE_CODECS:
            views = codec_views(caches[name].view, params)
            q_rot = query_buffer(views[0], tokens, 32)
            kv_only = tokens == 8192 and name in STORE_CODECS
            for suffix, target in (("", q_rot), ("_kv_only", None))[: 1 + kv_only]:
                us = graph_time([partial(store, w, where, q, k, v, target) for w in views])
                extra = {"layer_share": round(us / layer, 3)} if tokens == 8192 else {}
                bench.add(
                    "store" + suffix, us, codec=name, batch=tokens, page_size=16, gqa=4, **extra
                )
    bench_seal(bench, codec_params(MODEL_LAYERS))


def bench_materialise(bench: Bench, pages=(16, 1), codec_name: str | None = None) -> None:
    for page in pages:
        n = 32768
        cache = Cache(1, n, page=page, codec_name=codec_name or "feedback")
        out_k, out_v = torch.empty(2, n, 8, 128, device=DEV).bfloat16()
        start, indptr = (
            torch.zeros(1, dtype=torch.int64, device=DEV),
            torch.tensor([0, n], device=DEV),
        )
        end = torch.tensor([n - 256], device=DEV)
        calls = [
            partial(materialise, cache.view, cache.table, rows, start, indptr, end, n, out_k, out_v)
            for rows in cache.rows
        ]
        us = graph_time(calls)
        moved = cache.needed_bytes() + n * 8 * 128 * 4
        codec_name = codec_name or "any"
        bench.add("materialise", us, moved, codec=codec_name, context=n, batch=1, page_size=page)


def bench_rotations(bench: Bench) -> None:
    """Of an extend over a cached prefix: queries there, results back. Baseline: a BF16 product."""
    r = random_params(codec.CODECS["feedback"], 8, 128).r_k
    for tokens in (128, 8192):
        x = torch.randn(tokens, 32, 128, device=DEV).bfloat16()
        lse, out, rough = torch.randn(tokens, 32, device=DEV), torch.empty_like(x), r.bfloat16()
        grouped = x.unflatten(1, (8, 4))
        base = graph_time([partial(torch.einsum, "tkgd,kde->tkge", grouped, rough)])
        for op, call in (
            ("rotate_queries", partial(rotate_queries, x, r)),
            ("join_prefix", partial(join_prefix, x, lse, x, lse, r, out)),
        ):
            bench.add(op, graph_time([call]), batch=tokens, gqa=4, bf16_product_us=round(base, 2))


def bench_layer(bench: Bench) -> None:
    """store + attend + merge of one decode step, against SGLang's BF16 store + attention."""
    batch, context = LAYER
    base = bench.baseline(batch, context, 4)
    us, steps, cache = layer_us(batch, context)
    try:
        kv_store = baselines.kv_store(batch)
    except Exception as problem:
        print(f"  kv_store: {problem!r:.150}", flush=True)
        kv_store = 0.0
    speedup = {"speedup_bf16": round((base["bf16"] + kv_store) / us, 2)} if base["bf16"] else {}
    bench.add(
        "decode_layer", us, codec="feedback", context=context, batch=batch, page_size=16, gqa=4,
        bf16_store_us=round(kv_store, 2), baselines=base["all"], **speedup,
    )  # fmt: skip
    plan = graph_time([
        lambda: steps[0].plan(cache.rows[0], cache.lens, cache.seg.windows.recent_start)
    ] * 8)  # fmt: skip
    bench.add("plan", plan, batch=batch)


def layer_us(batch: int, context: int, codec_name: str = "feedback"):
    """µs of store + attend + merge of one decode step; the steps and cache that it ran on."""
    cache = Cache(batch, context, codec_name=codec_name)
    views = codec_views(cache.view, codec_params(cache.copies))
    steps = cache.steps()
    cache.error(steps)
    last = torch.full((batch,), context - 1, dtype=torch.int64, device=DEV)
    none = torch.full_like(last, -1)
    where = [
        TokenBatch(row, last, last + 1, cache.table[row, last].long(), none) for row in cache.rows
    ]
    _, q, k, v = fresh(batch)

    def layer(i):
        steps[i].layer(views[i], where[i], q, k, v, cache.table, cache.out[i], scale=128**-0.5)

    return graph_time([lambda i=i: layer(i) for i in range(cache.copies)]), steps, cache


def compare(bench: Bench, name: str) -> None:
    """Codec ``name`` beside ``feedback``: attention, decode layers, store and materialise."""
    for batch, context in (*CODEC_SHAPES, (1, 8192), (1, 131072)):
        plain = bench.decode(batch, context, codec_name="feedback", against=0)
        bench.decode(batch, context, codec_name=name, against=plain)
    for batch, context in (LAYER, (8, 32768), (32, 32768)):
        plain = 0.0
        for codec_name in ("feedback", name):
            us, *_ = layer_us(batch, context, codec_name)
            ratio = {"against_feedback": round(us / plain, 3)} if plain else {}
            shape = dict(context=context, batch=batch, page_size=16, gqa=4)
            bench.add("decode_layer", us, codec=codec_name, **shape, **ratio)
            plain = plain or us
            torch.cuda.empty_cache()
    caches = {n: Cache(1, 16384, codec_name=n) for n in ("feedback", name)}
    for cache in caches.values():
        check_store(cache)
    for tokens in (1, 8, 64, 8192):
        plain, params = 0.0, codec_params(MODEL_LAYERS if tokens < 8192 else 4)
        where, q, k, v = fresh(tokens)
        for codec_name, cache in caches.items():
            views = codec_views(cache.view, params)
            q_rot = query_buffer(views[0], tokens, 32)
            us = graph_time([partial(store, w, where, q, k, v, q_rot) for w in views])
            ratio = {"against_feedback": round(us / plain, 3)} if plain else {}
            bench.add("store", us, codec=codec_name, batch=tokens, page_size=16, gqa=4, **ratio)
            plain = plain or us
    del caches
    torch.cuda.empty_cache()
    for codec_name in ("feedback", name):
        bench_materialise(bench, (16,), codec_name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="the shapes of the targets only")
    parser.add_argument("--compare", metavar="CODEC", help="time this codec beside feedback only")
    parser.add_argument("--commit", help="of the code, where git does not know it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py needs a CUDA GPU")
    torch.manual_seed(0)
    bench = Bench(args.out, args.commit)
    print(bench.ceilings)
    if args.compare:
        return compare(bench, args.compare)
    for batch, context in TARGETS:
        bench.decode(batch, context)
    bench_layer(bench)
    bench_store(bench)
    bench_materialise(bench)
    bench_rotations(bench)
    if args.quick:
        return
    for batch, context in MORE:
        bench.decode(batch, context)
    for name in OTHER_METADATA:
        for batch, context in CODEC_SHAPES:
            bench.decode(batch, context, codec_name=name)
    for batch, context in GQA8:
        bench.decode(batch, context, gqa=8)
    for batch, context, page in OTHER_PAGES:
        bench.decode(batch, context, page=page)
    for batch, context in TRITON:
        bench.decode(batch, context, triton_only=True)


if __name__ == "__main__":
    main()
