"""The product as its users meet it: a server process, HTTP, SmolLM2."""

from __future__ import annotations

import json
import re
import urllib.error

import pytest
import torch

from oscar_sglang.artifact import file as art
from oscar_sglang.kernels.layout import WindowLayout
from tests.support.server import Server

pytestmark = pytest.mark.sglang

COMMON = ("--dtype", "float32", "--max-running-requests", "8", "--max-total-tokens", "8192")
# A prefix hit must not recompute anything: it is what these tests look at.
INT2 = (*COMMON, "--kv-cache-dtype", "int2", "--oscar-prefix-window", "reuse")
CHUNK = 512
PROMPTS = (
    "The three laws of motion, in plain words, are",
    "Write a short letter to a friend about the sea.",
    "def quicksort(items):\n",
    "A list of ten animals and where they live:\n1.",
)


@pytest.fixture(scope="module")
def server(smollm2, artifacts, tmp_path_factory):
    log = tmp_path_factory.mktemp("http") / "server.log"
    flags = ("--oscar-artifact", str(artifacts["feedback"]), "--chunked-prefill-size", str(CHUNK))
    with Server(smollm2, log, *INT2, *flags) as s:
        yield s


def test_wide_windows_equal_sglangs_own_cache(smollm2, artifacts, tmp_path):
    """Everything exact: token for token SGLang's float32 run on its own cache."""
    texts = []
    wide = ("--oscar-artifact", str(artifacts["feedback"]), "--oscar-recent-tokens", "512")
    stock = (*COMMON, "--attention-backend", "torch_native")
    for name, flags in (("stock", stock), ("int2", (*INT2, *wide))):
        with Server(smollm2, tmp_path / f"{name}.log", *flags) as s:
            sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
            answers = s.request("/generate", {"text": list(PROMPTS), "sampling_params": sampling})
            texts.append([a["output_ids"] for a in answers])
    assert texts[0] == texts[1]
    assert all(len(ids) == 32 for ids in texts[0])


def next_token_logprobs(response: dict) -> list[dict[int, float]]:
    """Per generated token the top log-probabilities, by token id."""
    meta = response["meta_info"]["output_top_logprobs"]
    return [{token: value for value, token, *_ in step} for step in meta]


def emulate(model, artifact, ids, hist_end):
    """log-softmax rows of transformers reading history [n_sink, hist_end[p]) as codes."""
    from tests.support.quantised_cache import QuantisedCache

    with QuantisedCache(model, artifact, WindowLayout(), hist_end=hist_end), torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def decode_ends(positions: torch.Tensor, recent_start: int = 0) -> torch.Tensor:
    """hist_end of decode steps at ``positions``."""
    return (positions + 1 - 256).clamp_min(recent_start)


def chunk_ends(prefix: int, end: int, recent_start: int = 0) -> torch.Tensor:
    """hist_end of a chunk: what its first token sees; a fresh prompt sees no codes."""
    return torch.full((end - prefix,), max(prefix + 1 - 256, recent_start) if prefix else 0)


@pytest.mark.parametrize("case", ["fresh", "chunked", "prefix hit"])
def test_logprobs_equal_an_independent_emulation(
    server, reference_model, artifacts, documents, case
):
    """Contexts beyond the windows: mean |difference| of the top 20 over 8 steps below 1e-3
    (greedy tokens of the server are teacher-forced into the emulation)."""
    server.flush()
    ids = documents["test_pod_perlfaq4"]
    length = {"fresh": 500, "chunked": 1200, "prefix hit": 600}[case]
    prompt = ids[:length]
    ends, cached = [], 0
    if case == "prefix hit":
        server.generate(prompt[:420])
        ends.append(chunk_ends(0, 420))
    response = server.generate(prompt, 8, return_logprob=True, top_logprobs_num=20)
    if case == "prefix hit":
        # The overlap scheduler may have decoded the first request's token, here the same one.
        cached = response["meta_info"]["cached_tokens"]
        assert cached in (420, 421)
        ends.append(decode_ends(torch.arange(420, cached)))
    for prefix in range(cached, length, CHUNK):
        ends.append(chunk_ends(prefix, min(prefix + CHUNK, length), recent_start=cached))
    ends.append(decode_ends(torch.arange(length, length + 8), recent_start=cached))
    hist_end = torch.cat(ends)
    full = prompt + response["output_ids"]
    artifact = art.load(artifacts["feedback"])
    expected = emulate(reference_model, artifact, full, hist_end)
    exact = emulate(reference_model, artifact, full, hist_end * 0)
    differences, effects = [], []
    for step, top in enumerate(next_token_logprobs(response)):
        tokens = torch.tensor(list(top))
        got = torch.tensor(list(top.values()))
        row = length - 1 + step
        differences.append((got - expected[row, tokens]).abs().mean().item())
        effects.append((got - exact[row, tokens]).abs().mean().item())
    assert sum(differences) / len(differences) < 1e-3, differences
    assert sum(effects) / len(effects) > 1e-2, "the codes must matter for this test to say anything"


def test_prefix_hits_turns_and_sink_cache(server, documents):
    server.flush()
    before = server.state()
    ids = documents["test_prose_secF3"]
    first = server.generate(ids[:350], 20)
    assert first["meta_info"]["cached_tokens"] == 0
    second = server.generate(ids[:300] + ids[700:760])
    assert second["meta_info"]["cached_tokens"] in (300, 301)
    turn = ids[:350] + first["output_ids"] + ids[800:830]
    third = server.generate(turn)
    # The last generated token is in the cache only if the overlap scheduler had fed it back.
    reused = third["meta_info"]["cached_tokens"]
    assert reused in (350 + 19, 350 + 20)
    after = server.state()
    assert after["requests_on_prefix"] - before["requests_on_prefix"] == 2
    assert after["sink_hits"] - before["sink_hits"] == 2 * 64
    assert after["sink_misses"] == before["sink_misses"]
    new = reused + 60 + len(turn) - reused
    assert after["history_tokens"] == pytest.approx(new, abs=3)
    assert after["demoted_tokens"] - before["demoted_tokens"] == pytest.approx(new, abs=3)


def test_sink_cache_of_one_row_still_answers(smollm2, artifacts, documents, tmp_path):
    flags = ("--oscar-artifact", str(artifacts["feedback"]), "--oscar-sink-cache-tokens", "1")
    with Server(smollm2, tmp_path / "log", *INT2, *flags) as s:
        ids = documents["test_prose_secF3"][:400]
        s.generate(ids[:300])
        answer = s.generate(ids, 8)
        state = s.state()
        assert answer["meta_info"]["cached_tokens"] in (300, 301) and len(answer["output_ids"]) == 8
        assert state["sink_misses"] == 63 and state["sink_hits"] == 1


def test_allocated_bytes_agree_with_the_plan(server):
    state = server.state()
    for part, planned in state["planned_bytes"].items():
        assert state["bytes"][part] == pytest.approx(planned, rel=0.01), part
    log = server.log.read_text()
    total = sum(state["bytes"].values()) / 2**30
    assert f"total {total:.3f} GB" in log and "against 23040 B in BF16 (6.40x)" in log


def test_chat_completions_and_errors(server):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = server.request(
        "/v1/chat/completions",
        {"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 0},
    )
    assert "Paris" in answer["choices"][0]["message"]["content"]
    with pytest.raises(urllib.error.HTTPError) as error:
        server.generate([1] * 9000)
    assert error.value.code == 400 and "context length" in error.value.read().decode()


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "open": {"type": "boolean"}},
    "required": ["city", "open"],
    "additionalProperties": False,
}


def constrained(server, **grammar) -> str:
    sampling = {"temperature": 0, "max_new_tokens": 48, **grammar}
    answer = server.request("/generate", {"text": PROMPTS[3], "sampling_params": sampling})
    return answer["text"]


def test_grammars(server):
    """On a CPU as well, where one such request used to end the server."""
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", constrained(server, regex="[0-9]{3}-[0-9]{4}"))
    assert constrained(server, ebnf='root ::= "yes" | "no"') in ("yes", "no")
    texts = [constrained(server, json_schema=json.dumps(SCHEMA))]
    answer = server.request(
        "/v1/chat/completions",
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "Is the library in Bern open? In JSON."}],
            "max_tokens": 48,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
            },
        },
    )
    texts.append(answer["choices"][0]["message"]["content"])
    for text in texts:
        found = json.loads(text)
        assert len(found["city"]) <= 8 and isinstance(found["open"], bool) and len(found) == 2
    with pytest.raises(urllib.error.HTTPError) as error:
        constrained(server, regex="[")
    assert error.value.code == 400
    assert server.generate([1, 2, 3])["output_ids"]
