"""Where SGLang would launch Triton kernels on a CPU too: the same, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .config import ATTENTION_BACKEND


def support_triton(original: Callable, backend: str) -> bool:
    """AROUND utils.common.support_triton."""
    return original("torch_native" if backend == ATTENTION_BACKEND and _on_cpu() else backend)


def last_loc(
    original: Callable, req_to_token: torch.Tensor, rows: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """AROUND allocation.get_last_loc: the slot of each request's last cached token."""
    if req_to_token.device.type != "cpu":
        return original(req_to_token, rows, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, rows, prefix_lens)


def _on_cpu() -> bool:
    from sglang.srt.utils.common import is_cpu

    return is_cpu()


def _ours(allocator: Any) -> bool:
    from .memory_pool import OscarKVPool

    return allocator.device == "cpu" and isinstance(allocator.get_kvcache(), OscarKVPool)


def alloc_extend(
    original: Callable,
    self: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    """AROUND PagedTokenToKVPoolAllocator.alloc_extend: slots [extend_num_tokens] int64, or None."""
    if not _ours(self):
        lens = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
        return original(self, *lens, last_loc, extend_num_tokens, num_new_pages)
    from sglang.srt.mem_cache.allocator import alloc_extend_naive

    page = self.page_size
    pages = int((-(-seq_lens // page) + (-prefix_lens // page)).sum())
    if pages > len(self.free_pages):
        return None
    out = torch.empty(extend_num_tokens, dtype=torch.int64)
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, out, page, "cpu")
    self.free_pages = self.free_pages[pages:]
    return out


def alloc_decode(
    original: Callable,
    self: Any,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
) -> torch.Tensor | None:
    """AROUND PagedTokenToKVPoolAllocator.alloc_decode: one slot a request."""
    if not _ours(self):
        return original(self, seq_lens, seq_lens_cpu, last_loc)
    before = seq_lens - 1
    return self.alloc_extend(before, before, seq_lens, seq_lens, last_loc, len(seq_lens))
