"""Two ranks with one KV head each, against one rank with both."""

from __future__ import annotations

import os

import pytest

from scripts.lib import tiny_models
from tests.support.server import Server

pytestmark = pytest.mark.sglang

FLAGS = ["--device", "cpu", "--dtype", "float32", "--kv-cache-dtype", "int2"]
FLAGS += ["--skip-tokenizer-init", "--max-total-tokens", "2000", "--disable-overlap-schedule"]
WINDOWS = ["--oscar-sink-tokens", "4", "--oscar-recent-tokens", "16"]
PROMPTS = [list(range(1, 200)), list(range(1, 150)) + [7] * 40, [5] * 30]


def answers(model, log, ranks: int) -> tuple[list[list[tuple[float, int]]], dict[str, int]]:
    """(logprob, id) of each token, and the cache's bytes; the second prompt continues a cached
    prefix of the first."""
    cores = sorted(os.sched_getaffinity(0))
    env = {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(ranks))
    }
    flags = [*FLAGS, *WINDOWS, "--tp", str(ranks)]
    with Server(model, log, *flags, env=env, timeout=300) as server:
        state = server.state()
        found = [server.generate(p, 12, return_logprob=True)["meta_info"] for p in PROMPTS]
        assert state["bytes"] == state["planned_bytes"]
        # Each rank measures its own heads again, on tokens that all of them agree on.
        body = {"model_path": str(model), "load_format": "auto"}
        assert "recalibrated" in server.request("/update_weights_from_disk", body)["message"]
        found += [server.generate(p, 12, return_logprob=True)["meta_info"] for p in PROMPTS]
        return [[(x[0], x[1]) for x in f["output_token_logprobs"]] for f in found], state["bytes"]


def test_two_ranks_answer_like_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    model = tiny_models.llama(tmp_path / "model")
    one, whole = answers(model, tmp_path / "one.log", 1)
    two, share = answers(model, tmp_path / "two.log", 2)
    assert share["history"] * 2 == whole["history"] and share["windows"] * 2 == whole["windows"]
    for a, b in zip(one, two, strict=True):
        assert [token for _, token in a] == [token for _, token in b]
        assert max(abs(x - y) for (x, _), (y, _) in zip(a, b, strict=True)) < 2e-3
