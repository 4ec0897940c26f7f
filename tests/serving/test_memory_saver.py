"""/release_memory_occupation and /resume_memory_occupation: rows may be lost, constants may not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from scripts.lib import tiny_models
from tests.support.server import Server

pytestmark = pytest.mark.sglang

EMULATION = Path(__file__).parents[1] / "memory_saver"
FLAGS = ["--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init", "--oscar-debug-tags"]
FLAGS += ["--kv-cache-dtype", "int2", "--oscar-sink-tokens", "4", "--oscar-recent-tokens", "16"]
FLAGS += ["--max-total-tokens", "1500", "--max-running-requests", "2", "--chunked-prefill-size"]
FLAGS += ["128", "--enable-memory-saver"]
# The second continues a cached prefix, whose exact sink comes back from the sink cache.
PROMPTS = [list(range(1, 200)), list(range(1, 200)) + [7] * 40, [5] * 30]


def answers(server: Server) -> list:
    found = [server.generate(p, 12, return_logprob=True)["meta_info"] for p in PROMPTS]
    return [m["output_token_logprobs"] for m in found]


@pytest.mark.parametrize("codec, returns", [("feedback", "zeros"), ("compact", "rubbish")])
def test_a_release_and_a_resume_change_no_answer(tmp_path, monkeypatch, codec, returns):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    path = os.pathsep.join(filter(None, [str(EMULATION), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "OSCAR_TEST_MEMORY": returns}
    model = tiny_models.llama(tmp_path / "model")
    log, flags = tmp_path / "log", [*FLAGS, "--oscar-codec", codec]
    with Server(model, log, *flags, env=env) as server:
        before, state = answers(server), server.state()
        assert state["sink_hits"] > 0
        for _ in range(2):
            server.request("/release_memory_occupation", {"tags": ["kv_cache"]})
            server.request("/resume_memory_occupation", {"tags": ["kv_cache"]})
            assert answers(server) == before
        after = server.state()
        # Counted on, not begun anew: a counter of /metrics never goes back.
        assert after["sink_hits"] == 3 * state["sink_hits"]
        assert after["sink_misses"] == 3 * state["sink_misses"]
        text = log.read_text(errors="replace")
        lost = int(re.search(r"memory saver: kv_cache lost (\d+) bytes", text)[1])
    parts = state["bytes"]
    rows = parts["history"] + parts["windows"] + parts["sink_cache"] + parts["scratch"]
    assert lost > 0.99 * rows, "the emulation threw nothing away"
