"""SGLang's attention backend over the three-segment pool (PyTorch reference path)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from ..config import OscarError
from ..kernels import reference
from ..kernels.padding import padded
from .memory_pool import served_pool
from .parking import park

if TYPE_CHECKING:
    from .sglang_types import ForwardBatch, ModelRunner


def _unsupported(layer: RadixAttention) -> str | None:
    """What int2 cannot do for a layer of the model that has been built."""
    window = layer.sliding_window_size
    if window is not None and window > 0:
        return "a sliding window"
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type != AttentionType.DECODER:
        return f"{layer.attn_type.value} attention"
    if layer.v_head_dim != layer.qk_head_dim:
        return f"K heads of {layer.qk_head_dim} and V heads of {layer.v_head_dim} channels"
    return None


def _attention(model: torch.nn.Module) -> list[RadixAttention]:
    layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
    # SGLang's class for models of transformers keeps them beside the modules.
    return [*layers, *getattr(model, "attention_instances", {}).values()]


def refuse_kinds(model: torch.nn.Module) -> None:
    """As soon as the model is built: the kinds of its attention layers are what SGLang will run,
    whatever the configuration was taken to say."""
    for layer in _attention(model):
        _raise(layer, _unsupported(layer))


def refuse_layers(
    model: torch.nn.Module, layer_ids: Iterable[int], kv_heads: int, head_dim: int
) -> None:
    """Check the model's attention layers against the pool: the layers that it has parameters for,
    and the shape of a token's K and V in it (the heads of this rank)."""
    refuse_kinds(model)
    layers = _attention(model)
    found, expected = sorted({layer.layer_id for layer in layers}), sorted(layer_ids)
    if found != expected:
        raise OscarError(
            f"{type(model).__name__} has attention in layers {found}, but there are int2 "
            f"parameters for layers {expected}; drop --kv-cache-dtype int2 (and please report it)"
        )
    for layer in layers:
        shape = layer.tp_k_head_num, layer.qk_head_dim
        if shape != (kv_heads, head_dim):
            raise OscarError(
                f"layer {layer.layer_id} has {shape[0]} KV heads of {shape[1]} channels, but the "
                f"pool is built for {kv_heads} of {head_dim}: int2 needs the same in every layer; "
                "drop --kv-cache-dtype int2"
            )


def refuse_layer(layer: RadixAttention, k, save_kv_cache: bool, kwargs: dict) -> None:
    """What only a call shows; nothing is approximated silently."""
    what = _unsupported(layer)
    if kwargs.get("sinks") is not None:
        what = "learned attention sinks"
    if k is None or not save_kv_cache:
        what = "a KV cache shared between layers"
    _raise(layer, what)


def _raise(layer: RadixAttention, what: str | None) -> None:
    if what:
        raise OscarError(
            f"layer {layer.layer_id} uses {what}, which int2 does not support; "
            "drop --kv-cache-dtype int2"
        )


class OscarAttnBackend(AttentionBackend):
    """Decode and extend are one path: a decode step is a chunk of one token.

    The only state kept here is which generation of a request row was seen last: SGLang bumps
    ``ReqToTokenPool.req_generation`` whenever a row is handed out, so a difference means that
    the row's windows belong to somebody who is gone. It is read in batch order, on the thread
    that launches forwards, like everything else in the pool.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.pool = pool = served_pool(runner.token_to_kv_pool)
        refuse_layers(runner.model, pool.index, pool.head_num, pool.head_dim)
        self.token_to_kv_pool = runner.token_to_kv_pool  # where SGLang's models look for it
        self.req_to_token_pool = runner.req_to_token_pool
        park(self.req_to_token_pool, self.pool.parking)
        self.seen_generation = torch.zeros_like(self.req_to_token_pool.req_generation)
        self.batch: reference.Batch | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        fb, seg = forward_batch, self.pool.segments
        if fb.forward_mode.is_idle():
            self.batch = None
            return
        self.pool.watch.before()
        started = None
        if fb.forward_mode.is_decode():
            prefix_lens = fb.seq_lens - 1
        else:
            prefix_lens = fb.extend_prefix_lens
            started = self._start_requests(fb.req_pool_indices, prefix_lens)
        self.batch = reference.plan_batch(
            seg, fb.req_pool_indices, prefix_lens, fb.seq_lens, fb.out_cache_loc
        )
        self.pool.watch.begins(fb, started)
        self._count(self.batch)

    def _start_requests(self, rows: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
        """Take over request rows that were handed out since they were last seen here: which [B]."""
        started = torch.zeros(len(rows), dtype=torch.bool)
        generation = self.req_to_token_pool.req_generation
        n_sink = self.pool.setup.plan.windows.n_sink
        for i, (row, prefix) in enumerate(zip(rows.tolist(), prefix_lens.tolist(), strict=True)):
            if row == 0 or generation[row] == self.seen_generation[row]:
                continue
            started[i] = True
            if prefix % self.pool.segments.spec.block:
                raise RuntimeError(f"a cached prefix of {prefix} tokens ends inside a sealed block")
            self.seen_generation[row] = generation[row]
            parking, source, low = self.pool.parking, 0, 0
            if parking:
                source, low = int(parking.source[row]), int(parking.low[row])
            self.pool.segments.windows.begin(row, prefix, source, low)
            if prefix:
                cached = min(prefix, n_sink)
                slots = self.req_to_token_pool.req_to_token[row, :cached].long()
                hits = reference.restore_sinks(self.pool.segments, row, slots)
                self.pool.device_counters += torch.tensor([hits, cached - hits, 1])
        return started

    def _count(self, batch: reference.Batch) -> None:
        prefix, scratch = batch.prefix_lens, self.pool.scratch.shape[1]
        longest = min(int(prefix.max()), scratch)
        self.pool.counters.extend(len(batch.slots), int(prefix.sum()), longest)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs,
    ) -> torch.Tensor:
        """q [T, H*D], k and v [T, Hk*D], post-RoPE -> [T, H*D] in q's dtype."""
        refuse_layer(layer, k, save_kv_cache, kwargs)
        index = self.pool.index[layer.layer_id]
        d = layer.qk_head_dim
        q = padded(q.view(-1, layer.tp_q_head_num, d))
        k = padded(k.view(-1, layer.tp_k_head_num, d))
        v = padded(v.view(-1, layer.tp_v_head_num, d))
        if (batch := self.batch) is None:
            raise RuntimeError("attention without its metadata")
        out = reference.attention(
            self.pool.segments,
            index,
            batch,
            q,
            k,
            v,
            self.req_to_token_pool.req_to_token,
            self.pool.scratch,
            layer.scaling,
            layer.logit_cap or 0.0,
        )
        if self.pool.observer:
            self.pool.observer(index, q, k, v, out)
        self.pool.watch.attended(index)
        reference.store(self.pool.segments, index, batch, k, v)
        return out[..., :d].to(q.dtype).flatten(1)

    forward_decode = forward_extend
