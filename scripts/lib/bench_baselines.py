"""BF16 and FP8 decode attention of FA3, FlashInfer and SGLang's Triton backend, for bench_kernels.

Each function returns microseconds of one call over caches larger than L2, or raises where the
library is missing. Pages lie scattered; the fastest page size is picked by the caller.
"""

from __future__ import annotations

import math

import torch

from scripts.lib.bench_common import COLD_BYTES, DEV, graph_time


class Bf16Cache:
    """K and V of ``copies`` batches in BF16 (and FP8 on demand), paged at will."""

    def __init__(self, batch: int, context: int, kv_heads: int = 8, group: int = 4, dim: int = 128):
        self.batch, self.context, self.kv_heads, self.group, self.dim = (
            batch, context, kv_heads, group, dim,
        )  # fmt: skip
        moved = batch * context * kv_heads * dim * 4
        self.copies = max(1, min(12, math.ceil(COLD_BYTES / moved)))
        n = self.copies * batch * context
        self.kv = torch.empty(2, n, kv_heads, dim, dtype=torch.bfloat16, device=DEV)
        for part in self.kv.view(2, -1):
            for piece in part.split(1 << 28):
                piece.normal_()
        self.q = torch.randn(self.copies, batch, kv_heads * group, dim, device=DEV).bfloat16()
        self.lens = torch.full((batch,), context, dtype=torch.int32, device=DEV)
        self.scale = dim**-0.5

    def to_fp8(self) -> None:
        low = torch.empty(self.kv.shape, dtype=torch.float8_e4m3fn, device=DEV)
        for src, dst in zip(self.kv.view(2, -1), low.view(2, -1), strict=True):
            for a, b in zip(src.split(1 << 28), dst.split(1 << 28), strict=True):
                b.copy_(a)
        self.kv = low

    def paged(self, page: int):
        """k, v [pages, page, Hk, D] and a table [copies, batch, context / page]."""
        k, v = (x.view(-1, page, self.kv_heads, self.dim) for x in self.kv)
        table = torch.randperm(len(k), device=DEV).int()
        return k, v, table.view(self.copies, self.batch, -1)


def fa3(cache: Bf16Cache, page: int) -> float:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    k, v, table = cache.paged(page)
    fp8 = k.dtype != torch.bfloat16
    q = cache.q.to(k.dtype).unsqueeze(2)
    ones = torch.ones(cache.batch, cache.kv_heads, device=DEV)
    extra = {"q_descale": ones, "k_descale": ones, "v_descale": ones} if fp8 else {}

    def call(i):
        flash_attn_with_kvcache(
            q[i], k, v, page_table=table[i], cache_seqlens=cache.lens, causal=True,
            softmax_scale=cache.scale, num_splits=0, **extra,
        )  # fmt: skip

    return graph_time([lambda i=i: call(i) for i in range(cache.copies)])


def flashinfer_bf16(cache: Bf16Cache, page: int) -> float:
    import flashinfer

    k, v, table = cache.paged(page)
    heads = cache.kv_heads * cache.group
    calls = []
    for i in range(cache.copies):
        indptr = torch.arange(cache.batch + 1, dtype=torch.int32, device=DEV) * table.shape[-1]
        last = torch.full((cache.batch,), page, dtype=torch.int32, device=DEV)
        pages = table[i].flatten()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=DEV), "NHD", use_cuda_graph=True,
            use_tensor_cores=True, paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=pages.clone(), paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(
            indptr, pages, last, heads, cache.kv_heads, cache.dim, page,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        calls.append(lambda w=wrapper, i=i: w.run(cache.q[i], (k, v)))
    return graph_time(calls)


def sglang_triton(cache: Bf16Cache, splits: int = 8) -> float:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    k, v, table = cache.paged(1)
    heads, b = cache.kv_heads * cache.group, cache.batch
    indptr = torch.arange(b + 1, dtype=torch.int32, device=DEV) * cache.context
    logits = torch.empty(b, heads, splits, cache.dim, device=DEV)
    lse = torch.empty(b, heads, splits, device=DEV)
    counts = torch.full((b,), splits, dtype=torch.int32, device=DEV)
    out = torch.empty_like(cache.q)

    def call(i):
        decode_attention_fwd(
            cache.q[i], k[:, 0], v[:, 0], out[i], indptr, table[i].flatten(), logits, lse,
            counts, splits, cache.scale, 1.0, 1.0,
        )  # fmt: skip

    return graph_time([lambda i=i: call(i) for i in range(cache.copies)])


def kv_store(tokens: int, kv_heads: int = 8, dim: int = 128) -> float:
    """SGLang's own BF16 KV store of one layer."""
    from sglang.kernels.ops.kvcache.kvcache import store_cache

    k, v = torch.randn(2, tokens, kv_heads * dim, device=DEV).bfloat16()
    k_cache, v_cache = torch.zeros(2, 8192, kv_heads * dim, device=DEV).bfloat16()
    slots = torch.randperm(8191, device=DEV)[:tokens] + 1
    return graph_time([lambda: store_cache(k, v, k_cache, v_cache, slots)] * 8)


def best(cache: Bf16Cache, kind: str) -> dict[str, float]:
    """name -> us of every baseline that runs; ``kind`` is bf16 or fp8."""
    found = {}
    runs = [(f"fa3_{kind}_p{p}", lambda p=p: fa3(cache, p)) for p in (1, 64)]
    if kind == "bf16":
        runs += [(f"flashinfer_bf16_p{p}", lambda p=p: flashinfer_bf16(cache, p)) for p in (1, 16)]
    for name, run in runs:
        try:
            found[name] = round(run(), 2)
        except Exception as problem:  # a baseline that is missing is reported, not hidden
            print(f"  {name}: {problem!r:.150}", flush=True)
    return found
