"""The same requests to differently configured servers, and how far their answers lie apart.

Every request decodes a token that it is forced to (by a logit bias), so that answers stay
comparable step by step however different they are; compared is the distribution over the other
tokens.
"""

from __future__ import annotations

import math
import statistics
from itertools import combinations

from scripts.lib.server import Client

FORCE = 60.0  # logits of other tokens never differ by that much
LENGTHS = (700, 63, 64, 65, 319, 320, 321, 450)  # around the sinks' and the windows' ends
STEPS, LONG_STEPS = 8, 280  # LONG_STEPS: once around the ring of recent tokens
SHARED, TURN = 480, 60

Distribution = dict[int, float]  # token -> log-probability, over the tokens it has
Answer = list[Distribution]  # one a decode step


def ask(
    client: Client, prompts: list[list[int]], forced: list[int], steps: int, top: int, adapters
) -> tuple[list[Answer], list[int]]:
    """One batch: the answers, and how many tokens of each prompt were cached."""
    sampling = [
        dict(temperature=0, max_new_tokens=steps, ignore_eos=True, logit_bias={str(t): FORCE})
        for t in forced
    ]
    body = dict(input_ids=prompts, sampling_params=sampling)
    body |= dict(return_logprob=True, top_logprobs_num=top + 1)
    if any(adapters):
        body["lora_path"] = adapters
    answers, cached = [], []
    for token, result in zip(forced, client.request("/generate", body), strict=True):
        info = result["meta_info"]
        assert result["output_ids"] == [token] * steps, "the token was not forced"
        cached.append(info["cached_tokens"])
        answers.append(
            [{t: p for p, t, *_ in step if t != token} for step in info["output_top_logprobs"]]
        )
    return answers, cached


def traffic(
    client: Client, ids: list[int], top: int, names: tuple[str | None, ...] = (None,)
) -> dict:
    """Case -> {"answers", "cached"}. ``ids``: tokens to cut prompts from."""
    # An offset of their own for each: no prompt begins like another.
    prompts = [ids[31 * i : 31 * i + n] for i, n in enumerate(LENGTHS)]
    forced = [ids[-1 - i] for i in range(len(prompts))]
    adapters = [names[i % len(names)] for i in range(len(prompts))]
    cases = {}

    def case(name, prompts, forced, steps, adapters):
        answers, cached = ask(client, prompts, forced, steps, top, adapters)
        cases[name] = {"answers": answers, "cached": cached}

    tail = ids[-TURN:]
    hits = [prompts[0][:SHARED] + tail[:40], prompts[7][: SHARED // 2] + tail[40:]]
    hit = hits, [forced[1], forced[2]], STEPS, [adapters[0], adapters[7]]
    case("fresh", prompts, forced, STEPS, adapters)
    case("hit", *hit)
    case("turn", [prompts[0] + [forced[0]] * STEPS + tail], [forced[3]], STEPS, adapters[:1])
    case("long", [ids[500:800]], [forced[4]], LONG_STEPS, adapters[:1])
    client.flush()
    case("again", *hit)  # what was a prefix hit, computed afresh
    return cases


def divergence(exact: Distribution, other: Distribution) -> float:
    """KL(exact || other) over the tokens that both have; inf if they share none."""
    tokens = exact.keys() & other.keys()
    if not tokens:
        return math.inf
    p, q = ({t: d[t] for t in tokens} for d in (exact, other))
    norm_p, norm_q = (math.log(sum(map(math.exp, shifted(d)))) + max(d.values()) for d in (p, q))
    return sum(math.exp(p[t] - norm_p) * (p[t] - norm_p - q[t] + norm_q) for t in tokens)


def shifted(distribution: Distribution) -> list[float]:
    most = max(distribution.values())
    return [x - most for x in distribution.values()]


def compare(exact: dict, other: dict, cases: list[str]) -> dict:
    """Figures over the requests of ``cases``; ``worst`` is the request whose median step is."""
    medians, divergences, agreed = {}, [], []
    for name in cases:
        pairs = zip(exact[name]["answers"], other[name]["answers"], strict=True)
        for i, (a, b) in enumerate(pairs):
            kl = [divergence(p, q) for p, q in zip(a, b, strict=True)]
            agreed += [max(p, key=p.get) == max(q, key=q.get) for p, q in zip(a, b, strict=True)]
            medians[f"{name} {i}"] = statistics.median(kl)
            divergences += kl
    worst = max(medians, key=medians.get)
    return {
        "worst": medians[worst],
        "worst_request": worst,
        "mean": statistics.mean(divergences),
        "max": max(divergences),
        "top1": statistics.mean(agreed),
        "steps": len(divergences),
    }


def spread(exact: dict) -> float:
    """Median KL between answers to different prompts: what unrelated distributions give."""
    first = [answer[0] for answer in exact["fresh"]["answers"]]
    return statistics.median(divergence(p, q) for p, q in combinations(first, 2))
