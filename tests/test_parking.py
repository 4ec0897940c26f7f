"""Which rings outlive their requests, and who takes them over."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import pytest

from oscar_sglang.pool.parking import Parking

N_RECENT, PAGE = 32, 1


class Req:
    """As much of SGLang's request as is read."""

    def __init__(self, tokens, row=None, prefix=0, **key) -> None:
        self.origin_input_ids, self.output_ids = array("q", tokens), array("q")
        n = len(tokens)
        self.kv = SimpleNamespace(req_pool_idx=row, kv_committed_len=n, kv_allocated_len=n)
        self.prefix_len = prefix
        self.extra_key, self.cache_salt = key.get("extra_key"), key.get("cache_salt")


def tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=n)


@pytest.fixture
def parking() -> Parking:
    return Parking(rows=9, n_recent=N_RECENT, page_size=PAGE)


def taken(parking: Parking, req: Req, free=(1, 2, 3)) -> tuple[int, int, int]:
    """The row ``req`` gets, the source of its ring and where that begins."""
    rows = list(free)
    parking.take(rows, [req])
    assert sorted(rows) == sorted(free)
    return rows[-1], int(parking.source[rows[-1]]), int(parking.low[rows[-1]])


def test_the_next_turn_takes_over_the_ring(parking):
    text = tokens(100)
    parking.leave(Req(text, row=3), start=0)
    turn = Req(text + [7, 8], prefix=100)
    assert parking.tail(turn) == 2
    assert taken(parking, turn) == (1, 3, 100 + 1 - N_RECENT)
    assert (parking.found, parking.missed) == (1, 0)


def test_only_what_is_missing_is_computed_again(parking):
    """A branch that parts from the text inside the ring, and one before it."""
    text = tokens(100)
    parking.leave(Req(text, row=3), start=0)
    for parts, tail in ((98, 4), (80, 22), (60, N_RECENT)):
        branch = text[:parts] + tokens(102 - parts, seed=1)
        assert parking.tail(Req(branch)) == tail
    assert parking.tail(Req(text[:99])) == 0, "slack of a page and a step"
    assert parking.tail(Req(text[:98])) == N_RECENT, "ends before the ring's rows suffice"


def test_short_prompts_are_whole_in_the_ring(parking):
    text = tokens(20)
    parking.leave(Req(text, row=3), start=0)
    assert parking.tail(Req(text + [5])) == 1
    assert parking.tail(Req(text[:10])) == 0


@pytest.mark.parametrize("key", [{"extra_key": "lora"}, {"cache_salt": "salt"}])
def test_keys_of_the_prefix_cache_are_kept_apart(parking, key):
    text = tokens(100)
    parking.leave(Req(text, row=3, **key), start=0)
    assert parking.tail(Req(text + [7])) == N_RECENT
    assert parking.tail(Req(text + [7], **key)) == 1


def test_a_row_in_use_again_leaves_nothing(parking):
    text = tokens(100)
    parking.leave(Req(text, row=3), start=0)
    waiting = Req(text + [7], prefix=100)
    assert parking.tail(waiting) == 1
    parking.take([3], [Req(tokens(10, seed=2))])
    assert parking.tail(waiting) == N_RECENT
    assert taken(parking, waiting)[1] == 0 and parking.missed == 1
    parking.leave(Req(text, row=5), start=0)
    assert parking.tail(waiting) == 1
    parking.clear()
    assert parking.tail(waiting) == N_RECENT


def test_a_ring_that_began_late_is_exact_from_there(parking):
    text = tokens(100)
    parking.leave(Req(text, row=3), start=95)
    assert parking.tail(Req(text + [7])) == N_RECENT
    assert taken(parking, Req(text + [7], prefix=100)) == (1, 3, 95)


def test_an_allocated_step_counts_as_written(parking):
    """SGLang may have launched one more step when a request ends."""
    req = Req(tokens(100), row=3)
    req.kv.kv_allocated_len = 104
    parking.leave(req, start=0)
    assert taken(parking, Req(tokens(100) + [7], prefix=100))[2] == 105 - N_RECENT


def test_sources_are_taken_last_and_never_by_a_neighbour(parking):
    a, b = tokens(100), tokens(100, seed=1)
    parking.leave(Req(a, row=1), start=0)
    parking.leave(Req(b, row=2), start=0)
    turns = [Req(b + [7], prefix=100), Req(a + [7], prefix=100)]
    free = [1, 2, 5, 6]
    parking.take(free, turns)
    assert free[-2:] == [5, 6] and parking.source[[5, 6]].tolist() == [2, 1]

    parking = Parking(9, N_RECENT, PAGE)
    parking.leave(Req(a, row=1), start=0)
    parking.leave(Req(b, row=2), start=0)
    free = [1, 2]
    parking.take(free, turns)
    assert free == [2, 1] and parking.source[[2, 1]].tolist() == [2, 1], "each its own"

    parking = Parking(9, N_RECENT, PAGE)
    parking.leave(Req(a, row=1), start=0)
    forks = [Req(a + [7], prefix=100), Req(a + [8], prefix=100)]
    free = [5, 1]
    parking.take(free, forks)
    assert free == [5, 1] and parking.source[[5, 1]].tolist() == [0, 1], "no longer what it was"
    assert (parking.found, parking.missed) == (1, 1)


def test_rows_free_longest_go_first(parking):
    free = [4, 2, 7]
    parking.take(free, [Req([1]), Req([2])])
    assert free == [7, 4, 2]
    parking.take(free, [Req([1])] * 4)
    assert free == [7, 4, 2], "more than there are: SGLang says no"


def test_against_a_plain_search():
    """Random turns and branches: what is found is what comparing everything finds."""
    rng = random.Random(5)
    parking, left = Parking(9, N_RECENT, PAGE), {}
    for _ in range(2000):
        text = [rng.randrange(2) for _ in range(rng.randrange(40, 60))]
        text = [0] * rng.randrange(0, 50) + text
        req = Req(text)
        reach = [0]
        for kept, low in left.values():
            same = 0
            while same < min(len(kept), len(text)) and kept[same] == text[same]:
                same += 1
            if low < same and low <= max(0, len(text) - N_RECENT + PAGE + 1):
                reach.append(same)
        assert parking.tail(req) == min(N_RECENT, len(text) - max(reach))
        req.kv.req_pool_idx = row = rng.randrange(1, 9)
        start = rng.randrange(len(text))
        parking.leave(req, start)
        left.pop(row, None)
        if (low := max(start, len(text) + 1 - N_RECENT)) < len(text):
            left[row] = (text, low)
