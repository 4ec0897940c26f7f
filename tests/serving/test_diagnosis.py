"""A server that must be looked into: a dump of what its requests hold, and a killed scheduler."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from oscar_sglang.events import read_events
from scripts.lib.server import Server
from scripts.lib.tiny_models import qwen3

pytestmark = pytest.mark.sglang

FLAGS = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--skip-tokenizer-init"]
FLAGS += ["--max-total-tokens", "4096", "--max-running-requests", "4"]
FLAGS += ["--oscar-sink-tokens", "8", "--oscar-recent-tokens", "32"]


def scheduler_of(server: Server) -> psutil.Process:
    (found,) = [
        p
        for p in psutil.Process(server.process.pid).children(recursive=True)
        if "scheduler" in " ".join(p.cmdline())
    ]
    return found


def test_dump_then_kill_then_start_again(tmp_path):
    """One server: a running request is dumped, then its scheduler dies by SIGKILL. The client gets
    an error and the server ends, both within a minute; the next start, on the same cache directory,
    finds the artifact and serves."""
    model = qwen3(tmp_path / "model")
    env = {"OSCAR_SGLANG_CACHE": str(tmp_path / "cache"), "OSCAR_SGLANG_DUMP": str(tmp_path / "d")}
    prompt = [5 + i % 200 for i in range(100)]
    outcome: list[object] = []

    def client(server: Server) -> None:
        try:
            outcome.append(server.generate(prompt, 3000))
        except Exception as error:  # reset, HTTP 500 or an empty reply, as uvicorn dies
            outcome.append(error)

    with Server(model, tmp_path / "first.log", *FLAGS, env=env) as server:
        thread = threading.Thread(target=client, args=(server,))
        thread.start()
        deadline = time.monotonic() + 120
        while not (dumped := server.state().get("dumped")):
            assert time.monotonic() < deadline, server.tail()
        found = np.load(tmp_path / "d" / dumped[0])
        length = int(found["length"])
        assert found["tokens"][:100].tolist() == prompt[:length] and length >= 100
        segments = np.bincount(found["segment"], minlength=3).tolist()
        assert segments == [8, length - 8 - 31, 31]
        assert len(set(found["slots"].tolist())) == length
        assert np.isfinite(found["k"]).all() and found["k"].shape == (1, length, 2, 128)
        assert not outcome, "the request was meant to be running"

        family = psutil.Process(server.process.pid).children(recursive=True)
        os.kill(scheduler_of(server).pid, signal.SIGKILL)
        assert server.process.wait(timeout=60) != 0
        assert not psutil.wait_procs(family, timeout=30)[1], "a process of the server stayed"
        thread.join(timeout=60)
        assert not thread.is_alive() and isinstance(outcome[0], Exception), outcome
    events = {e["event"]: e for e in read_events((tmp_path / "first.log").read_text())}
    assert events["artifact"]["how"] == "calibrated" and events["pool"]["codec"] == "feedback"
    assert int(events["dump"]["tokens"]) >= 100

    with Server(model, tmp_path / "second.log", *FLAGS, env=env) as server:
        assert len(server.generate(prompt, 4)["output_ids"]) == 4
    again = {e["event"]: e for e in read_events((tmp_path / "second.log").read_text())}
    assert again["artifact"]["how"] == "found"
    assert again["artifact"]["file"] == events["artifact"]["file"]
