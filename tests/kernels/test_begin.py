"""begin_rows against the reference."""

import pytest
import torch

from oscar_sglang.kernels.begin import begin_rows
from oscar_sglang.kernels.layout import HistoryLayout, WindowLayout
from oscar_sglang.kernels.stores import WindowStore

ROWS, LAYERS = 9, 3
# row, cached prefix, whether it has just started, whose ring it takes over, from which position
CASES = (
    (1, 100, True, 5, 93),  # seven rows of another
    (2, 40, True, 0, 40),  # nobody's
    (3, 64, True, 3, 60),  # its own
    (4, 12, True, 6, 0),  # a whole short prompt
    (7, 50, False, 5, 47),  # goes on: left alone
    (8, 77, True, 5, 3),  # further back than the ring holds
)


def store(device, heads: int, dim: int, n_recent: int) -> WindowStore:
    layout, windows = HistoryLayout(heads, dim), WindowLayout(4, n_recent)
    store = WindowStore(windows, layout, LAYERS, ROWS, torch.bfloat16, device)
    g = torch.Generator().manual_seed(3)
    for rings in (store.recent_k.stack, store.recent_v.stack):
        rings.copy_(torch.randn(rings.shape, generator=g))
    store.recent_start.copy_(torch.arange(ROWS) * 7)
    store.written.copy_(torch.arange(ROWS) * 20)
    return store


@pytest.mark.parametrize("heads,dim,n_recent", [(1, 32, 13), (3, 64, 32), (2, 32, 143)])
def test_begin_equals_the_reference(device, heads, dim, n_recent):
    got, want = (store(device, heads, dim, n_recent) for _ in range(2))
    columns = zip(*CASES, strict=True)
    rows, prefix, started, whose, first = (torch.tensor(x, device=device) for x in columns)
    source = torch.zeros(ROWS, dtype=torch.int64, device=device)
    low = source.clone()
    source[rows], low[rows] = whose, first
    begin_rows(got, rows, prefix, started, (source, low))
    for row, length, starts, *taken in CASES:
        if starts:
            want.begin(row, length, *taken)
    for a, b in ((got.recent_k, want.recent_k), (got.recent_v, want.recent_v)):
        assert torch.equal(a.stack, b.stack)
    assert torch.equal(got.recent_start, want.recent_start)
    assert torch.equal(got.written, want.written)
    assert got.recent_start[8] == max(3, 77 - n_recent)


def test_without_rings_to_take_over_windows_begin_at_the_prefix(device):
    got = store(device, 2, 32, 16)
    before = got.recent_k.stack.clone()
    rows, prefix = torch.tensor([[1, 2], [30, 40]], device=device)
    begin_rows(got, rows, prefix, torch.tensor([True, False], device=device))
    assert got.recent_start[1:3].tolist() == [30, 14] and got.written[1:3].tolist() == [30, 40]
    assert torch.equal(got.recent_k.stack, before)
