"""Scenarios with nothing else on the server: fresh prefill, decode, and a turn on a long prefix."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import numpy as np

from scripts.lib.server import Server
from scripts.lib.shapes import UNUSED_TOKEN, tokens
from scripts.lib.traffic import ask_one, ask_together, tpot_figures

DOCUMENT = 1  # seed of the document whose prefixes are the contexts


def prefill(server: Server, args: argparse.Namespace) -> Iterator[dict]:
    """Tokens per second of a fresh prompt; the first one warms up."""
    n = args.prefill_tokens
    fresh = [ask_one(server, tokens(n, 100 + i)).ttft for i in range(args.repeats + 1)][1:]
    rate = n / statistics.median(fresh)
    yield {"context": n, "batch": 1, "tokens_per_s": round(rate), "conditions": {}}


def decode(server: Server, args: argparse.Namespace) -> Iterator[dict]:
    """Time per output token of equal streams whose prompt is a full prefix hit.

    Many streams start one after the other, so they get more tokens, and only the time in which all
    of them were decoding counts.
    """
    document = tokens(max(context for context, _ in args.decode), DOCUMENT)
    for context, batch in args.decode:
        ids = document[:context]
        ask_one(server, ids)  # fills the prefix cache
        new_tokens = args.decode_tokens + 4 * batch * (batch > 1)
        repeats = args.repeats if batch == 1 else 1
        runs = [ask_together(server, [ids] * batch, new_tokens) for _ in range(repeats)]
        ttft = statistics.median(o.ttft for run in runs for o in run)
        yield {
            "context": context,
            "batch": batch,
            **tpot_figures(runs),
            "ttft_ms": round(ttft * 1e3, 2),
            "conditions": {"new_tokens": new_tokens},
        }


def ttft(server: Server, args: argparse.Namespace) -> Iterator[dict]:
    """Time to the first token of turns of a few lengths on a cached prefix."""
    prefix = tokens(args.ttft_context, DOCUMENT)
    ask_one(server, prefix)
    distinct = iter(range(UNUSED_TOKEN, UNUSED_TOKEN + 1000))  # no turn starts like another
    for turn in args.ttft_turns:
        outputs = [
            ask_one(server, [*prefix, next(distinct), *tokens(turn - 1, 200 + i)])
            for i in range(args.ttft_repeats + 1)
        ][1:]
        times = np.array([o.ttft * 1e3 for o in outputs])
        yield {
            "context": args.ttft_context,
            "batch": 1,
            "turn": turn,
            "ttft_ms": round(float(np.median(times)), 2),
            "ttft_mad_ms": round(float(np.median(np.abs(times - np.median(times)))), 2),
            "cached_tokens": statistics.median(o.cached_tokens for o in outputs),
            "conditions": {"repeats": args.ttft_repeats},
        }
