"""--oscar-prefix-window park: a turn takes over the exact window that the last one left."""

from __future__ import annotations

import pytest

from scripts.lib.tiny_models import qwen3, random_ids
from tests.support.server import Server

pytestmark = pytest.mark.sglang
SINK, RECENT, CHUNK = 8, 32, 178


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parked_windows")
    flags = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--skip-tokenizer-init"]
    flags += ["--max-running-requests", "4", "--max-total-tokens", "2000", "--oscar-debug-tags"]
    flags += ["--oscar-sink-tokens", str(SINK), "--oscar-recent-tokens", str(RECENT)]
    flags += ["--oscar-prefix-window", "park", "--oscar-parked-rows", "2"]
    flags += ["--chunked-prefill-size", str(CHUNK)]
    env = {"OSCAR_SGLANG_CACHE": str(folder / "cache")}
    with Server(qwen3(folder / "model"), folder / "log", *flags, env=env) as s:
        yield s


def ask(server: Server, ids: list[int], **options) -> tuple[int, dict[int, float]]:
    """Cached tokens and the next token's log-probabilities."""
    options = {"return_logprob": True, "top_logprobs_num": 256} | options
    meta = server.generate(ids, 1, **options)["meta_info"]
    return meta["cached_tokens"], {t: v for v, t, *_ in meta["output_top_logprobs"][0]}


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    assert len(a) == len(b) == 256
    return max(abs(a[t] - b[t]) for t in a)


def windows(server: Server) -> tuple[int, int]:
    state = server.state()
    return state["windows_found"], state["windows_missed"]


def test_a_turn_reads_what_a_second_chunk_would(server):
    """The chunk after CHUNK tokens reads the last RECENT - 1 of them exactly, from its own ring."""
    (ids,) = (x.tolist() for x in random_ids(400))
    server.flush()
    hit, chunked = ask(server, ids[: CHUNK + 10])
    assert hit == 0
    server.flush()
    ask(server, ids[:CHUNK])
    before = windows(server)
    hit, parked = ask(server, ids[: CHUNK + 10])
    assert hit == CHUNK and windows(server) == (before[0] + 1, before[1])
    assert difference(chunked, parked) < 1e-5


def test_a_branch_finds_the_window_again(server):
    """What is taken over is a copy: the row that left it serves others."""
    (ids,) = (x.tolist() for x in random_ids(400))
    server.flush()
    ask(server, ids[:CHUNK])
    _, first = ask(server, ids[: CHUNK + 10])
    ask(server, ids[:CHUNK] + ids[300:310])
    before = windows(server)
    hit, again = ask(server, ids[: CHUNK + 10])
    # All of it but the last token was cached by the first one, whose window is there too.
    assert hit == CHUNK + 9 and windows(server) == (before[0] + 1, before[1])
    assert difference(first, again) < 0.05


def test_a_window_that_is_gone_is_computed_again(server):
    (ids,) = (x.tolist() for x in random_ids(400))
    server.flush()
    ask(server, ids[:CHUNK])
    others = [ids.tolist() for ids in random_ids(400, *range(50, 56))[1:]]
    for other in others[:5]:
        ask(server, other)
    before = windows(server)
    hit, _ = ask(server, ids[: CHUNK + 10])  # in the row that was free longest: 4 running, 2 parked
    assert hit == CHUNK and windows(server) == (before[0] + 1, before[1])
    server.flush()
    ask(server, ids[:CHUNK])
    for other in others:  # now every row has another request
        ask(server, other)
    before = windows(server)
    hit, _ = ask(server, ids[: CHUNK + 10])
    assert hit == CHUNK + 10 - RECENT and windows(server) == (before[0], before[1] + 1)


def test_another_key_of_the_prefix_cache_finds_nothing(server):
    (ids,) = (x.tolist() for x in random_ids(400))
    server.flush()
    ask(server, ids[:CHUNK])
    before = windows(server)
    hit, _ = ask(server, ids[: CHUNK + 10], cache_salt="other")
    assert hit == 0 and windows(server) == before
