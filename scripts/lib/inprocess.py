"""One process, no scheduler: SGLang's ModelRunner on the int2 pool, fed hand-made batches.

With ``artifact=None`` it runs on SGLang's own cache instead, for comparison.

Gives tests what HTTP hides: full logits, chosen slots and request rows, forced tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from oscar_sglang.calibration.sglang_runner import bare_runner, resolved_arguments
from oscar_sglang.launch_server import enter_cpu_mode, has_gpu
from oscar_sglang.pool.hybrid import attention_pool

if not has_gpu():
    enter_cpu_mode()  # before anything imports transformers or sglang


@dataclass
class Request:
    """A request row of the runner: its tokens so far and where they live."""

    row: int
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class Runner:
    """``Runner(model_dir, codec=..., **flags)``; flags are SGLang's, in Python spelling."""

    def __init__(self, model_dir, artifact, *, max_total_tokens=8192, rows=9, **flags):
        torch.set_num_threads(1)
        from sglang.srt.arg_groups.overrides import resolving_view

        self.device = torch.device("cuda" if has_gpu() else "cpu")
        cache = dict(kv_cache_dtype="int2", oscar_artifact=str(artifact))
        if artifact is None:
            cache = {} if has_gpu() else dict(attention_backend="torch_native")
        args = resolved_arguments(
            model_path=str(model_dir),
            device=self.device.type,
            dtype="bfloat16" if has_gpu() else "float32",
            disable_cuda_graph=True,
            max_total_tokens=max_total_tokens,
            max_running_requests=rows - 1,
            **(cache | flags),
        )
        self.runner = bare_runner(args)
        self.pool = attention_pool(self.runner.token_to_kv_pool)
        self.segments = getattr(self.pool, "segments", None)
        self.req_pool = self.runner.req_to_token_pool
        self.page = resolving_view(args).page_size
        self.next_slot = self.page
        # Row -> slot of the recurrent state that a hybrid model keeps for it.
        self.state_slots = getattr(self.req_pool, "req_index_to_mamba_index_mapping", None)
        self.is_hybrid = self.state_slots is not None

    def request(self, row: int, prefix: Request | None = None, cached: int = 0) -> Request:
        """Take a request row, sharing the first ``cached`` slots of ``prefix`` (a radix hit)."""
        self.req_pool.req_generation[row] += 1
        request = Request(row)
        if self.is_hybrid:
            self._take_state(row, prefix, cached)
        if prefix is not None:
            request.tokens = prefix.tokens[:cached]
            request.slots = prefix.slots[:cached]
            self._write_slots(request, 0)
        return request

    def _take_state(self, row: int, prefix: Request | None, cached: int) -> None:
        """As SGLang's scheduler does: states of the linear layers begin at zero, or as a copy."""
        self.state_slots[row] = row
        self.req_pool.mamba_pool.clear_slots(self.state_slots[row : row + 1])
        if prefix is not None:
            assert cached == len(prefix.tokens), "states are kept of a whole request only"
            old = self.state_slots[prefix.row : prefix.row + 1]
            self.req_pool.mamba_pool.copy_from(old, self.state_slots[row : row + 1])

    def slots(self, n: int, held: list[int] = ()) -> list[int]:
        """n new slots of a request that holds ``held``: the rest of its last page, new pages."""
        first = held[-1] + 1 if len(held) % self.page else self.next_slot
        rest = min(n, -len(held) % self.page)
        after = self.next_slot
        self.next_slot += -(-(n - rest) // self.page) * self.page
        assert self.next_slot <= self.pool.size + self.page, "the test needs a larger pool"
        return [*range(first, first + rest), *range(after, after + n - rest)]

    def extend(self, *work: tuple[Request, list[int]], slots: list[list[int]] | None = None):
        """One extend batch: new tokens per request -> logits of each last token [B, vocab]."""
        return self._run(work, slots, decode=False)

    def decode(self, *work: tuple[Request, int]):
        """One decode batch: one forced token per request -> logits [B, vocab]."""
        return self._run([(r, [t]) for r, t in work], None, decode=True)

    def _write_slots(self, request: Request, start: int) -> None:
        new = torch.tensor(request.slots[start:], dtype=torch.int32, device=self.device)
        self.req_pool.req_to_token[request.row, start : len(request.slots)] = new

    @torch.no_grad()
    def _run(self, work, slots, decode: bool):
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        prefix, fresh, new_slots, ids, positions = [], [], [], [], []
        for i, (request, tokens) in enumerate(work):
            start = len(request.tokens)
            mine = slots[i] if slots else self.slots(len(tokens), request.slots)
            request.tokens += tokens
            request.slots += mine
            self._write_slots(request, start)
            prefix.append(start)
            fresh.append(len(tokens))
            new_slots += mine
            ids += tokens
            positions += range(start, start + len(tokens))
        tensor = partial(torch.tensor, device=self.device)
        seq = tensor(prefix) + tensor(fresh)
        extend = {}
        if not decode:
            fresh_t = tensor(fresh)
            extend = dict(
                extend_num_tokens=sum(fresh),
                extend_seq_lens=fresh_t,
                extend_seq_lens_cpu=fresh,
                extend_prefix_lens=tensor(prefix),
                extend_prefix_lens_cpu=prefix,
                extend_start_loc=fresh_t.cumsum(0) - fresh_t,
                extend_logprob_start_lens_cpu=fresh,
            )
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(work),
            input_ids=tensor(ids),
            req_pool_indices=tensor([r.row for r, _ in work]),
            seq_lens=seq,
            seq_lens_cpu=seq.cpu(),
            seq_lens_sum=int(seq.sum()),
            out_cache_loc=tensor(new_slots),
            positions=tensor(positions),
            mrope_positions=tensor(positions).expand(3, -1).contiguous(),  # of text
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            **extend,
        )
        return self.runner.forward(batch).logits_output.next_token_logits.float().cpu()

    def history_rows(self, request: Request, layer: int, n: int | None = None):
        """Encoded K and V rows (packed codes, metadata) of the request's first n tokens."""
        return self.segments.history.read(
            layer, torch.tensor(request.slots[:n], device=self.device)
        )
