"""Page sizes on a CPU: the same answers, whole pages from the prefix cache, nothing lost."""

from __future__ import annotations

import pytest

from oscar_sglang.artifact import file as art
from scripts.lib.tiny_models import VOCAB, qwen3, random_ids
from tests.support.server import Server

pytestmark = pytest.mark.sglang
TOKENS = 2000  # no multiple of 64 or 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = qwen3(tmp_path_factory.mktemp("pages"))
    art.data_free(art.Fingerprint.of(folder), "feedback").save(folder / "artifact.st")
    return folder


def scenario(server: Server) -> list[dict]:
    """A prompt of two pages in chunks, a turn on it, and one that shares more than whole pages:
    log-probabilities of 3 tokens each."""
    first, turn = (x.tolist() for x in random_ids(256, 70))
    answers = []
    for prompt in (first, first + turn, first + turn[:44] + turn):
        meta = server.generate(prompt, 3, return_logprob=True, top_logprobs_num=VOCAB)["meta_info"]
        steps = [{t: v for v, t, *_ in step} for step in meta["output_top_logprobs"]]
        answers.append({"cached": meta["cached_tokens"], "steps": steps})
    return answers


@pytest.fixture(scope="module")
def answers(model, tmp_path_factory):
    found = {}
    flags = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--skip-tokenizer-init"]
    flags += ["--oscar-artifact", str(model / "artifact.st"), "--chunked-prefill-size", "128"]
    flags += ["--oscar-sink-tokens", "8", "--oscar-recent-tokens", "32", "--oscar-debug-tags"]
    flags += ["--max-total-tokens", str(TOKENS), "--max-running-requests", "4"]
    for page in (1, 64, 128):
        log = tmp_path_factory.mktemp("log") / "log"
        with Server(model, log, *flags, "--page-size", str(page)) as server:
            found[page] = {"answers": scenario(server), "state": server.state()}
            server.flush()
            found[page]["flushed"] = server.state()["history_tokens"]
            assert "OwnershipError" not in log.read_text()
    return found


@pytest.mark.parametrize("page", [64, 128])
def test_page_size_changes_nothing_but_what_is_shared(answers, page):
    one, other = answers[1], answers[page]
    for n in (0, 1):  # the second hits the same 256 tokens, so it reads the same ones as codes
        assert one["answers"][n]["cached"] == other["answers"][n]["cached"] == 256 * n
        for a, b in zip(one["answers"][n]["steps"], other["answers"][n]["steps"], strict=True):
            assert max(abs(a[t] - b[t]) for t in range(VOCAB)) < 1e-5
    assert one["answers"][2]["cached"] == 300
    assert other["answers"][2]["cached"] == 300 // page * page


@pytest.mark.parametrize("page", [1, 64, 128])
def test_whole_pages_are_held_and_given_back(answers, page):
    state = answers[page]["state"]
    assert state["tokens_capacity"] == TOKENS // page * page
    assert state["history_tokens"] % page == 0 and state["history_tokens"] >= 326 // page * page
    assert state["bytes"] == state["planned_bytes"]
    assert answers[page]["flushed"] == 0
