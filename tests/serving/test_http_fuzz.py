"""Malformed, oversized and absurd requests: refused one by one, and the pool is as it was."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request

import pytest

from tests.support.server import Server

pytestmark = pytest.mark.sglang
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
ABSURD = (None, -1, 0, 2**40, 1e308, "", "x" * 10_000, [], [[]], {}, {"a": {}}, True, [None], [-1])


def send(server: Server, body: bytes) -> int:
    """HTTP status of a raw body."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/generate",
        data=body,
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def bodies(rng: random.Random):
    """A good request, damaged in one place."""
    good = {"input_ids": [5, 6, 7], "sampling_params": dict(GREEDY)}
    for value in ABSURD:
        # SGLang does not check these two: an empty prompt in a batch fails in its rotary embedding,
        # an id outside the vocabulary in its token embedding, both before any attention.
        if value not in ([[]], [-1]):
            yield json.dumps({**good, "input_ids": value}).encode()
        yield json.dumps({**good, "sampling_params": value}).encode()
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_new_tokens"):
        for value in rng.sample(ABSURD, 4):
            yield json.dumps({**good, "sampling_params": {**GREEDY, name: value}}).encode()
    text = json.dumps(good).encode()
    for _ in range(15):
        cut = bytearray(text)
        cut[rng.randrange(len(cut))] = rng.randrange(256)
        yield bytes(cut[: rng.randrange(1, len(cut) + 1)])
    yield json.dumps({**good, "input_ids": [9] * 5000}).encode()  # longer than the context


def test_fuzzed_requests_leave_the_pool_intact(tiny_llama, tmp_path):
    flags = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--max-running-requests", "4"]
    flags += ["--max-total-tokens", "2000", "--load-format", "dummy", "--skip-tokenizer-init"]
    flags += ["--oscar-sink-tokens", "8", "--oscar-recent-tokens", "32", "--oscar-debug-tags"]
    prompt = list(range(3, 120))
    with Server(tiny_llama, tmp_path / "log", *flags) as server:
        before = server.generate(prompt, 16)["output_ids"]
        server.flush()
        codes = []
        for body in bodies(random.Random(0)):
            try:
                codes.append(send(server, body))
            except OSError as error:
                pytest.fail(f"{body[:200]} broke the server: {error}")
        assert server.process.poll() is None, server.tail()
        assert sum(code >= 400 for code in codes) > 30, codes
        server.flush()
        assert server.state()["history_tokens"] == 0
        assert server.generate(prompt, 16)["output_ids"] == before
        assert "OwnershipError" not in server.log.read_text()
