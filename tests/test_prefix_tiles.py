import pytest
import torch

from oscar_sglang.prefix_tiles import plan_tiles, split


@pytest.mark.parametrize("capacity", [1, 5, 16, 1000])
@pytest.mark.parametrize(
    "prefix", [[7], [0], [0, 0, 9], [3, 0, 4], [16, 16, 1], [0, 40, 0, 0, 2, 0]], ids=str
)
def test_every_position_once_and_no_tile_too_large(prefix, capacity):
    seen = [set() for _ in prefix]
    for part in split(prefix, capacity):
        assert sum(n for *_, n in part) <= capacity
        requests = [r for r, _, _ in part]
        assert requests == list(range(requests[0], requests[-1] + 1))
        for request, start, n in part:
            new = set(range(start, start + n))
            assert not new & seen[request]
            seen[request] |= new
    assert [len(s) for s in seen] == prefix


def test_device_metadata():
    prefix, fresh = [0, 10, 0, 7], [3, 2, 1, 4]
    tiles = plan_tiles(prefix, fresh, 12, torch.tensor([4, 5, 6, 7]), "cpu", target=1)
    assert [t.tokens for t in tiles] == [12, 5] and [t.splits for t in tiles] == [1, 1]
    first, second = tiles
    assert first.rows.tolist() == [5, 6, 7] and first.starts.tolist() == [0, 0, 0]
    assert first.indptr.tolist() == first.cu_k.tolist() == [0, 10, 10, 12]
    assert first.cu_q.tolist() == [0, 2, 3, 7] and first.index.tolist() == list(range(7))
    assert first.queries == slice(3, 10) and (first.max_k, first.max_q) == (10, 4)
    assert second.rows.tolist() == [7] and second.starts.tolist() == [2]
    assert second.queries == slice(6, 10) and second.cu_k.tolist() == [0, 5]
    assert plan_tiles([0, 0], [1, 1], 12, torch.tensor([1, 2]), "cpu", 1) == []


def test_splits_cover_every_query_and_key():
    """Gathered queries against key ranges, accumulated: the same as one attention per request."""
    prefix, fresh, capacity = [3000, 0, 1500], [3, 2, 5], 4000
    tiles = plan_tiles(prefix, fresh, capacity, torch.tensor([1, 2, 3]), "cpu", target=8)
    assert [t.splits for t in tiles] == [3, 1]
    tile = tiles[0]
    assert tile.tokens == 4000 and tile.cu_k.tolist()[::3] == tile.indptr.tolist()
    assert tile.cu_k.diff().max() <= tile.max_k and tile.cu_q.diff().max() <= tile.max_q
    copies = tile.index.tolist()
    for query in range(10):
        rows = [int(tile.first[query]) + i * int(tile.step[query]) for i in range(3)]
        assert [copies[r] for r in rows] == [query] * 3
        assert [i for i, c in enumerate(copies) if c == query] == rows
