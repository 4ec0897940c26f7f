import pytest
import torch

from oscar_sglang.kernels.codec import Rows
from oscar_sglang.kernels.layout import (
    BLOCK,
    HistoryLayout,
    MemoryPlan,
    WindowLayout,
    stored_head_dim,
)
from oscar_sglang.kernels.stores import HistoryStore


def plan(**changes):
    values = dict(
        layers=36,
        history=HistoryLayout(8, 128),
        windows=WindowLayout(64, 256),
        rows=33,
        sink_cache_rows=4096,
        scratch_tokens=4096,
        itemsize=2,
    )
    return MemoryPlan(**{**values, **changes})


@pytest.mark.parametrize("head_dim, bits", [(64, 2.5), (128, 2.25), (256, 2.125)])
def test_bits_per_element(head_dim, bits):
    assert HistoryLayout(8, head_dim).bits_per_element == bits


def test_figures_of_qwen3_8b():
    p = plan()
    assert p.history.bytes_per_slot == 8 * 72
    assert p.bytes_per_token == 36 * 8 * 72
    assert p.bf16_bytes_per_token / p.bytes_per_token == pytest.approx(7.11, abs=0.01)
    assert p.effective_bits(131072) == pytest.approx(2.28, abs=0.01)
    assert p.effective_bits(320) > 16  # windows and history rows both


def test_break_even_is_the_shortest_cheaper_context():
    p = plan()
    window = p.layers * p.windows.tokens * 8 * 2 * 128 * 2
    n = p.break_even()
    cost = lambda tokens: tokens * p.bytes_per_token + window  # noqa: E731
    assert cost(n) <= n * p.bf16_bytes_per_token
    assert cost(n - 1) > (n - 1) * p.bf16_bytes_per_token


@pytest.mark.parametrize("head_dim", [48, 192, 8, 0])
def test_odd_head_dims_are_refused(head_dim):
    with pytest.raises(ValueError, match=f"head_dim {head_dim} has no .*16, 32, 64, 80, 96, 112"):
        HistoryLayout(8, head_dim)


@pytest.mark.parametrize("head_dim, bits", [(80, 3.6), (96, 3.0), (112, 288 / 112)])
def test_padded_heads_are_counted_by_the_models_elements(head_dim, bits):
    """What is stored is a row of 128; what it stands for, and what BF16 would take, is less."""
    with pytest.raises(ValueError, match=f"head_dim {head_dim} is stored as 128"):
        HistoryLayout(8, head_dim)
    layout = HistoryLayout(8, stored_head_dim(head_dim))
    p = plan(history=layout, head_dim=head_dim)
    assert p.bits_per_element == pytest.approx(bits)
    assert p.bf16_bytes_per_token == 36 * 8 * 2 * head_dim * 2
    assert p.bf16_bytes_per_token / p.bytes_per_token == pytest.approx(16 / bits)


@pytest.mark.parametrize("sink, recent", [(0, 256), (64, 0), (-1, 256)])
def test_windows_must_hold_a_token(sink, recent):
    with pytest.raises(ValueError, match="at least 1 token"):
        WindowLayout(sink, recent)


@pytest.mark.parametrize("k_bits, v_bits, bits", [(2, 4, 3.125), (4, 2, 3.125), (4, 4, 4.125)])
def test_bits_of_mixed_widths(k_bits, v_bits, bits):
    layout = HistoryLayout(8, 128, meta_bytes=1, k_bits=k_bits, v_bits=v_bits)
    assert layout.bits_per_element == bits
    assert layout.bytes_per_slot == bits * 8 * 2 * 128 / 8


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match="2 or 4 bits"):
        HistoryLayout(8, 128, k_bits=bits)


def test_layers_of_different_widths_lie_one_after_another():
    layouts = [HistoryLayout(2, 64, k_bits=k, v_bits=v) for k, v in ((2, 2), (4, 2), (2, 4))]
    store = HistoryStore(layouts, 3, 2 * BLOCK, "cpu")
    sizes = [2 * 2 * h.block_bytes for h in layouts]
    assert store.num_bytes == sum(sizes)
    assert store.offsets.tolist() == [0, sizes[0], sizes[0] + sizes[1]]
    for i, block in enumerate(store.blocks):
        block.fill_(i + 1)
    assert store.base.tolist() == [1] * sizes[0] + [2] * sizes[1] + [3] * sizes[2]
    with pytest.raises(ValueError, match="3 layouts for 2 layers"):
        HistoryStore(layouts, 2, BLOCK, "cpu")


@pytest.mark.parametrize("widths", [(2, 2), (4, 2), (2, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_block_addresses(head_dim, heads, widths):
    """The documented byte address of every code byte and metadata field."""
    layout = HistoryLayout(heads, head_dim, k_bits=widths[0], v_bits=widths[1])
    store = HistoryStore(layout, 1, 3 * BLOCK + 1, "cpu")
    assert store.num_bytes == 4 * heads * layout.block_bytes
    generator = torch.Generator().manual_seed(0)

    def rows(n, row_bytes):
        packed = torch.randint(0, 256, (n, heads, row_bytes), generator=generator)
        meta = torch.randn(n, heads, 2, generator=generator)
        return Rows(packed.to(torch.uint8), meta.half())

    slots = torch.tensor([5, 17, 48, 15])
    k, v = rows(4, layout.k_row_bytes), rows(4, layout.v_row_bytes)
    store.write(0, slots, k, v)
    raw = store.blocks[0]
    for i, slot in enumerate(slots.tolist()):
        for head in range(heads):
            block = raw[slot // BLOCK, head]
            for base, size, row in (
                (0, layout.k_chunk_bytes, k),
                (BLOCK * layout.k_row_bytes, layout.v_chunk_bytes, v),
            ):
                for byte, found in enumerate(row.packed[i, head]):
                    chunk, inner = divmod(byte, size)
                    at = base + (chunk * BLOCK + slot % BLOCK) * size + inner
                    assert block[at] == found
            meta = block[layout.code_bytes_per_block :].view(torch.float16)
            mine = meta[(slot % BLOCK) * 4 : (slot % BLOCK) * 4 + 4]
            assert torch.equal(mine, torch.cat([k.meta[i, head], v.meta[i, head]]))
    k2, v2 = store.read(0, slots)
    for a, b in ((k, k2), (v, v2)):
        assert torch.equal(a.packed, b.packed) and torch.equal(a.meta, b.meta)
