"""The ownership oracle itself: it stays silent on a sound pool and names each kind of damage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from oscar_sglang.config import OscarConfig, OscarError
from oscar_sglang.kernels import reference
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.watch.places import OwnershipError
from oscar_sglang.watch.read_tags import ReadTags
from tests.test_reference import SCALE, Pool, Sequence

WINDOWS = WindowLayout(4, 16)


class Tagged(Pool):
    """The reference tests' pool, watched; token ids are derived from the sequence's seed."""

    def __init__(self, form=ReadTags, **kwargs):
        super().__init__(WINDOWS, **kwargs)
        self.tags = form(self.seg, self.req_to_token)
        self.tags.ready()

    def begin(self, seq, prefix):
        self.tags.before()
        super().start(seq, prefix)
        row, length = torch.tensor([seq.row]), torch.tensor([prefix])
        self.tags.start(row, length, torch.tensor([True]), [prefix])
        return seq

    def forward(self, *work, between=lambda: None, unseen=lambda: None):
        """``between`` two steps; ``unseen``: after the records were checked."""
        rows, prefix, ends = torch.tensor([(s.row, p, e) for s, p, e in work]).unbind(1)
        fb = SimpleNamespace(
            req_pool_indices=rows,
            extend_prefix_lens=prefix,
            extend_prefix_lens_cpu=prefix.tolist(),
            seq_lens=ends,
            input_ids=torch.cat([s.tokens[p:e] for s, p, e in work]),
            out_cache_loc=torch.cat([s.slots[p:e] for s, p, e in work]),
            extend_num_tokens=int((ends - prefix).sum()),
        )
        self.tags.before()
        between()
        self.seg.windows.go_on(rows, prefix)
        self.tags.begins(fb, torch.zeros(len(rows), dtype=torch.bool))
        unseen()
        batch = reference.plan_batch(self.seg, rows, prefix, ends, fb.out_cache_loc)
        q, k, v = (torch.cat([getattr(s, x)[p:e] for s, p, e in work]) for x in "qkv")
        table = self.req_to_token
        reference.attention(self.seg, 0, batch, q, k, v, table, self.scratch, SCALE)
        self.tags.attended(0)
        reference.store(self.seg, 0, batch, k, v)


def sequence(length, row, seed, slots=None):
    seq = Sequence(length, row, seed, slots)
    seq.tokens = torch.arange(length) + 1000 * seed
    return seq


@pytest.fixture
def pool():
    return Tagged()


@pytest.fixture
def seq(pool):
    return prompt(pool)


def prompt(pool):
    """A sequence whose first 40 tokens are in the cache."""
    seq = pool.begin(sequence(60, row=1, seed=5), 0)
    pool.forward((seq, 0, 40))
    return seq


def more_turns(pool, seq):
    """A chunk; then a turn on a cached prefix, a decode and padding in one batch."""
    pool.forward((seq, 40, 47))
    turn = sequence(60, row=2, seed=5, slots=seq.slots.clone())
    turn.slots[45:] = torch.tensor([pool.free.pop() for _ in range(15)])
    pool.begin(turn, 45)
    padding = sequence(1, row=0, seed=9, slots=torch.tensor([0]))
    pool.forward((turn, 45, 60), (seq, 47, 48), (padding, 0, 1), (padding, 0, 1))


def test_a_sound_pool_is_silent(pool, seq):
    more_turns(pool, seq)
    assert pool.tags.stats()["debug_tags"] == {
        "every": 1, "steps": 3, "checked_steps": 3, "checked_tokens": 40 + 45 + 47,
        "probed_requests": 0,
    }  # fmt: skip


def cut_turn(pool, seq):
    """The next turn of a session: row and first 41 tokens of one that was written up to 47."""
    pool.forward((seq, 40, 47))
    turn = sequence(60, row=1, seed=7, slots=seq.slots)
    for name in ("tokens", "q", "k", "v"):
        getattr(turn, name)[:41] = getattr(seq, name)[:41]
    return turn


def test_a_row_that_goes_on_earlier(pool, seq):
    pool.forward((cut_turn(pool, seq), 41, 60))
    assert int(pool.seg.windows.recent_start[1]) == 47 - 16


def test_a_row_that_goes_on_earlier_with_what_was_given_up(pool, seq, monkeypatch):
    turn = cut_turn(pool, seq)
    monkeypatch.setattr(pool.seg.windows, "go_on", lambda *_: None)
    with pytest.raises(OwnershipError, match="its ring begins at position 0, expected 31"):
        pool.forward((turn, 41, 60))


def overwrite(pool, seq):
    other = pool.begin(sequence(3, row=3, seed=8, slots=seq.slots[20:23]), 0)
    pool.forward((other, 0, 3))


def swap_ring(pool, seq):
    ring = pool.seg.windows.recent_k[0][1]
    ring[[3, 4]] = ring[[4, 3]]


DAMAGE = {
    "a slot given to two requests": (overwrite, "position 20: history slot .* holds position 0"),
    "swapped ring rows": (swap_ring, "ring row .* of row 1 holds other bytes"),
    "a sink row overwritten": (
        lambda pool, seq: pool.seg.windows.sink_v[0][1, 2].zero_(),
        "position 2: sink row 2 of row 1 holds other bytes",
    ),
    "history bytes changed": (
        lambda pool, seq: pool.seg.history.blocks[0].bitwise_xor_(1),
        "history slot .* holds other bytes",
    ),
    "a boundary that moved": (
        lambda pool, seq: pool.seg.windows.recent_start[1].add_(30),
        "was read from a history slot, expected a ring row",
    ),
    "a slot table that is off by one": (
        lambda pool, seq: pool.req_to_token[1].copy_(pool.req_to_token[1].roll(1)),
        "position 3 was read from a history slot, expected a sink row",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(pool, seq, name):
    """Done after the records were checked, so that it is the read that shows it."""
    damage, message = DAMAGE[name]
    if damage is overwrite:
        damage(pool, seq)
        damage = lambda *_: None  # noqa: E731
    with pytest.raises(OwnershipError, match=message):
        pool.forward((seq, 40, 41), unseen=lambda: damage(pool, seq))


def test_rows_that_were_written_elsewhere(pool, seq, monkeypatch):
    """What lies at a place is not taken for what was handed to the store."""
    write = pool.seg.windows.write
    monkeypatch.setattr(
        pool.seg.windows,
        "write",
        lambda layer, rows, positions, *rest: write(layer, rows, positions + 1, *rest),
    )
    pool.forward((seq, 40, 41))
    with pytest.raises(OwnershipError, match="position 40: ring row 8 .* other bytes"):
        pool.forward((seq, 41, 42))


def test_lost_sinks_are_those_of_history(pool, seq):
    pool.seg.sinks.tag.fill_(-1)
    pool.tags.before()
    pool.tags.cache_slot.fill_(-1)
    other = pool.begin(sequence(60, row=3, seed=5, slots=seq.slots), 20)
    pool.forward((other, 20, 21))
    other = sequence(60, row=4, seed=5, slots=seq.slots)
    pool.tags.before()
    pool.start(other, 20)
    pool.seg.windows.sink_k[0][4, 1].add_(1)  # restored wrongly
    pool.tags.start(torch.tensor([4]), torch.tensor([20]), torch.tensor([True]), [20])
    with pytest.raises(OwnershipError, match="position 1: sink row 1 of row 4 .* other bytes"):
        pool.forward((other, 20, 21))


def test_a_prefix_hit_on_foreign_slots(pool, seq):
    other = pool.begin(sequence(30, row=2, seed=6), 0)
    pool.forward((other, 0, 30))
    mixed = torch.cat([seq.slots[:10], other.slots[10:20], seq.slots[20:]])
    with pytest.raises(OwnershipError, match="position 10.*but of another sequence"):
        pool.begin(sequence(60, row=3, seed=5, slots=mixed), 20)


def test_a_row_that_changed_hands_unnoticed(pool, seq):
    foreign = sequence(60, row=2, seed=5, slots=seq.slots)
    pool.give_slots(foreign)
    with pytest.raises(OwnershipError, match="continues at position 40, but 0 of its"):
        pool.forward((foreign, 40, 41))


@pytest.mark.parametrize(
    "source, damage, what",
    [
        (1, None, None),
        (3, None, "position 32: ring row 0 of row 3 holds position 32, but of another sequence"),
        (1, "copy", "position 44: ring row 12 of row 1 holds other bytes"),
    ],
)
def test_a_ring_that_is_taken_over(pool, seq, source, damage, what):
    """Row 2 begins at position 45 with the ring of row 1, which left it at 47, or of another."""
    pool.forward((seq, 40, 47))
    other = pool.begin(sequence(60, row=3, seed=8), 0)
    pool.forward((other, 0, 47))
    rows = len(pool.seg.windows.recent_start)
    source_of, low = torch.zeros(2, rows, dtype=torch.int64)
    pool.tags.parking = SimpleNamespace(source=source_of, low=low)
    source_of[2], low[2] = source, 32
    turn = sequence(60, row=2, seed=5, slots=seq.slots.clone())
    turn.slots[45:] = torch.tensor([pool.free.pop() for _ in range(15)])
    pool.tags.before()
    pool.start(turn, 45)
    pool.seg.windows.begin(2, 45, source, 32)
    if damage:
        pool.seg.windows.recent_k[0][2, 44 % 16] += 1
    started = (torch.tensor([2]), torch.tensor([45]), torch.tensor([True]), [45])
    if what:
        with pytest.raises(OwnershipError, match=what):
            pool.tags.start(*started)
        return
    pool.tags.start(*started)
    pool.forward((turn, 45, 60), (seq, 47, 48))
    assert pool.tags.row_start[2] == 32


def test_the_flag():
    assert OscarConfig.from_options({"oscar_debug_tags": True}).debug_tags
    with pytest.raises(OscarError, match="--oscar-debug-tags"):
        OscarConfig.from_options({"oscar_debug_tags": "yes"})


def test_the_interval():
    config = OscarConfig.from_options({"oscar_debug_tags": True, "oscar_debug_tags_every": 4})
    assert config.debug_tags_every == 4
    for value, wrong in ((0, True), (4, None)):
        with pytest.raises(OscarError, match="--oscar-debug-tags-every"):
            OscarConfig.from_options({"oscar_debug_tags": wrong, "oscar_debug_tags_every": value})


def test_no_interval_on_a_cpu():
    from oscar_sglang.plugin.startup import Chosen, finish_arguments

    args = SimpleNamespace(device="cpu", page_size=1)
    with pytest.raises(OscarError, match="checks every step on a CPU"):
        config = OscarConfig(debug_tags=True, debug_tags_every=4)
        finish_arguments(None, args, config, Chosen(None, "feedback", 1))
