"""--oscar-prefix-window recompute: the end of a cached prompt is computed again, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oscar_sglang.health.kl_gate import Sizes, measure
from scripts.lib.tiny_models import qwen3, random_ids
from tests.support.server import Server

pytestmark = pytest.mark.sglang
SINK, RECENT = 8, 32


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix_window")
    flags = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--skip-tokenizer-init"]
    flags += ["--max-running-requests", "4", "--max-total-tokens", "2000", "--oscar-debug-tags"]
    flags += ["--oscar-sink-tokens", str(SINK), "--oscar-recent-tokens", str(RECENT)]
    flags += ["--oscar-prefix-window", "recompute", "--chunked-prefill-size", "64"]
    env = {"OSCAR_SGLANG_CACHE": str(folder / "cache")}
    with Server(qwen3(folder / "model"), folder / "log", *flags, env=env) as s:
        yield s


def ask(server: Server, ids: list[int]) -> tuple[int, dict[int, float]]:
    """Cached tokens and the next token's log-probabilities."""
    meta = server.generate(ids, 2, return_logprob=True, top_logprobs_num=256)["meta_info"]
    return meta["cached_tokens"], {t: v for v, t, *_ in meta["output_top_logprobs"][0]}


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    assert len(a) == len(b) == 256
    return max(abs(a[t] - b[t]) for t in a)


def test_last_tokens_of_a_cached_prompt_are_computed_again(server):
    (ids,) = (x.tolist() for x in random_ids(400))
    answers = {}
    for cached in (178, 200):
        server.flush()
        ask(server, ids[:cached])
        hit, answers[cached] = ask(server, ids[:210])
        assert hit == 210 - RECENT == 178
    # What was cached beyond the cap plays no part: float32 rounding of other batch shapes.
    assert difference(answers[178], answers[200]) < 1e-4
    server.flush()
    fresh_hit, fresh = ask(server, ids[:210])
    assert fresh_hit == 0 and difference(fresh, answers[200]) > 1e-3, "codes must matter"


def test_a_prompt_within_the_window_is_exact(server):
    ids = random_ids(RECENT - 2)[0].tolist()
    server.flush()
    _, first = ask(server, ids)
    hit, again = ask(server, ids)
    assert hit == 0 and difference(first, again) < 1e-5


def test_a_long_turn_uses_the_whole_prefix(server):
    ids = random_ids(300)[0].tolist()
    server.flush()
    ask(server, ids[:150])
    assert ask(server, ids[:150] + ids[200:250])[0] in (150, 151)


def test_sglangs_kl_gate_sees_codes_and_all_hits(server):
    """The kit on a real server (its arithmetic: ``test_kl_gate``)."""
    sizes = Sizes(samples=2, prompt_tokens=120, groups=1, prefix_tokens=64, new_tokens=8)
    sizes = replace(sizes, branches=2, turns=(40, 20))
    documents = [ids[:120].tolist() for ids in random_ids(120, 120)]
    found = list(measure(f"http://127.0.0.1:{server.port}", documents, 256, sizes))
    assert [(r.case, r.samples) for r in found] == [
        ("turns", 2), ("prefix hit", 2), ("answer hit", 2),
    ]  # fmt: skip
    for result in found:
        assert 1e-6 < result.kl < 0.02, "codes are read, and read well"
        assert result.hit == 1.0


def test_no_slot_is_lost(server):
    ids = random_ids(300)[0].tolist()
    server.flush()
    for length in (100, 180, 190, 180, 230, 300, 300):
        ask(server, ids[:length])
    state = server.state()
    # One copy of the document, and of each request's first token after it where it was fed back.
    assert 300 <= state["history_tokens"] <= 300 + 7 * 2
    assert state["prefix_window"] == "recompute" and state["requests_on_prefix"] >= 5
    server.flush()
    assert server.state()["history_tokens"] == 0
    log = server.log.read_text()
    for word in ("OwnershipError", "memory leak", "hit an exception"):
        assert word not in log, server.tail()
