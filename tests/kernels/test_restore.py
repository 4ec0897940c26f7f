"""restore_sinks and accumulate against the reference."""

import pytest
import torch

from oscar_sglang.kernels import reference
from oscar_sglang.kernels.accumulate import accumulate
from oscar_sglang.kernels.restore import restore_sinks
from oscar_sglang.kernels.stores import HistoryStore, SinkCache, WindowStore

WIDTHS = ("position", "position42", "position", "position44")


@pytest.mark.parametrize(
    "dim,codec_name",
    [(32, "feedback"), (64, "feedback"), (32, "lloyd"), (64, "compact"), (32, "position")],
)
@pytest.mark.parametrize("n_sink", [5, 33])
def test_restore_equals_the_reference(lab, dim, codec_name, n_sink):
    """Hits and misses (the lab's sink cache has 61 rows, so later requests evict earlier ones)."""
    lens = (60, 40, 3, 20)
    x = lab(lens=lens, dim=dim, n_sink=n_sink, n_recent=8, codec_name=codec_name)
    x.fill(lens)
    prefix = torch.tensor([60, 37, 2, 20], device=x.device)
    started = torch.tensor([True, True, True, False], device=x.device)
    expected = []
    seg = x.seg
    saved = [t.stack.clone() for t in (seg.windows.sink_k, seg.windows.sink_v)]
    hits = wanted = 0
    for b in range(3):
        n = min(int(prefix[b]), n_sink)
        slots = x.req_to_token[b + 1, :n].long()
        hits += reference.restore_sinks(seg, b + 1, slots)
        wanted += n
    for t, old in zip((seg.windows.sink_k, seg.windows.sink_v), saved, strict=True):
        expected.append(t.stack.clone())
        t.stack.copy_(old)
    counters = torch.zeros(3, dtype=torch.int64, device=x.device)
    restore_sinks(seg, x.req_to_token, x.rows, prefix, started, counters)
    for t, want in zip((seg.windows.sink_k, seg.windows.sink_v), expected, strict=True):
        got = t.stack
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.allclose(got.nan_to_num().float(), want.nan_to_num().float(), rtol=1e-2)
        for b in range(3):
            n = min(int(prefix[b]), n_sink)
            assert not got[:, b + 1, :n].isnan().any()
    assert counters.tolist() == [hits, wanted - hits, 3]
    assert 0 < hits < wanted or n_sink < 10


def test_layers_of_different_widths(lab, device):
    """Each layer's missed rows are read as its own bits and with its own mean."""
    labs = [lab(lens=(40,), dim=32, n_sink=21, n_recent=8, codec_name=n) for n in WIDTHS]
    first, layers = labs[0].seg, len(WIDTHS)
    specs = [x.seg.spec for x in labs]
    layouts = [x.seg.history.layouts[0] for x in labs]
    seg = reference.Segments(
        first.spec,
        [x.seg.params[0] for x in labs],
        HistoryStore(layouts, layers, first.history.num_slots, device),
        WindowStore(labs[0].windows, layouts[0], layers, 3, torch.float32, device),
        SinkCache(layouts[0], layers, 61, torch.float32, device),
        specs,
        labs[0].max_context,
    )
    table, n = labs[0].req_to_token, torch.tensor([40], device=device)
    batch = reference.plan_batch(seg, labs[0].rows, 0 * n, n, table[1, :40])
    for i in range(layers):
        reference.store(seg, i, batch, labs[i].random(40, 2), labs[i].random(40, 2))
    seg.sinks.tag[::2] = -1
    assert 0 < reference.restore_sinks(seg, 1, table[1, :21].long()) < 21
    windows = seg.windows.sink_k, seg.windows.sink_v
    want = [w.stack.clone() for w in windows]
    for w in windows:
        w.stack[:, 1] = torch.nan
    counters = torch.zeros(3, dtype=torch.int64, device=device)
    restore_sinks(seg, table, labs[0].rows, n, n > 0, counters)
    for w, expected in zip(windows, want, strict=True):
        assert torch.allclose(w.stack[:, 1], expected[:, 1], rtol=1e-4, atol=1e-5)
    assert counters[1] == 21 - counters[0] and counters[2] == 1


@pytest.mark.parametrize("heads", [3, 8])
def test_accumulate_equals_merge(device, heads):
    a, b = (
        reference.Partial(torch.randn(7, heads, 32), torch.randn(7, heads) * 4) for _ in range(2)
    )
    a.lse[0] = -torch.inf
    a.out[0] = torch.nan  # never written
    b.lse[1] = -torch.inf
    b.out[1] = torch.nan
    a.lse[2] = b.lse[2] = -torch.inf
    clean = [reference.Partial(p.out.nan_to_num(), p.lse) for p in (a, b)]
    want = reference.merge(*clean)
    out, lse = a.out.to(device), a.lse.to(device)
    transposed = b.lse.T.contiguous().to(device).T  # FA3 hands out [H, T]
    accumulate(out, lse, b.out.to(device), transposed)
    assert torch.allclose(out.cpu(), want.out, atol=1e-5)
    assert torch.allclose(lse.cpu(), want.lse, atol=1e-5)
