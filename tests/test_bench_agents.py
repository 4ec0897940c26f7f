"""Replaying recorded agent sessions: what is sent, what is counted, and one run on a server."""

from __future__ import annotations

import itertools
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import bench_agents
from scripts.lib.agent_traces import TraceError, load
from scripts.lib.trace_load import Load, Seen, Slo, figures, keeps, price, users_at_slo, walk

BLOCK = 16


def entry(t: float, blocks: list[int], rest: int, out: int, **more) -> dict:
    tokens = len(blocks) * BLOCK + rest
    return {"t": t, "type": "n", "in": tokens, "out": out, "hash_ids": blocks, **more}


def recorded(name: str, turns: int = 8) -> dict:
    """A session that grows by two blocks a turn; every third turn, half of it is replaced."""
    blocks, requests, fresh = list(range(10)), [], itertools.count(100)
    for i in range(turns):
        requests.append(entry(5.0 * i, list(blocks), 3 + i, 4 + i, api_time=2.0))
        if i % 3 == 2:
            del blocks[len(blocks) // 2 :]
        blocks += [next(fresh), next(fresh)]
    return {"id": name, "block_size": BLOCK, "hash_id_scope": "local", "requests": requests}


@pytest.fixture
def traces(tmp_path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.json").write_text(json.dumps(recorded(name)))
    return folder


def shared(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(a, b, strict=False)))


def test_prompts_share_exactly_the_recorded_blocks(traces):
    session = load(traces, 10_000)[0]
    prompts = [session.prompt(i) for i in range(len(session.requests))]
    assert [len(p) for p in prompts] == [r.tokens for r in session.requests]
    for a, b in itertools.pairwise(range(len(prompts))):
        blocks = shared(list(session.requests[a].blocks), list(session.requests[b].blocks))
        assert shared(prompts[a], prompts[b]) == blocks * BLOCK, "not a token more"
    assert session.prompt(3) == prompts[3]
    assert [r.new_tokens for r in session.requests] == list(range(4, 12))
    assert [r.wait for r in session.requests] == [0.0] + [3.0] * 7  # 5 s apart, 2 s of them answer


def test_sessions_share_nothing(traces):
    a, b, _ = load(traces, 10_000)
    assert a.requests[0].blocks == b.requests[0].blocks and a.prompt(0)[0] != b.prompt(0)[0]


def test_folder_file_and_archive_hold_the_same(traces, tmp_path):
    archive = tmp_path / "traces.tar.xz"
    with tarfile.open(archive, "w:xz") as out:
        out.add(traces, "traces")
    assert load(archive, 10_000) == load(traces, 10_000)
    assert load(traces / "b.json", 10_000) == load(traces, 10_000)[1:2]


def test_subagents_and_too_long_requests_are_left_out(tmp_path):
    data = recorded("a")
    data["requests"].insert(2, {"t": 6.0, "type": "subagent", "requests": [{"in": 5}]})
    data["requests"][1]["out"] = 5000
    (tmp_path / "a.json").write_text(json.dumps(data))
    (session,) = load(tmp_path / "a.json", 1000)
    assert len(session.requests) == 7
    assert session.requests[1].wait == 3.0, "from the end of the one left out"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"requests": [{"t": 0, "in": 5, "hash_ids": []}]}, "not a recorded session"),
        ({"requests": [entry(0, [1, 2], 99, 1)]}, "2 blocks of 16 do not make a prompt of 131"),
        ({"requests": [entry(0, [1], 1, 1)]}, "no session with two requests"),
    ],
)
def test_what_is_no_session_is_refused(tmp_path, change, message):
    (tmp_path / "x.json").write_text(json.dumps(recorded("x") | change))
    with pytest.raises(TraceError, match=message):
        load(tmp_path, 1000)


def test_users_walk_sessions_of_their_own(traces):
    sessions = load(traces, 10_000)
    walks = [walk(sessions, Load(3), user) for user in range(3)]
    begun = [next(w) for w in walks]
    assert len({s.name for s, _, _ in begun}) == 3 and all(cold for *_, cold in begun)
    assert all(number <= len(s.requests) * 2 / 3 for s, number, _ in begun)
    steps = list(itertools.islice(walks[0], 20))
    first, number, _ = begun[0]
    rest = len(first.requests) - number - 1
    assert [n for _, n, _ in steps[:rest]] == list(range(number + 1, len(first.requests)))
    assert steps[rest][1:] == (0, True), "the next session starts from its beginning, cold"


def answered(start: float, ttft: float, latency: float, cold: bool = False, **more) -> Seen:
    values = {"prompt_len": 100, "output_len": 11, "cached_tokens": 90} | more
    output = SimpleNamespace(start_time=start, ttft=ttft, latency=latency, **values)
    return Seen(output, cold)


def test_the_window_counts_what_ends_and_times_what_begins_in_it():
    load = Load(4, warmup=10, window=10)
    seen = [
        answered(5, 1.0, 2.0),  # before
        answered(9, 4.0, 6.0),  # ends within: counted, not timed
        answered(12, 0.5, 1.5),
        answered(13, 9.0, 9.5, cold=True, cached_tokens=0),  # ends after, cold: neither
        answered(14, 0.7, 2.7, cold=True, cached_tokens=0),  # counted, not timed
        answered(19, 1.5, 4.5, cached_tokens=50),  # ends after: timed, not counted
    ]
    found = figures(seen, 10.0, load)
    assert (found["requests_ended"], found["requests_timed"], found["requests_cold"]) == (3, 2, 2)
    assert found["requests_per_s"] == 0.3 and found["output_tokens_per_s"] == 3.3
    assert found["cache_hit_rate"] == 0.7
    assert (found["ttft_p50_s"], found["ttft_p95_s"]) == (1.0, 1.45)
    assert (found["tpot_p50_ms"], found["tpot_p95_ms"]) == (200.0, 290.0)


def test_nothing_in_the_window_is_no_latency():
    found = figures([answered(5, 1.0, 2.0)], 10.0, Load(1, window=10))
    assert found["ttft_p95_s"] is found["tpot_p50_ms"] is found["cache_hit_rate"] is None
    assert not keeps(found | {"unfinished": 0}, Slo())


@pytest.mark.parametrize(
    "ttft, tpot, unfinished, kept",
    [(2.0, 50.0, 0, True), (2.1, 5.0, 0, False), (0.1, 50.1, 0, False), (0.1, 5.0, 1, False)],
)
def test_slo(ttft, tpot, unfinished, kept):
    row = {"ttft_p95_s": ttft, "tpot_p95_ms": tpot, "unfinished": unfinished}
    assert keeps(row, Slo(ttft=2, tokens_per_s=20)) is kept


def test_users_at_the_slo_end_at_the_first_failure():
    rows = [{"users": u, "slo": s} for u, s in ((32, True), (8, True), (16, False))]
    assert users_at_slo(rows) == 8 and users_at_slo(rows[2:]) == 0


def test_price():
    row = {"output_tokens_per_s": 1000.0, "prompt_tokens_per_s": 9000.0}
    found = price(row, 3.6)
    assert found == {"price_per_m_output": 1.0, "price_per_m_tokens": 0.1}
    assert price({"output_tokens_per_s": 0, "prompt_tokens_per_s": 0}, 3.6) == dict.fromkeys(found)


def test_more_users_than_sessions_are_refused(traces, capsys):
    with pytest.raises(SystemExit):
        bench_agents.parse([str(traces), "--caches", "int2", "--users", "4"])
    assert "there are 3 sessions to replay" in capsys.readouterr().err


def test_a_file_is_completed_and_never_mixed(traces, tmp_path):
    """A run can be done in parts, under the same conditions."""
    out = tmp_path / "agents.json"

    def add(cache: str, users: int, speed: float, *more: str) -> list[tuple]:
        argv = [str(traces), "--caches", cache, "--users", str(users), "--json", str(out), *more]
        results = bench_agents.Results(bench_agents.parse(argv))
        good = {"ttft_p95_s": 1, "tpot_p95_ms": 1, "unfinished": 0}
        results.add(cache, {"users": users, "requests_per_s": speed, **good})
        return [(r["cache"], r["users"], r["requests_per_s"]) for r in results.as_dict()["rows"]]

    add("int2", 2, 9.0)
    add("int2", 1, 8.0)
    assert add("bf16", 2, 1.0) == [("bf16", 2, 1.0), ("int2", 1, 8.0), ("int2", 2, 9.0)]
    assert add("int2", 2, 7.0)[-1] == ("int2", 2, 7.0)
    data = json.loads(out.read_text())
    assert data["users_at_slo"] == {"bf16": 2, "int2": 2} and data["baselines"] == ["bf16"]
    assert len(data["earlier_commands"]) == 3 and data["load"]["window"] == 50.0
    with pytest.raises(SystemExit, match="measured with another load, slo"):
        add("int2", 3, 9.0, "--window", "5", "--slo-ttft", "9")


@pytest.mark.sglang
def test_a_run_on_a_server(traces, tmp_path, capsys):
    """One int2 server, three users, SGLang's shared-prefix benchmark beside it."""
    out = tmp_path / "agents.json"
    sizes = ["groups=2", "prompts=2", "shared=96", "question=8", "new-tokens=4", "concurrency=2"]
    flags = "--max-total-tokens 8192 --dtype float32 --oscar-prefix-window reuse"
    argv = [str(traces), "--shape", "tiny", "--caches", "int2", "--users", "3", "--price", "2"]
    argv += ["--think", "0.2", "--warmup", "2", "--window", "20", "--json", str(out)]
    argv += ["--server-flags", flags, "--shared-prefix"]
    argv += [f"--shared-prefix-{size}" for size in sizes] + ["--log-dir", str(tmp_path)]
    assert bench_agents.main(argv) == 0
    data = json.loads(out.read_text())
    (row,), (groups,) = data["rows"], data["shared_prefix"]
    assert row["requests_ended"] > 0 and row["unfinished"] == 0 and row["price_per_m_output"] > 0
    # A prompt shares 70 to 84% with the one before it; more where a session is replayed again.
    assert row["requests_timed"] > 0 and 0.69 < row["cache_hit_rate"] < 1
    assert groups["requests"] == 4 and groups["requests_per_s"] > 0
    assert data["traces"]["requests"] == 24 and data["users_at_slo"].keys() == {"int2"}
    assert "recorded agent sessions" in capsys.readouterr().out
