"""The dump of one request: what its next token would read, and where from."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oscar_sglang.events import log_event, read_events
from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.watch.dump import SEGMENTS, after_server_info, dump_request
from tests.test_reference import Pool, Sequence, decoded

WINDOWS = WindowLayout(4, 16)


@pytest.fixture
def pool():
    return Pool(WINDOWS, layers=2)


def request(pool, length, row=1, done=None, hit=0):
    seq = Sequence(length, row, seed=40 + row)
    pool.start(seq, hit)
    for layer in range(2):
        pool.step((seq, hit, done or length), layer=layer)
    return seq


@pytest.mark.parametrize("length", [1, 4, 5, 19, 20, 21, 60])
def test_rows_and_segments(pool, tmp_path, length):
    seq = request(pool, length)
    path = tmp_path / "a.npz"
    dump_request(path, pool.seg, pool.req_to_token, 1, length, layers=(0, 1), rid="x")
    found = np.load(path)
    coded = range(4, max(4, length - 15))  # what is left after the newest 15 and the new token
    want = [SEGMENTS.index("history") if p in coded else (p >= 4) * 2 for p in range(length)]
    assert found["segment"].tolist() == want
    assert found["slots"].tolist() == seq.slots.tolist()
    history = torch.tensor(want)[:, None, None] == 1
    for layer in range(2):
        two_bits = decoded(
            SimpleNamespace(specs=pool.seg.specs[layer:], params=pool.seg.params[layer:]), seq
        )
        for name, exact, coarse in zip("kv", (seq.k, seq.v), two_bits, strict=True):
            expected = torch.where(history, coarse, exact).numpy()
            np.testing.assert_allclose(found[name][layer], expected, atol=2e-4)
    assert found["k"].shape == (2, length, 2, 64)
    assert (int(found["length"]), int(found["n_recent"]), str(found["rid"])) == (length, 16, "x")


def test_a_prefix_hit_has_no_recent_rows(pool, tmp_path):
    seq = request(pool, 60)
    turn = Sequence(60, 2, seed=41, slots=seq.slots)
    pool.start(turn, 50)
    dump_request(tmp_path / "b.npz", pool.seg, pool.req_to_token, 2, 50)
    found = np.load(tmp_path / "b.npz")
    assert (found["segment"][4:] == 1).all() and int(found["recent_start"]) == 50
    np.testing.assert_allclose(found["v"][0][:4], seq.v[:4].numpy(), atol=2e-4)


def scheduler(pool, *requests):
    kv = SimpleNamespace(segments=pool.seg)
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kv),
        req_to_token_pool=SimpleNamespace(req_to_token=pool.req_to_token),
        running_batch=SimpleNamespace(reqs=list(requests)),
        last_batch=None,
    )


def test_the_variable(pool, tmp_path, monkeypatch, caplog):
    request(pool, 30)
    common = dict(origin_input_ids=list(range(28)), output_ids=[7, 8, 9])
    live = SimpleNamespace(
        rid="../../evil", kv=SimpleNamespace(req_pool_idx=1, kv_committed_len=30), **common
    )
    gone = SimpleNamespace(
        rid="b", kv=SimpleNamespace(req_pool_idx=None, kv_committed_len=30), **common
    )
    target = tmp_path / "new" / "folder"
    assert after_server_info(scheduler(pool, live, gone)) == []
    monkeypatch.setenv("OSCAR_SGLANG_DUMP", str(target))
    with caplog.at_level(logging.INFO):
        (name,) = after_server_info(scheduler(pool, live, gone))
    assert [p.name for p in target.iterdir()] == [name]
    found = np.load(target / name)
    assert found["tokens"].tolist() == [*range(28), 7, 8] and str(found["rid"]) == "../../evil"
    (event,) = read_events(caplog.text)
    assert event["event"] == "dump" and event["rid"] == "../../evil" and event["tokens"] == "30"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSCAR_SGLANG_DUMP", str(tmp_path / "file"))
    assert after_server_info(scheduler(pool, live)) == []
    assert "cannot dump" in caplog.text


def test_events_come_back_as_written(caplog):
    fields = {"path": '/a b/"c"', "n": 3, "line": "x\ny", "empty": "", "eq": "a=b"}
    with caplog.at_level(logging.INFO):
        log_event(logging.getLogger("t"), "try", **fields)
    (event,) = read_events(caplog.text + "\noscar: something else\n")
    assert event == {"event": "try", **{k: str(v) for k, v in fields.items()}}
