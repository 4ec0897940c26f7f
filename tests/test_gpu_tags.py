"""The GPU form of the ownership oracle, on CPU tensors: silent on a sound pool, names damage."""

from __future__ import annotations

import random

import pytest
import torch

from oscar_sglang.watch.places import Flat, OwnershipError, link
from oscar_sglang.watch.tags import Tags
from tests.test_debug_tags import DAMAGE, Tagged, cut_turn, more_turns, overwrite, prompt, sequence


class Watched(Tagged):
    """Every step is checked before it runs."""

    def __init__(self, **kwargs):
        super().__init__(lambda *of: Tags(*of, every=1), **kwargs)


@pytest.fixture
def pool():
    return Watched()


@pytest.fixture
def seq(pool):
    return prompt(pool)


def test_a_sound_pool_is_silent(pool, seq):
    more_turns(pool, seq)
    assert pool.tags.stats()["debug_tags"] == {
        "every": 1, "steps": 3, "checked_steps": 3, "checked_tokens": 132, "probed_requests": 0
    }  # fmt: skip


def test_kernels_are_probed_in_checked_steps(pool):
    pool.tags.every, seen = 2, []
    pool.tags.probe = lambda rows, prefix, plan: seen.append((rows.tolist(), plan)) or 3
    seq = prompt(pool)
    more_turns(pool, seq)
    assert seen == [([1], None)] and pool.tags.stats()["debug_tags"]["probed_requests"] == 3


@pytest.mark.parametrize("forgets", [True, False])
def test_a_row_that_goes_on_earlier(pool, seq, monkeypatch, forgets):
    turn = cut_turn(pool, seq)
    if forgets:
        pool.forward((turn, 41, 59))
        pool.forward((turn, 59, 60))
        return
    monkeypatch.setattr(pool.seg.windows, "go_on", lambda *_: None)
    with pytest.raises(OwnershipError, match="row 1: its ring begins at position 0, expected 31"):
        pool.forward((turn, 41, 60))


# What the CPU form finds only by the segment that was really read.
WORDS = {
    "a boundary that moved": "row 1: its ring begins at position 30, expected 0",
    "a slot table that is off by one": "position 0: history slot .* holds no token",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(pool, seq, name):
    damage, message = DAMAGE[name]
    if damage is overwrite:
        damage(pool, seq)
        damage = lambda *_: None  # noqa: E731
    with pytest.raises(OwnershipError, match=WORDS.get(name, message)):
        pool.forward((seq, 40, 41), between=lambda: damage(pool, seq))


def test_a_prefix_hit_on_foreign_slots(pool, seq):
    other = pool.begin(sequence(30, row=2, seed=6), 0)
    pool.forward((other, 0, 30))
    mixed = torch.cat([seq.slots[:10], other.slots[10:20], seq.slots[20:]])
    with pytest.raises(OwnershipError, match="position 10.*but of another sequence"):
        pool.begin(sequence(60, row=3, seed=5, slots=mixed), 20)


def test_a_restored_sink_that_is_not_the_cached_one(pool, seq):
    pool.tags.before()
    pool.seg.sinks.k[0].add_(1)
    with pytest.raises(OwnershipError, match="sink-cache row .* holds other bytes"):
        pool.begin(sequence(60, row=3, seed=5, slots=seq.slots), 20)


def test_a_row_that_changed_hands_unnoticed(pool, seq):
    foreign = sequence(60, row=2, seed=5, slots=seq.slots)
    pool.give_slots(foreign)
    with pytest.raises(OwnershipError, match="continues at position 40, but 0 of its tokens"):
        pool.forward((foreign, 40, 41))


def test_slots_of_a_whole_other_sequence(pool, seq):
    """Unbroken from position 0, and still not this request's."""
    other = pool.begin(sequence(40, row=2, seed=6), 0)
    pool.forward((other, 0, 40))
    pool.req_to_token[1, :40] = other.slots.int()
    with pytest.raises(OwnershipError, match="row 1: its 40 slots are another's"):
        pool.forward((seq, 40, 41))


def test_chains():
    def chains(*sequences):
        lens = torch.tensor([len(s) for s in sequences])
        flat = Flat.of(torch.zeros_like(lens), lens, int(lens.sum()))
        return flat.chains(torch.cat([torch.tensor(s) for s in sequences]), 0).split(lens.tolist())

    a, b, c = chains([1, 2, 3], [1, 2, 4], [2, 1, 3])
    assert torch.equal(a[:2], b[:2]) and a[2] != b[2] and a[1] != c[1] and a[2] != c[2]
    rest = Flat.of(torch.tensor([2]), torch.tensor([1]), 1).chains(torch.tensor([3]), a[1])
    assert torch.equal(rest, a[2:])
    grid = torch.cartesian_prod(torch.arange(300), torch.arange(300))
    assert len(set(link(*grid.unbind(1)).tolist())) == 90000


@pytest.mark.sglang
@pytest.mark.parametrize("page", (1, 16, "omni"))
def test_random_walks(page):
    """The walk of test_ownership under both forms of the oracle at once."""
    from tests.support.pool_machine import Machine

    machines = []
    kind = dict(codec_name=page) if page == "omni" else dict(page=page)
    for seed in range(2):
        cache = random.Random(seed).choice((3, 24))
        machine = Machine(seed, cache, n_sink=20, park=seed == 1, **kind)
        machine.tags = Both(machine)
        machine.run(120 if page == 1 else 500)  # larger pages, faster walks
        machine.check_idle()
        machines.append(machine)
    assert sum(m.tags.gpu.checked_tokens for m in machines) > 500
    assert sum(m.counts["hits"] for m in machines) > 0


class Both:
    """What ``Machine`` calls, on the form for a CPU and on that for a GPU."""

    def __init__(self, machine) -> None:
        self.cpu, self.gpu = machine.tags, Tags(machine.seg, machine.rows.req_to_token, every=1)
        self.gpu.parking = machine.parking
        self.gpu.ready()

    def before(self):
        self.gpu.before()
        self.cpu.before()

    def begins(self, fb, started):
        self.gpu.begins(fb, started)  # first: what it reads is no attention
        self.cpu.begins(fb, started)

    def attended(self, layer):
        self.cpu.attended(layer)


def test_tags_that_nobody_armed_stop_the_server(monkeypatch):
    """Through the backend's own entry: silent while SGLang warms up, then an error."""
    from types import SimpleNamespace

    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from oscar_sglang.pool.gpu_backend import OscarGpuBackend
    from oscar_sglang.watch import tags

    monkeypatch.setattr(tags, "UNARMED_STEPS", 5)
    pool = Watched()
    pool.tags.armed = False
    counters = SimpleNamespace(demoted_tokens=0)
    backend = SimpleNamespace(pool=SimpleNamespace(counters=counters, watch=pool.tags))
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=1)
    for capture in [True] * 20 + [False] * 5:
        OscarGpuBackend.init_forward_metadata_out_graph(backend, batch, in_capture=capture)
    assert not pool.tags.armed and pool.tags.unarmed_steps == 5
    with pytest.raises(OwnershipError, match="never armed.*reinstall"):
        OscarGpuBackend.init_forward_metadata_out_graph(backend, batch)
    pool.tags.unarmed_steps = 0
    pool.tags.ready()
    for _ in range(20):
        pool.tags.before()
        assert pool.tags.watching
