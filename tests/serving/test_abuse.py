"""Aborts, retraction, flushes: SGLang's own strict checks pass and every slot comes back."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading

import pytest

from tests.support.server import Server

pytestmark = pytest.mark.sglang

FORBIDDEN = ("memory leak detected", "double free", "use-after-free", "hit an exception")


def abandon(server: Server, ids: list[int], seconds: float) -> None:
    """Start a streaming request and hang up."""
    sampling = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    body = json.dumps({"input_ids": ids, "sampling_params": sampling, "stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        s.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            while s.recv(4096):
                pass


@pytest.mark.parametrize(
    "page, rounds, codec", [(1, 10, "feedback"), (16, 4, "feedback"), (128, 2, "omni")]
)
def test_requests_with_aborts_retraction_and_flushes(tiny_llama, tmp_path, page, rounds, codec):
    flags = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--max-running-requests", "8"]
    flags += ["--max-total-tokens", "1500", "--chunked-prefill-size", "128"]
    flags += ["--enable-mixed-chunk", "--load-format", "dummy", "--skip-tokenizer-init"]
    flags += ["--oscar-sink-tokens", "8", "--oscar-recent-tokens", "32", "--oscar-debug-tags"]
    flags += ["--page-size", str(page), "--oscar-codec", codec]
    env = {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    }
    rng = random.Random(0)
    shared = [[rng.randrange(256) for _ in range(150)] for _ in range(3)]

    def prompt():
        return rng.choice(shared) + [rng.randrange(256) for _ in range(rng.randrange(1, 120))]

    with Server(tiny_llama, tmp_path / "log", *flags, env=env) as server:
        capacity = server.state()["tokens_capacity"]
        alone = server.generate(shared[0] + [7, 8, 9], 24)["output_ids"]
        server.flush()
        answers = []
        for _ in range(rounds):
            work = []
            for i in range(10):
                if i % 3 == 2:
                    target, args = abandon, (server, prompt(), rng.uniform(0.05, 0.6))
                else:
                    target = lambda ids, n: answers.append(server.generate(ids, n))  # noqa: E731
                    args = (prompt(), rng.randrange(1, 40))
                work.append(threading.Thread(target=target, args=args))
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
            server.flush()
        assert len(answers) == 7 * rounds
        state = server.state()
        assert state["history_tokens"] == 0 and state["tokens_capacity"] == capacity
        assert state["requests_on_prefix"] > 0
        # The pool is as good as new: the same answer as before the abuse.
        assert server.generate(shared[0] + [7, 8, 9], 24)["output_ids"] == alone
        log = server.log.read_text()
        assert "retract" in log.lower(), "the test was meant to cause retraction"
        for word in FORBIDDEN:
            assert word not in log, server.tail()
