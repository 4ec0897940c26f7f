"""Scenarios that load a server whose memory is the limit: a job over documents, and agents."""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any

from scripts.lib.server import Server
from scripts.lib.shapes import bf16_token_bytes, tokens
from scripts.lib.traffic import (
    Finished,
    answer_ids,
    ask,
    ask_one,
    closed_loop,
    finish,
    load_figures,
)

# Documents of a job over those a BF16 cache would hold: twice what FP8 holds, less than int2 does.
DOCUMENTS_OVER_BF16 = 4
SLACK = 320  # tokens of a request beside its text: a page, and a recent window computed again
HOT_ROUNDS = 2  # questions to each document in the decode-heavy job


def retractions(server: Server) -> int:
    """Requests that lost their memory to others since the start."""
    log = server.log.read_text(errors="replace")
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))


def figures(server: Server, finished: Finished, retracted_before: int) -> dict[str, Any]:
    return {
        **load_figures(finished),
        "retractions": retractions(server) - retracted_before,
        "tokens_held": server.internal_state()["memory_usage"]["token_capacity"],
    }


def job_documents(server: Server, args: argparse.Namespace, context: int, rows: list[dict]) -> int:
    """How many documents the job is about: the same for every cache of a comparison.

    As given, else that of an earlier row under the same conditions, else from the memory of this
    server's cache, which is the same for all caches but for rounding.
    """
    if args.job_documents:
        return args.job_documents[args.job_contexts.index(context)]
    for row in rows:
        same = (row["scenario"], row["model"], row.get("context")) == ("job", args.shape, context)
        if same and row["conditions"]["mem_fraction"] == args.job_mem_fraction:
            return row["conditions"]["documents"]
    memory = server.internal_state()["memory_usage"]["kvcache"] * 2**30
    held = memory / bf16_token_bytes(args.shape, args.layers)
    return max(2, int(DOCUMENTS_OVER_BF16 * held / context))


def job(server: Server, args: argparse.Namespace, rows: list[dict]) -> Iterator[dict]:
    """Fixed memory, many questions about documents that not every cache holds at once.

    "shared": all questions in one shuffled order, a bounded number at a time. Before, untimed, the
    documents are prefilled; only the last that fit, for they are all that a full pass would leave.
    "hot": each request reads a document of its own, all cached, as many as this cache holds.
    """
    for context in args.job_contexts:
        count = job_documents(server, args, context, rows)
        documents = [tokens(context, 1000 + d) for d in range(count)]
        held = server.internal_state()["memory_usage"]["token_capacity"]
        answer = args.job_suffix + max(args.job_tokens, args.hot_tokens)
        fit = max(1, min(count, held // (context + answer + SLACK)))
        server.flush()
        for ids in documents[-fit:]:
            ask_one(server, ids)
        order = [(d, q) for d in range(count) for q in range(args.job_questions)]
        random.Random(5).shuffle(order)
        questions = (
            (documents[d] + tokens(args.job_suffix, 10_000 + d * args.job_questions + q), n)
            for (d, q), n in zip(order, [args.job_tokens] * len(order), strict=True)
        )
        conditions = {
            "documents": count,
            "questions": args.job_questions,
            "suffix": args.job_suffix,
            "new_tokens": args.job_tokens,
            "concurrency": args.job_concurrency,
        }
        before = retractions(server)
        done = closed_loop(server, questions, args.job_concurrency, args.job_seconds)
        row = {"context": context, "variant": "shared", **figures(server, done, before)}
        yield {**row, "primed": fit, "conditions": conditions}
        if args.hot_tokens:
            yield hot_job(server, args, context, documents[-fit:], count)


def hot_job(
    server: Server, args: argparse.Namespace, context: int, documents: list[list[int]], count: int
) -> dict:
    """The decode-heavy job: one stream per document that fits, all of them cached.

    No flush: what the job before left is a hit here, or older than all that is prefilled now.
    """
    documents = documents[: args.hot_streams]
    for ids in documents:
        ask_one(server, ids)
    questions = (
        (ids + tokens(args.job_suffix, 50_000 + len(documents) * q + d), args.hot_tokens)
        for q in range(HOT_ROUNDS)
        for d, ids in enumerate(documents)
    )
    before = retractions(server)
    done = closed_loop(server, questions, len(documents), args.job_seconds)
    return {
        "context": context,
        "variant": "hot",
        **figures(server, done, before),
        "streams": len(documents),
        "conditions": {
            "documents": count,
            "suffix": args.job_suffix,
            "new_tokens": args.hot_tokens,
            "max_streams": args.hot_streams,
        },
    }


def agents(server: Server, args: argparse.Namespace, variant: str, sessions: int) -> dict:
    """Sessions that share a system prompt; each turn adds a message and gets an answer."""
    server.flush()
    system = tokens(args.agents_system, 7)
    outputs: list[Any] = []
    limit = asyncio.Semaphore(args.agents_concurrency)

    async def session(number: int) -> None:
        context = list(system)
        for turn in range(args.agents_turns):
            context += tokens(args.agents_in, 100_000 + number * args.agents_turns + turn)
            async with limit:
                output = await ask(server, context, args.agents_out)
            outputs.append(output)
            context += answer_ids(output)

    before = retractions(server)
    done = finish(server, [session(i) for i in range(sessions)], outputs, args.agents_seconds)
    return {
        "context": args.agents_system,
        "batch": sessions,
        "variant": variant,
        **figures(server, done, before),
        "conditions": {
            "turns": args.agents_turns,
            "message": args.agents_in,
            "new_tokens": args.agents_out,
            "concurrency": args.agents_concurrency,
        },
    }
