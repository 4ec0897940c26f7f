"""Decode attention over the three segments: picks the CUDA or the Triton kernels, owns buffers.

attention = DecodeAttention(...)              once per server; buffers come with the first step
step = attention.step(batch)                  once per batch size (CUDA graph)
step.plan(rows, seq_lens, recent_start)       once per forward, all layers share it
step.layer(view, tokens, q, k, v, ...)        once per layer: store, attend, merge
step(view, q_rot, req_to_token, out)          attend and merge alone, after ``store.store``
"""

from __future__ import annotations

import torch

from . import attend as portable
from . import cuda_attend, cuda_store
from .cuda_args import Fresh
from .merge import merge as portable_merge
from .plan import plan_attend
from .store import store
from .views import LayerView, TokenBatch, query_buffer

# Tokens up to which codes are written beside merge: latency counts there. With more, store fills
# the device by itself and merge needs all of it (measured on an H200: 8 gain 6%, 32 lose 2%).
_ENCODE_IN_MERGE = 16


class DecodeAttention:
    """Shapes and static buffers of one rank.

    heads, kv_heads  of this rank                  dtype      model dtype (of windows and output)
    max_batch        requests of a step            page_size  of SGLang's allocator
    max_q            query tokens of a request     triton_only  do not use the CUDA kernels
    block            ``CodecSpec.block``
    """

    def __init__(
        self, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, windows,
        page_size: int, max_batch: int, device, max_q: int = 1, triton_only: bool = False,
        block: int = 1,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.windows, self.page_size, self.device = windows, page_size, torch.device(device)
        self.block = block
        self.cuda = not triton_only and cuda_attend.supported(self.device, head_dim, dtype)
        self._steps: dict[tuple[int, int], DecodeStep] = {}
        sizes = (self.choose(batch, max_q) for batch in range(1, max_batch + 1))
        self._numel = max(portable.Partials.numel(*shape) for _, shape in sizes)
        self._pool: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, which ``allocate`` makes."""
        return self._numel * 4

    def allocate(self) -> None:
        self._pool = torch.empty(self._numel, dtype=torch.float32, device=self.device)

    def choose(self, batch: int, max_q: int):
        """The CUDA kernel's form (None: the Triton kernels) and the shape of its ``Partials``."""
        columns = max_q * (self.heads // self.kv_heads)
        if self.cuda:
            form = cuda_attend.choose_form(
                batch, self.kv_heads, columns, self.page_size, self.device
            )
            splits = form.splits
        else:
            form = None
            sms = (
                torch.cuda.get_device_properties(self.device).multi_processor_count
                if self.device.type == "cuda"
                else 1
            )
            splits = portable.choose_splits(self.kv_heads, columns, sms)
        return form, (batch, splits, self.kv_heads, columns, self.head_dim)

    def step(self, batch: int, max_q: int = 1) -> DecodeStep:
        """The kernels and buffers for ``batch`` requests of up to ``max_q`` query tokens."""
        key = (batch, max_q)
        if key not in self._steps:
            form, shape = self.choose(batch, max_q)
            if self._pool is None:
                self.allocate()
            if portable.Partials.numel(*shape) > self._numel:
                raise ValueError(f"{batch} requests x {max_q} queries exceed the reserved buffers")
            part = portable.Partials(*shape, self.device, self._pool)
            self._steps[key] = DecodeStep(self, form, part, max_q)
        return self._steps[key]


class DecodeStep:
    """One batch size; every argument is a device tensor and nothing synchronises."""

    def __init__(self, owner: DecodeAttention, form, part: portable.Partials, max_q: int) -> None:
        self._owner, self.form, self._part, self._max_q = owner, form, part, max_q

    def plan(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        recent_start: torch.Tensor,
        q_indptr: torch.Tensor | None = None,
    ) -> None:
        """Split this step's work (``plan.plan_attend``); before the first layer."""
        own, part = self._owner, self._part
        plan_attend(
            part.plan, rows, seq_lens, recent_start, own.windows, part.splits, q_indptr,
            block=own.block,
        )  # fmt: skip

    def layer(
        self,
        view: LayerView,
        tokens: TokenBatch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        req_to_token: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        logit_cap: float = 0.0,
    ) -> torch.Tensor:
        """``store.store`` of one layer's fresh rows and attention over everything stored."""
        q_rot = query_buffer(view, len(q), q.shape[1])
        fresh = None
        few = len(q) <= _ENCODE_IN_MERGE
        if few and self._owner.cuda and cuda_store.supported(view, tokens, q, k, v, q_rot):
            fresh = cuda_store.rotate(view, tokens, q, k, v, q_rot)
        else:
            store(view, tokens, q, k, v, q_rot, triton_only=not self._owner.cuda)
        return self(view, q_rot, req_to_token, out, fresh=fresh, scale=scale, logit_cap=logit_cap)

    def __call__(
        self,
        view: LayerView,
        q_rot: torch.Tensor,
        req_to_token: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        fresh: Fresh | None = None,
        scale: float,
        logit_cap: float = 0.0,
    ) -> torch.Tensor:
        """Attention of q_rot (``views.query_buffer``) over everything stored, fresh tokens too.

        out [T, H, D] model dtype and basis; lse [T, H] float32 natural log, optional; ``fresh``
        of ``cuda_store.rotate`` is encoded on the way.
        """
        own, part = self._owner, self._part
        if own.cuda:
            cuda_attend.attend(self.form, part, view, q_rot, req_to_token, scale, logit_cap)
            return cuda_attend.merge(part, view, out, self._max_q, lse, fresh)
        portable.attend(part, view, q_rot, req_to_token, scale, logit_cap)
        return portable_merge(part, view, out, self._max_q, lse)
