"""Agent sessions under eviction pressure and hang-ups, on a server that checks every read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from scripts import agent_sim
from scripts.lib.agents import Turn, Workload, ask, compare, kl_bound, plan, probe, report, simulate
from scripts.lib.tiny_models import VOCAB, qwen3
from tests.support.server import Server

pytestmark = pytest.mark.sglang


def sharp(folder: Path) -> Path:
    """A random model whose next token depends on its context: a sharp output head."""
    file = qwen3(folder) / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= 8
    save_file(weights, file, {"format": "pt"})
    return folder


def test_sessions_together_equal_sessions_alone(tmp_path, monkeypatch):
    # Admission counts no more than these tokens of an answer, so that ``long`` can meet at all.
    monkeypatch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "8")
    flags = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--skip-tokenizer-init"]
    flags += ["--max-running-requests", "4", "--max-total-tokens", "450", "--enable-mixed-chunk"]
    flags += ["--chunked-prefill-size", "64", "--oscar-debug-tags"]
    flags += ["--oscar-sink-cache-tokens", "512"]  # as many as slots: no collisions
    flags += ["--oscar-sink-tokens", "8", "--oscar-recent-tokens", "32"]
    # Requests are admitted without room for the answers of those admitted before: any two of
    # ``long`` that meet outgrow the pool, whichever comes how much later.
    flags += ["--schedule-conservativeness", "0"]
    # As many cached tokens must mean the same rows: recomputing would hide what was evicted.
    flags += ["--oscar-prefix-window", "reuse"]
    # Nothing is shared, evicted or abandoned: most turns see the same exact and coded rows.
    same = Workload(sessions=4, systems=4, system_tokens=8, turn_tokens=(4, 12), hangups=0)
    same = replace(same, answer_tokens=(4, 12), top=VOCAB)
    work = Workload(sessions=8, turn_tokens=(8, 40), answer_tokens=(4, 16), top=VOCAB)
    long = replace(same, turns=1, turn_tokens=(60, 70), answer_tokens=(165, 175))
    with Server(sharp(tmp_path / "model"), tmp_path / "log", *flags) as server:
        retracted = simulate(server, long, concurrency=4)
        equal = simulate(server, same, concurrency=4)
        result = simulate(server, work, concurrency=4)
        state = server.state()
        found = agent_sim.from_log(server)["log"]
    print({k: v for k, v in equal.items() if k not in ("workload", "differences")})
    assert equal["corrupt"] == 0 and equal["kl_of_comparable_tokens"]["n"] > 20
    assert equal["kl_of_comparable_tokens"]["max"] < 1e-4
    assert not any(d["comparable"] for d in equal["differences"])
    print({k: v for k, v in result.items() if k != "workload"})
    assert result["turns"] == 32 and result["abandoned"] > 2
    assert result["evicted_turns"] > 0, "the pool was meant to be too small"
    assert result["cached_tokens"] > 0 and result["kl_of_agreeing_tokens"]["n"] > 50
    assert result["corrupt"] == 0, result["differences"]
    assert state["history_tokens"] == 0 and state["debug_tags"]["checked_tokens"] > 1000
    print(found, {k: v for k, v in retracted.items() if k != "workload"})
    assert found["retractions"] > 0 and found["errors"] == []
    assert retracted["corrupt"] == 0, retracted["differences"]


def test_plan_is_replayable():
    assert plan(Workload(seed=3)) == plan(Workload(seed=3)) != plan(Workload(seed=4))


def test_kl_bound():
    a = {1: math.log(0.5), 2: math.log(0.3)}
    assert kl_bound(a, a) == pytest.approx(0)
    b = {1: math.log(0.25), 2: math.log(0.15)}
    assert kl_bound(a, b) == pytest.approx(0.8 * math.log(2) + 0.2 * math.log(0.2 / 0.6))
    other = {7: math.log(0.9), 8: math.log(0.01)}
    assert kl_bound(a, other) > 1
    # A rare token that b's list lacks must not hide that the common one moved.
    a, b = {1: math.log(0.5), 2: math.log(0.01)}, {1: math.log(0.4), 3: math.log(0.02)}
    assert kl_bound(a, b) == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))


class Recorded:
    """A server whose answer to a prompt is a fixed list of log-probabilities."""

    def __init__(self, answers: list[dict[int, float]]) -> None:
        self.answers = answers

    def flush(self) -> None:
        pass

    def generate(self, ids, new_tokens=1, **options):
        if not options:
            return None
        step = [(value, token, None) for token, value in self.answers.pop(0).items()]
        meta = {
            "output_top_logprobs": [step],
            "output_token_logprobs": step[:1],
            "cached_tokens": 0,
        }
        return {"output_ids": [step[0][1]], "meta_info": meta}


SURE = {1: math.log(0.9), 2: math.log(0.05)}
TURNED = {2: math.log(0.9), 1: math.log(0.05)}


@pytest.mark.parametrize(
    "ways, kind",
    [
        ([SURE] * 5, "corrupt"),  # nothing moves it, and yet the sessions differ
        ([SURE, SURE, TURNED, SURE, SURE], "drift"),  # half of it cached gives the same
    ],
)
def test_a_large_difference_is_probed(ways, kind):
    turn = Turn([], 1, None, prompt=list(range(40)), answer=[2], top=[TURNED])
    found, _ = compare(0, 0, turn, [1], [SURE])
    assert found.kl > 1 and found.kind(foreign=5.0) == "corrupt"
    assert probe(Recorded(list(ways)), found, turn, SURE, 2).kind(foreign=5.0) == kind


def test_a_token_without_reported_probabilities():
    """SGLang loses those of the first token of a request that it retracts right after it."""
    step = [(-0.1, 5, None)]
    meta = {"output_top_logprobs": [step], "output_token_logprobs": step, "cached_tokens": 3}
    reply = {"output_ids": [9, 5], "meta_info": meta}
    client = type("", (), {"generate": lambda *_, **__: reply})()
    turn = Turn([], 2, None, prompt=[1])
    assert ask(client, turn, 1) == ([9, 5], [None, {5: -0.1}], 3)
    reply["output_ids"] = [5, 9]
    with pytest.raises(RuntimeError, match="log-probabilities"):
        ask(client, turn, 1)
    turn.answer, turn.top = [9, 5], [None, {5: -0.1}]
    tie, noise = compare(0, 0, turn, [8, 5], [{8: -0.7, 9: -0.75}, {5: -0.1}])
    assert tie.kl is None and noise == [] and tie.kind(foreign=2.0) == "tie"
    for chosen, kind in ((-0.25, "drift"), (-3.0, "corrupt")):
        moved, _ = compare(0, 0, turn, [8, 5], [{8: -0.1, 9: chosen}, {5: -0.1}])
        assert moved.kl is None and moved.kind(foreign=2.0) == kind


CALM = {"history_tokens": 0, "tokens_capacity": 900, "gpu_mb": 4000.0}
TROUBLE = {
    "corrupt": ({"corrupt": 2}, "2 corrupt turns"),
    "slots": ({"after": {**CALM, "history_tokens": 3}}, "3 slots not given back"),
    "capacity": ({"after": {**CALM, "tokens_capacity": 899}}, "capacity"),
    "growth": ({"after": {**CALM, "gpu_mb": 4065.0}}, "grew by 65 MB"),
    "log": ({"log": {"errors": ["Traceback"]}}, "log: Traceback"),
    "time": ({"compared_sessions": 5}, "5 of 6 sessions compared"),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_what_makes_a_soak_fail(name):
    calm = {"corrupt": 0, "before": CALM, "after": {**CALM, "gpu_mb": 4060.0}}
    calm |= {"workload": {"sessions": 6}, "compared_sessions": 6}
    assert agent_sim.problems(calm, growth_mb=64) == []
    change, text = TROUBLE[name]
    (found,) = agent_sim.problems({**calm, **change}, growth_mb=64)
    assert text in found


def test_prompts_from_text():
    text = list(range(1000, 3000))
    for turns in plan(Workload(sessions=3, turn_tokens=(5, 9)), text):
        for turn in turns[1:]:
            assert turn.fresh == list(range(turn.fresh[0], turn.fresh[0] + len(turn.fresh)))


def test_ties_and_foreign_content_are_told_apart():
    alone = {1: math.log(0.41), 2: math.log(0.40)}
    tie = Turn([], 1, None, answer=[2], top=[{2: math.log(0.41), 1: math.log(0.40)}])
    found, _ = compare(0, 0, tie, [1], [alone])
    assert found.gap < 0.03 and found.kl < 0.01
    foreign = Turn([], 1, None, answer=[9], top=[{9: math.log(0.9), 8: math.log(0.05)}])
    other, _ = compare(1, 0, foreign, [1], [alone])
    assert other.gap is None and other.kl > 1
    result = report(Workload(), 1, [[tie], [foreign]], [found, other], {True: [], False: []})
    assert (result["tie"], result["drift"], result["corrupt"]) == (1, 0, 1)
