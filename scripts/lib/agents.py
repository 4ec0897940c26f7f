"""Agent sessions on token ids: many at once, then each alone, and where the two differ.

A session is a shared system prompt, then turns of fresh tokens (the user, a tool's result), each
answered greedily; every turn's prompt is the whole conversation so far. The run alone replays the
recorded prompts on an empty cache, so every turn can be compared, also after one that differs.

A prefix hit reads 2-bit history where a fresh prefill reads exact rows, so logits move with what
was cached. A turn is *comparable* while its session hit as many tokens in both runs: there nothing
but float rounding may move, unless a prompt was cut into other chunks or its request retracted.
Elsewhere the yardstick is how far a foreign session's context moves
the logits; a difference is then

    tie      KL far below foreign, and the two tokens were almost equally likely
    drift    KL far below foreign: another mix of exact and 2-bit rows; or further away, where one
             request alone is moved as far by caching more or less of the same tokens
    corrupt  anything else

SGLang loses the log-probabilities of a token on retraction; then the gap between the two tokens
stands for KL (reports count such tokens as ``unreported_tokens``).
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

from scripts.lib.server import Client

# "Far below": at most this share of the median KL between different sessions.
FOREIGN_SHARE = 0.1
TIE_NATS = 0.1


@dataclass(frozen=True)
class Workload:
    """What is sent. Lengths in tokens; everything follows from ``seed``."""

    sessions: int = 8
    turns: int = 4
    systems: int = 2
    system_tokens: int = 64
    turn_tokens: tuple[int, int] = (8, 48)
    answer_tokens: tuple[int, int] = (4, 24)
    hangups: float = 0.2  # share of turns that are first abandoned by their client
    vocab: int = 256
    top: int = 20  # log-probabilities compared per token
    seed: int = 0


@dataclass
class Turn:
    """One request of a session; ``prompt`` and ``answer`` are filled by the run."""

    fresh: list[int]
    new_tokens: int
    hangup_after: int | None  # events of the stream
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    top: list[dict[int, float] | None] = field(default_factory=list)
    cached: int = 0


@dataclass(frozen=True)
class Difference:
    """The first token of a turn that differs from the run alone. All in nats.

    kl     lower bound of KL(alone || together) from the top tokens; None: not all were reported
    gap    between the best token alone and the one chosen together (None: not among the top)

    Of a large difference (see ``probe``):

    nearest  smallest KL from any way of caching the same tokens to what was seen together
    widest   largest KL between two such ways
    """

    session: int
    turn: int
    token: int
    kl: float | None
    gap: float | None
    comparable: bool = False
    nearest: float | None = None
    widest: float | None = None

    def kind(self, foreign: float) -> str:
        limit = FOREIGN_SHARE * foreign
        # KL unknown: the gap stands for it, since no KL above the gap is needed to turn the choice.
        moved = self.gap if self.kl is None else self.kl
        if self.gap is not None and moved <= limit:
            return "tie" if self.gap <= TIE_NATS else "drift"
        if self.nearest is not None and (self.nearest <= limit or self.widest >= self.kl):
            return "drift"
        return "corrupt"


def plan(w: Workload, text: list[int] | None = None) -> list[list[Turn]]:
    """The sessions of a workload: of random tokens, or of pieces of ``text``."""
    rng = random.Random(w.seed)

    def tokens(n: int) -> list[int]:
        if text is None:
            return [rng.randrange(3, w.vocab) for _ in range(n)]
        start = rng.randrange(len(text) - n + 1)
        return text[start : start + n]

    systems = [tokens(w.system_tokens) for _ in range(w.systems)]
    sessions = []
    for i in range(w.sessions):
        turns = []
        for t in range(w.turns):
            fresh = tokens(rng.randint(*w.turn_tokens))
            hangup = rng.randrange(4) if rng.random() < w.hangups else None
            system = systems[i % w.systems] if t == 0 else []
            turns.append(Turn(system + fresh, rng.randint(*w.answer_tokens), hangup))
        sessions.append(turns)
    return sessions


def ask(client: Client, turn: Turn, top: int) -> tuple[list[int], list[dict], int]:
    """Answer, top log-probabilities of each of its tokens, cached prompt tokens."""
    options = {"return_logprob": True, "top_logprobs_num": top}
    reply = client.generate(turn.prompt, turn.new_tokens, **options)
    meta = reply["meta_info"]
    steps = [{t: value for value, t, *_ in step} for step in meta["output_top_logprobs"]]
    ids, named = reply["output_ids"], [t for _, t, *_ in meta["output_token_logprobs"]]
    missing = len(ids) - len(steps)  # SGLang loses the first of a request retracted right after it
    if named != ids[missing:] or missing < 0:
        raise RuntimeError(f"log-probabilities of {named} for the answer {ids}")
    return ids, [None] * missing + steps, meta["cached_tokens"]


def hang_up(client: Client, prompt: list[int], new_tokens: int, events: int) -> None:
    """Start a streaming request and close the connection after so many events."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=300)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/generate", json.dumps(body), headers)
    if events:
        response = connection.getresponse()
        for _ in range(2 * events):  # each event is followed by an empty line
            response.readline()
    connection.close()


def run_session(client: Client, turns: list[Turn], top: int) -> None:
    """Fill in prompts and answers, turn by turn."""
    context: list[int] = []
    for turn in turns:
        turn.prompt = context + turn.fresh
        if turn.hangup_after is not None:
            hang_up(client, turn.prompt, turn.new_tokens, turn.hangup_after)
        turn.answer, turn.top, turn.cached = ask(client, turn, top)
        context = turn.prompt + turn.answer


def kl_bound(a: dict[int, float], b: dict[int, float]) -> float:
    """Lower bound of KL(a || b) of two top lists: what only one of them names is one bucket; or,
    where that says more, a token that is missing in b's list has at most the probability of its
    last entry."""
    common, last = a.keys() & b.keys(), min(b.values())

    def rest(mass_a: float) -> float:
        left_a = max(1 - mass_a, 1e-9)
        left_b = max(1 - sum(math.exp(b[t]) for t in common), 1e-9)
        return left_a * math.log(left_a / left_b)

    mass = {t: math.exp(p) for t, p in a.items()}
    shared = sum(mass[t] * (a[t] - b[t]) for t in common)
    only_a = sum(mass[t] * (a[t] - last) for t in a.keys() - common)
    coarse = shared + rest(sum(mass[t] for t in common))
    return max(0.0, coarse, shared + only_a + rest(sum(mass.values())))


def foreign_kl(sessions: list[list[Turn]]) -> float:
    """Median KL between the first tokens of different sessions at the same turn."""
    pairs = [
        kl_bound(a[t].top[0], b[t].top[0])
        for a, b in itertools.permutations(sessions, 2)
        for t in range(len(a))
        if a[t].top[0] is not None and b[t].top[0] is not None
    ]
    return statistics.median(pairs) if pairs else math.inf


def compare(
    session: int, number: int, together: Turn, answer: list[int], top: list[dict[int, float]]
) -> tuple[Difference | None, list[float]]:
    """First difference of a turn from ``answer`` alone, and the KL at the tokens before it."""
    noise = []
    for i, (mine, alone) in enumerate(zip(together.answer, answer, strict=True)):
        here, known = top[i], top[i] is not None and together.top[i] is not None
        kl = kl_bound(here, together.top[i]) if known else None
        if mine != alone:
            gap = here[alone] - here[mine] if here and mine in here else None
            return Difference(session, number, i, kl, gap), noise
        if known:
            noise.append(kl)
    return None, noise


def probe(client: Client, found: Difference, together: Turn, alone: dict, top: int) -> Difference:
    """``found`` with ``nearest`` and ``widest``: the same tokens, one request at a time, with none
    to nearly all of them cached before."""
    ids = together.prompt + together.answer[: found.token]
    ways = [alone]
    for cached in (0, len(ids) // 4, len(ids) // 2, 3 * len(ids) // 4, len(ids) - 4):
        client.flush()
        if cached > 0:
            client.generate(ids[:cached])
        ways += ask(client, Turn([], 1, None, prompt=ids), top)[1]
    nearest = min(kl_bound(w, together.top[found.token]) for w in ways)
    widest = max(kl_bound(a, b) for a, b in itertools.permutations(ways, 2))
    return replace(found, nearest=nearest, widest=widest)


def simulate(
    client: Client,
    w: Workload,
    concurrency: int,
    say: Callable[[str], None] = lambda _: None,
    text: list[int] | None = None,
    seconds: float | None = None,
) -> dict:
    """Run a workload, then every session alone on an empty cache; a JSON-ready report.

    seconds  after the start no further session is compared (``compared_sessions`` says how many)
    """
    started, compared = time.monotonic(), 0
    sessions = plan(w, text)
    client.flush()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda turns: run_session(client, turns, w.top), sessions))
    say(f"{w.sessions} sessions together: done")
    foreign = foreign_kl(sessions)
    differences, noise = [], {True: [], False: []}
    for s, turns in enumerate(sessions):
        if seconds is not None and time.monotonic() - started > seconds:
            break
        compared += 1
        client.flush()
        comparable, large = True, []
        for t, turn in enumerate(turns):
            answer, top, cached = ask(client, turn, w.top)
            comparable &= cached == turn.cached
            difference, kls = compare(s, t, turn, answer, top)
            noise[comparable] += kls
            if difference:
                difference = replace(difference, comparable=comparable)
                if difference.kl is not None and difference.kind(foreign) == "corrupt":
                    large.append((difference, turn, top[difference.token]))
                else:
                    differences.append(difference)
        differences += [probe(client, *found, w.top) for found in large]
        say(f"session {s} alone: {sum(d.session == s for d in differences)} turns differ")
    client.flush()
    found = report(w, concurrency, sessions, differences, noise, *matching(client))
    return found | {"compared_sessions": compared}


def matching(client: Client) -> tuple[int, int]:
    """Tokens at the end of a prompt that are computed although they are cached, page size."""
    state = client.internal_state()
    oscar = state.get("oscar", {})
    tail = oscar["recent_tokens"] if oscar.get("prefix_window") == "recompute" else 0
    return tail, state["page_size"]


def spread(values: list[float]) -> dict[str, float]:
    n, values = len(values), sorted(values) or [0.0]
    top = values[int(0.99 * (len(values) - 1))]
    return {"n": n, "mean": statistics.fmean(values), "p99": top, "max": values[-1]}


def report(w, concurrency, sessions, differences, noise, tail: int = 0, page: int = 1) -> dict:
    again = [(a, b) for turns in sessions for a, b in zip(turns, turns[1:], strict=False)]
    whole = [min(len(a.prompt), len(b.prompt) - tail) // page * page for a, b in again]
    prompt = sum(len(t.prompt) for turns in sessions for t in turns)
    foreign = foreign_kl(sessions)
    kinds = [d.kind(foreign) for d in differences]
    # Later turns of a session contain the answers of earlier ones, also those that differ.
    first = {d.session: d for d in sorted(differences, key=lambda d: -d.turn)}
    return {
        "workload": asdict(w),
        "concurrency": concurrency,
        "turns": sum(map(len, sessions)),
        "abandoned": sum(t.hangup_after is not None for turns in sessions for t in turns),
        "prompt_tokens": prompt,
        "cached_tokens": sum(t.cached for turns in sessions for t in turns),
        # Turns whose own conversation had partly been evicted.
        "evicted_turns": sum(b.cached < n for (_, b), n in zip(again, whole, strict=True)),
        "kl_of_agreeing_tokens": spread(noise[False]),
        "kl_of_comparable_tokens": spread(noise[True]),
        "kl_of_foreign_sessions": foreign,
        "unreported_tokens": sum(x is None for turns in sessions for t in turns for x in t.top),
        "differing_sessions": len(first),
        "kl_at_first_differing_token": spread([d.kl for d in first.values() if d.kl is not None]),
        **{kind: kinds.count(kind) for kind in ("tie", "drift", "corrupt")},
        "differences": [
            {**asdict(d), "kind": kind} for d, kind in zip(differences, kinds, strict=True)
        ],
    }
