import pytest
import torch

from oscar_sglang.pool.prefix_tiles import plan_tiles, split


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
    first, second = plan_tiles(prefix, fresh, 12, torch.tensor([4, 5, 6, 7]), "cpu")
    assert (first.tokens, second.tokens) == (12, 5)
    assert first.rows.tolist() == [5, 6, 7] and first.starts.tolist() == [0, 0, 0]
    assert first.cu_k.tolist() == [0, 10, 10, 12] and first.cu_q.tolist() == [0, 2, 3, 7]
    assert first.queries == slice(3, 10) and (first.max_k, first.max_q) == (10, 4)
    assert first.requests == slice(1, 4)
    assert second.rows.tolist() == [7] and second.starts.tolist() == [2]
    assert second.queries == slice(6, 10) and second.cu_k.tolist() == [0, 5]
    assert plan_tiles([0, 0], [1, 1], 12, torch.tensor([1, 2]), "cpu") == []


def test_a_tile_that_holds_everything_covers_the_batch():
    (tile,) = plan_tiles([0, 10, 0], [3, 2, 1], 12, torch.tensor([4, 5, 6]), "cpu")
    assert tile.queries == slice(0, 6) and tile.requests == slice(0, 3)
    assert tile.cu_k.tolist() == [0, 0, 10, 10] and tile.cu_q.tolist() == [0, 3, 5, 6]
