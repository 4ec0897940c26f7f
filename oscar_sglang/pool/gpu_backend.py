"""SGLang's attention backend on a GPU: our kernels for decode, FlashAttention-3 for fresh tokens.

Decode, per layer: store, attend, merge (three launches), all metadata computed on the device inside
the captured graph. Extend, per layer: fresh tokens attend causally in the model's basis; the cached
prefix is materialised tile by tile into a scratch that was reserved at start-up, attended in the
rotated basis and merged by LSE; then the chunk is stored.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ..kernels import cuda_store
from ..kernels.accumulate import accumulate
from ..kernels.begin import begin_rows
from ..kernels.decode import DecodeAttention, DecodeStep
from ..kernels.materialise import materialise
from ..kernels.padding import padded
from ..kernels.plan import claim_sinks
from ..kernels.reference import history_end
from ..kernels.restore import restore_sinks
from ..kernels.rotate import join_prefix, rotate_queries
from ..kernels.store import store
from ..kernels.views import TokenBatch, layer_view
from .cpu_backend import refuse_layer, refuse_layers
from .memory_pool import served_pool
from .parking import park
from .prefix_tiles import ExtendPlan, Tile, plan_tiles, to_device
from .watching import Watch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

    from .sglang_types import ForwardBatch, ModelRunner


logger = logging.getLogger(__name__)

_CAPTURED = Watch()  # a captured step is no request's


class Decode(NamedTuple):
    """What all layers of a decode share; made inside the graph."""

    tokens: TokenBatch
    step: DecodeStep


class Extend(NamedTuple):
    """What all layers of an extend share; ``tokens`` are made inside the graph, if there is one."""

    plan: ExtendPlan
    tokens: TokenBatch | None = None


_Forward = TypeVar("_Forward", Decode, Extend)


class OscarGpuBackend(AttentionBackend):
    """See the module docstring. All state it touches is read and written on the forward stream."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        from .varlen import varlen_attention

        self.pool = pool = served_pool(runner.token_to_kv_pool)
        refuse_layers(runner.model, pool.index, pool.head_num, pool.head_dim)
        self.token_to_kv_pool = runner.token_to_kv_pool  # where SGLang's models look for it
        self.device = torch.device(runner.device)
        self.req_to_token_pool = runner.req_to_token_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        park(self.req_to_token_pool, self.pool.parking)
        library = self.pool.setup.prefill_attention
        self.varlen = varlen_attention(library, self.device)
        seg = self.pool.segments
        self.views = [layer_view(seg, i) for i in range(self.pool.layer_num)]
        self.windows, self.block = self.pool.setup.plan.windows, seg.spec.block
        self.decode_attention: DecodeAttention = self.pool.decode_attention
        self._log_kernels(library or "the reference")
        generation = runner.req_to_token_pool.req_generation
        self.seen_generation = torch.zeros_like(generation, device=self.device)
        self.claim = torch.full((len(seg.sinks.tag),), -1, dtype=torch.int32, device=self.device)
        self.now: Decode | Extend | None = None

    def _log_kernels(self, prefill: str) -> None:
        logger.info("oscar: prefill attention by %s", prefill)
        if self.decode_attention.cuda:
            logger.info("oscar: decode attention in CUDA, compiled at run time")
        else:
            logger.warning(
                "oscar: decode attention in portable Triton, which is slower: the CUDA kernels "
                "need head_dim 64 or 128, a BF16 or FP16 model, sm_80 or newer and an NVRTC "
                "library, and $OSCAR_SGLANG_KERNELS unset"
            )
        if not cuda_store.has_codec(self.pool.segments.spec):
            logger.warning(
                "oscar: codec %s has no CUDA store; it is written by portable Triton kernels",
                self.pool.segments.spec.name,
            )

    # -- metadata ------------------------------------------------------------------------------

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture=False):
        fb = forward_batch
        if fb.forward_mode.is_idle():
            return
        watch = _CAPTURED if in_capture else self.pool.watch
        watch.before()
        if fb.forward_mode.is_decode():
            if not in_capture:
                padding = getattr(fb, "num_padding", 0)  # only a graph replay's view has it
                self.pool.counters.demoted_tokens += fb.batch_size - padding
            watch.begins(fb, None)
            return
        started = self._start_requests(fb)
        plan = self._plan_extend(fb)
        self.now = Extend(plan)
        watch.begins(fb, started, plan)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        fb = forward_batch
        if fb.forward_mode.is_idle():
            return
        if fb.forward_mode.is_decode():
            ends = fb.seq_lens.to(torch.int64)
            tokens = self._token_batch(fb, fb.req_pool_indices, ends - 1, ends)
            step = self.decode_attention.step(len(fb.req_pool_indices))
            recent_start = self.pool.segments.windows.recent_start
            step.plan(fb.req_pool_indices, ends, recent_start)
            self.now = Decode(tokens, step)
            self.pool.segments.windows.written[fb.req_pool_indices] = ends
        else:
            lens = fb.extend_seq_lens.to(torch.int64)
            total = fb.extend_num_tokens

            def per_token(x):
                return torch.repeat_interleave(x, lens, output_size=total)

            seq_lens = fb.seq_lens.to(torch.int64)
            rows, ends = per_token(fb.req_pool_indices), per_token(seq_lens)
            self.pool.segments.windows.written[fb.req_pool_indices] = seq_lens
            tokens = self._token_batch(fb, rows, fb.positions, ends)
            self.now = Extend(self._of(Extend).plan, tokens)

    def _of(self, kind: type[_Forward]) -> _Forward:
        """The forward under way, which SGLang has announced to be of this ``kind``."""
        if not isinstance(self.now, kind):
            raise RuntimeError(f"{kind.__name__} without its metadata: {self.now}")
        return self.now

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to reserve: decode metadata is computed inside the graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _token_batch(self, fb: ForwardBatch, rows, positions, ends) -> TokenBatch:
        slots = fb.out_cache_loc.to(torch.int64)
        positions = positions.to(torch.int64)
        index = torch.empty_like(slots)
        n_sink, tag = self.windows.n_sink, self.pool.segments.sinks.tag
        claim_sinks(tag, self.claim, positions, slots, n_sink, index)
        return TokenBatch(rows.to(torch.int64), positions, ends, slots, index)

    def _start_requests(self, fb: ForwardBatch) -> torch.Tensor:
        """Take over request rows handed out since they were last seen, without synchronising:
        which [B]."""
        rows, prefix_lens = fb.req_pool_indices, fb.extend_prefix_lens.to(torch.int64)
        generation = to_device(self.req_to_token_pool.req_generation, self.device)[rows]
        started = (generation != self.seen_generation[rows]) & (rows > 0)
        self.seen_generation[rows] = generation
        windows, parking = self.pool.segments.windows, self.pool.parking
        taken = None
        if parking:
            taken = to_device(parking.source, self.device), to_device(parking.low, self.device)
        begin_rows(windows, rows, prefix_lens, started, taken)
        windows.go_on(rows, prefix_lens)
        if any(fb.extend_prefix_lens_cpu):
            restore_sinks(
                self.pool.segments,
                self.req_to_token,
                rows,
                prefix_lens,
                started,
                self.pool.device_counters,
            )
        return started

    def _plan_extend(self, fb: ForwardBatch) -> ExtendPlan:
        prefix, fresh = list(fb.extend_prefix_lens_cpu), list(fb.extend_seq_lens_cpu)
        cached, scratch = sum(prefix), self.pool.scratch.shape[1]
        self.pool.counters.extend(sum(fresh), cached, min(cached, scratch))
        lens = fb.extend_seq_lens.to(torch.int32)
        cu_fresh = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        recent_start = self.pool.segments.windows.recent_start[fb.req_pool_indices]
        prefix_lens = fb.extend_prefix_lens.to(torch.int64)
        return ExtendPlan(
            cu_fresh=cu_fresh,
            longest=max(fresh),
            hist_end=history_end(prefix_lens, recent_start, self.windows, self.block),
            tiles=plan_tiles(
                prefix,
                fresh,
                self.pool.scratch.shape[1],
                fb.req_pool_indices,
                self.device,
            ),
        )

    # -- attention -----------------------------------------------------------------------------

    def forward_decode(
        self, q, k, v, layer: RadixAttention, forward_batch, save_kv_cache=True, **kwargs
    ):
        """q [B, H*D], k and v [B, Hk*D], post-RoPE -> [B, H*D]."""
        q, k, v, view = self._rows(q, k, v, layer, save_kv_cache, kwargs)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        now = self._of(Decode)
        now.step.layer(
            view,
            now.tokens,
            q,
            k,
            v,
            self.req_to_token,
            out,
            scale=layer.scaling,
            logit_cap=layer.logit_cap or 0.0,
        )
        return out[..., : layer.v_head_dim].flatten(1)

    def forward_extend(
        self, q, k, v, layer: RadixAttention, forward_batch, save_kv_cache=True, **kwargs
    ):
        """q [T, H*D], k and v [T, Hk*D], post-RoPE -> [T, H*D]."""
        q, k, v, view = self._rows(q, k, v, layer, save_kv_cache, kwargs)
        now = self._of(Extend)
        assert now.tokens is not None
        plan, out = now.plan, self._output(q, layer, forward_batch)
        fresh = dict(cu_q=plan.cu_fresh, cu_k=plan.cu_fresh, max_q=plan.longest, max_k=plan.longest)
        shape = dict(scale=layer.scaling, logit_cap=layer.logit_cap)
        to = torch.empty_like(out) if plan.tiles else out
        lse = self.varlen(q, k, v, to, causal=True, **fresh, **shape)
        if plan.tiles:
            self._add_prefix(view, plan, q, to, lse, out, shape)
        if self.pool.observer:
            self.pool.observer(self.pool.index[layer.layer_id], q, k, v, out)
        store(view, now.tokens, q, k, v, None, triton_only=not self.decode_attention.cuda)
        given = getattr(forward_batch, "_attn_output", None)
        if given is None or out.shape[-1] == layer.v_head_dim:
            return out[..., : layer.v_head_dim].flatten(1)
        return given.view(len(q), -1).copy_(out[..., : layer.v_head_dim].flatten(1))

    def _output(self, q: torch.Tensor, layer: RadixAttention, forward_batch) -> torch.Tensor:
        """Where SGLang's prefill graph wants the result, or a new tensor like q [T, H, D]: also if
        heads are padded, which the graph's tensor has no room for."""
        given = getattr(forward_batch, "_attn_output", None)
        if given is None or q.shape[-1] != layer.v_head_dim:
            return torch.empty_like(q, memory_format=torch.contiguous_format)
        return given.view(q.shape)

    def _add_prefix(self, view, plan: ExtendPlan, q, fresh, fresh_lse, out, shape) -> None:
        """Merge attention over the cached prefix and that over the fresh tokens into ``out``."""
        tiles, q_rot = plan.tiles, rotate_queries(q, view.q_matrix)
        if len(tiles) == 1:  # it covers every query
            part, lse = self._attend_tile(view, plan, tiles[0], q_rot, shape)
        else:
            part = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
            for tile in tiles:
                mine = part[tile.queries], lse[tile.queries]
                accumulate(*mine, *self._attend_tile(view, plan, tile, q_rot[tile.queries], shape))
        join_prefix(part, lse, fresh, fresh_lse, view.params.r_v, out)

    def _attend_tile(self, view, plan: ExtendPlan, tile: Tile, q_rot: torch.Tensor, shape):
        """Attention of the tile's queries over its prefixes, both rotated -> out, lse."""
        keys, values = self.pool.scratch[:, : tile.tokens]
        materialise(
            view,
            self.req_to_token,
            tile.rows,
            tile.starts,
            tile.cu_k,
            plan.hist_end[tile.requests],
            tile.max_k,
            keys,
            values,
        )
        part = torch.empty_like(q_rot)
        lse = self.varlen(
            q_rot,
            keys,
            values,
            part,
            cu_q=tile.cu_q,
            cu_k=tile.cu_k,
            max_q=tile.max_q,
            max_k=tile.max_k,
            causal=False,
            **shape,
        )
        return part, lse

    def _rows(self, q, k, v, layer: RadixAttention, save_kv_cache, kwargs):
        refuse_layer(layer, k, save_kv_cache, kwargs)
        d = layer.qk_head_dim
        q = padded(q.view(-1, layer.tp_q_head_num, d))
        k = padded(k.view(-1, layer.tp_k_head_num, d))
        v = padded(v.view(-1, layer.tp_v_head_num, d))
        return q, k, v, self.views[self.pool.index[layer.layer_id]]
