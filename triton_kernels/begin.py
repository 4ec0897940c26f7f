"""begin: rings of request rows that change hands, in one launch for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _CHANNELS = 8, 1024  # of a ring, copied at once


@triton.jit
def _begin_kernel(
    ring_k, ring_v, rows, prefix_lens, started, source, low, layer_stride, n_recent, width,
    TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    request, layer = tl.program_id(0), tl.program_id(2)
    row = tl.load(rows + request).to(tl.int64)
    from_row = tl.load(source + row).to(tl.int64)
    if (tl.load(started + request) != 0) & (from_row != 0) & (from_row != row):
        prefix = tl.load(prefix_lens + request).to(tl.int64)
        first = tl.maximum(tl.load(low + row).to(tl.int64), prefix - n_recent)
        at = tl.program_id(1) * TR + tl.arange(0, TR)
        # The one position of the last n_recent that lies at this place of a ring.
        position = prefix - 1 - (prefix - 1 - at + n_recent) % n_recent
        ok = (at < n_recent) & (position >= first)
        base = layer.to(tl.int64) * layer_stride
        for start in range(0, width, TC):
            column = start + tl.arange(0, TC)
            mask = ok[:, None] & (column < width)[None, :]
            read = base + ((from_row * n_recent + at) * width)[:, None] + column[None, :]
            write = base + ((row * n_recent + at) * width)[:, None] + column[None, :]
            tl.store(ring_k + write, tl.load(ring_k + read, mask), mask)
            tl.store(ring_v + write, tl.load(ring_v + read, mask), mask)


def begin_rows(
    windows,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    started: torch.Tensor,
    taken: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """``WindowStore.begin`` of every request of a batch, without a host synchronisation.

    windows            the pool's ``WindowStore``
    rows, prefix_lens  [B] int64
    started            [B] bool   requests that have just taken their row; others are left alone
    taken              [R] int64 both: whose ring each row takes over (0: nobody's), and the first
                       position that is exact there; None: no row takes over any
    No row that another request of the batch has just taken may be a source.
    """
    first, start, written = prefix_lens, windows.recent_start, windows.written
    if taken is not None:
        source, low = taken
        first = torch.maximum(low[rows], prefix_lens - windows.windows.n_recent)
        first = torch.where(source[rows] != 0, first, prefix_lens)
    start[rows] = torch.where(started, first, start[rows])
    written[rows] = torch.where(started, prefix_lens, written[rows])
    if taken is None:
        return
    keys = windows.recent_k.stack
    layers, _, n_recent, heads, dim = keys.shape
    width = heads * dim
    channels = min(_CHANNELS, triton.next_power_of_2(width))
    grid = (len(rows), triton.cdiv(n_recent, _ROWS), layers)
    _begin_kernel[grid](
        ring_k=keys,
        ring_v=windows.recent_v.stack,
        rows=rows,
        prefix_lens=prefix_lens,
        started=started,
        source=source,
        low=low,
        layer_stride=keys.stride(0),
        n_recent=n_recent,
        width=width,
        TR=_ROWS,
        TC=channels,
        num_warps=4,
    )
