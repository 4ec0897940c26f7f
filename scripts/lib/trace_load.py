"""Users in closed loop, each replaying recorded sessions, and what they see."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.lib.agent_traces import Session
from scripts.lib.server import Client
from scripts.lib.traffic import ask, sglang_client

FIRST_PART = 2 / 3  # of a session, in which a user may start


@dataclass(frozen=True)
class Load:
    """What is asked of a server. Times in seconds."""

    users: int
    think: float = 5.0  # at most, between an answer and the next request
    warmup: float = 45.0
    window: float = 50.0
    drain: float = 120.0  # after the window, for requests that began within it
    max_new_tokens: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class Slo:
    """What a user must be given: 95% of the requests are this good."""

    ttft: float = 2.0  # seconds to the first token
    tokens_per_s: float = 20.0  # of one user, after it


@dataclass
class Seen:
    """One answered request; ``cold``: the first of its session, whose prefix nobody had."""

    output: Any
    cold: bool

    @property
    def end(self) -> float:
        return self.output.start_time + self.output.latency


def walk(sessions: list[Session], load: Load, user: int) -> Iterator[tuple[Session, int, bool]]:
    """(session, request, first of it?) without end: a session from somewhere in its first part,
    then others from their start. No two users are on the same session, if there are enough."""
    order = list(sessions)
    random.Random(load.seed).shuffle(order)
    rng = random.Random(f"{load.seed} {user}")
    for turn in itertools.count():
        session = order[(user + turn * load.users) % len(order)]
        start = rng.randrange(max(1, int(len(session.requests) * FIRST_PART))) if not turn else 0
        for number in range(start, len(session.requests)):
            yield session, number, number == start


def run(client: Client, sessions: list[Session], load: Load) -> dict[str, Any]:
    """Replay for warm-up and window, then let what began in the window end; its figures."""
    sglang_client()  # its import takes seconds, which are not the server's
    seen: list[Seen] = []
    start = time.perf_counter()
    close = start + load.warmup + load.window

    async def user(number: int) -> None:
        for session, request, first in walk(sessions, load, number):
            if not first:
                await asyncio.sleep(min(load.think, session.requests[request].wait))
            if time.perf_counter() >= close:
                return
            new_tokens = min(load.max_new_tokens, session.requests[request].new_tokens)
            ids = session.prompt(request)
            seen.append(Seen(await ask(client, ids, new_tokens), first))

    async def everybody() -> int:
        tasks = [asyncio.ensure_future(user(i)) for i in range(load.users)]
        limit = load.warmup + load.window + load.drain
        done, pending = await asyncio.wait(
            tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
        return len(pending)

    unfinished = asyncio.run(everybody())
    if unfinished:
        client.abort_all()
    return {**figures(seen, start + load.warmup, load), "unfinished": unfinished}


def figures(seen: list[Seen], opened: float, load: Load) -> dict[str, Any]:
    """Throughput counts what ended in the window; latencies are of what began in it, without a
    session's first request. Without any such request a latency is None."""
    closed = opened + load.window
    ended = [s.output for s in seen if opened <= s.end < closed]
    began = [s.output for s in seen if opened <= s.output.start_time < closed and not s.cold]
    prompt, cached = (sum(getattr(o, k) for o in began) for k in ("prompt_len", "cached_tokens"))
    long = [o for o in began if o.output_len > 1]
    ttft = [o.ttft for o in began]
    tpot = [(o.latency - o.ttft) / (o.output_len - 1) * 1e3 for o in long]
    return {
        "users": load.users,
        "requests_ended": len(ended),
        "requests_timed": len(began),
        "requests_cold": sum(s.cold for s in seen),
        "requests_per_s": round(len(ended) / load.window, 4),
        "prompt_tokens_per_s": round(sum(o.prompt_len for o in ended) / load.window, 1),
        "output_tokens_per_s": round(sum(o.output_len for o in ended) / load.window, 2),
        "cache_hit_rate": round(cached / prompt, 4) if prompt else None,
        **{f"ttft_p{q}_s": _percentile(ttft, q, 4) for q in (50, 95)},
        **{f"tpot_p{q}_ms": _percentile(tpot, q, 3) for q in (50, 95)},
    }


def _percentile(values: list[float], q: int, digits: int) -> float | None:
    return round(float(np.percentile(values, q)), digits) if values else None


def keeps(row: dict[str, Any], slo: Slo) -> bool:
    """Whether every user was served as promised; not where something was never answered."""
    ttft, tpot = row["ttft_p95_s"], row["tpot_p95_ms"]
    if row["unfinished"] or ttft is None or tpot is None:
        return False
    return ttft <= slo.ttft and tpot * slo.tokens_per_s <= 1000


def users_at_slo(rows: list[dict[str, Any]]) -> int:
    """The most users of one cache for whom, and for all smaller numbers, the promise is kept."""
    kept = itertools.takewhile(lambda r: r["slo"], sorted(rows, key=lambda r: r["users"]))
    return max((r["users"] for r in kept), default=0)


def price(row: dict[str, Any], per_hour: float) -> dict[str, float | None]:
    """Per million tokens: of answers, and of prompts and answers."""
    output, prompt = row["output_tokens_per_s"], row["prompt_tokens_per_s"]
    both = {"price_per_m_output": output, "price_per_m_tokens": output + prompt}
    return {k: round(per_hour / 3600 / v * 1e6, 4) if v else None for k, v in both.items()}
