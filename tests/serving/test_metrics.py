"""/metrics, /server_info and the decode log tell the same, and add up."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

from oscar_sglang.kernels.layout import WindowLayout
from oscar_sglang.kernels.reference import history_end
from oscar_sglang.plugin.metrics import COUNTERS, GAUGES, window_tokens
from tests.support.server import Server

pytestmark = pytest.mark.sglang
SINK, RECENT, CAPACITY = 8, 32, 2000


@pytest.fixture(scope="module")
def server(tiny_llama, tmp_path_factory):
    flags = ["--kv-cache-dtype", "int2", "--dtype", "float32", "--max-running-requests", "4"]
    flags += ["--max-total-tokens", str(CAPACITY), "--load-format", "dummy"]
    flags += ["--skip-tokenizer-init", "--enable-metrics", "--decode-log-interval", "8"]
    flags += ["--oscar-sink-tokens", str(SINK), "--oscar-recent-tokens", str(RECENT)]
    flags += ["--oscar-prefix-window", "reuse"]
    log = tmp_path_factory.mktemp("metrics") / "log"
    with Server(tiny_llama, log, *flags) as s:
        yield s


def scrape(server: Server) -> dict[str, float]:
    """Samples named oscar:*, keyed by name or by segment."""
    found = {}
    for line in server.request("/metrics/").splitlines():
        if match := re.match(r"oscar:(\w+)\{(.*)\} (\S+)$", line):
            name, labels, value = match.groups()
            assert 'model_name="' in labels and 'tp_rank="0"' in labels, line
            if segment := re.search(r'segment="(\w+)"', labels):
                name = f"{name}/{segment[1]}"
            assert name not in found, f"two samples of {name}"
            found[name] = float(value)
    return found


def agree(samples: dict[str, float], state: dict) -> None:
    assert {n: samples[n] for n in GAUGES} == {n: state[n] for n in GAUGES}
    counters = {n: samples.get(n + "_total", 0) for n in COUNTERS}
    assert counters == {n: state[n] for n in COUNTERS}
    prefix = "segment_bytes/"
    segments = {n.removeprefix(prefix): v for n, v in samples.items() if n.startswith(prefix)}
    assert segments == state["bytes"]
    assert sum(segments.values()) == state["bytes_total"] > 0


def test_gauges_are_there_before_any_request(server):
    samples = scrape(server)
    assert samples["tokens_capacity"] == CAPACITY and samples["history_tokens"] == 0
    assert samples["segment_bytes/history"] > 0 and samples.get("demoted_tokens_total", 0) == 0


def test_scrape_equals_server_info(server):
    prompt = list(range(3, 120))
    server.generate(prompt, 20)
    server.generate(prompt + [5, 6, 7], 1)
    state = server.state()
    agree(scrape(server), state)
    assert state["tokens_capacity"] == CAPACITY
    # The prompt, 20 tokens generated (the last is in the cache only if it was fed back), and what
    # the second request added to the cached prompt.
    assert state["history_tokens"] == pytest.approx(117 + 19 + 3, abs=2)
    assert state["demoted_tokens"] == pytest.approx(117 + 19 + 3, abs=2)
    assert state["materialised_tokens"] >= 117 + sum(range(117, 117 + 19))
    assert 117 <= state["scratch_tokens_peak"] <= 117 + 20
    assert (state["sink_hits"], state["sink_misses"], state["requests_on_prefix"]) == (SINK, 0, 1)
    assert state["window_tokens"] == 0, "nothing is running"


def test_gauges_follow_sglangs_interval_without_being_asked(server):
    """No /server_info here: a prefill and the decode log update them."""
    before = scrape(server)
    server.generate([9] * 50, 24)
    after = scrape(server)
    # Reports come with the prefill, every 8 decode steps and soon after the last request.
    new = after["demoted_tokens_total"] - before["demoted_tokens_total"]
    assert 50 + 24 - 9 <= new <= 50 + 24
    line = r"oscar: #history token: (\d+) of (\d+) at (\S+) bits, #window token: (\d+), sink"
    lines = re.findall(line, server.log.read_text())
    assert len(lines) >= 2
    held, capacity, bits, windows = lines[-1]
    assert int(capacity) == CAPACITY and float(bits) == pytest.approx(2.5)
    assert after["history_tokens"] - 8 <= int(held) <= after["history_tokens"]
    assert int(windows) == SINK + RECENT


def test_our_tokens_are_those_of_sglangs_pool(server):
    """Both are set by the same report: held = used + evictable, and with what is free all there
    is. The same reading twice, so that no report came between its lines."""

    def read() -> dict[str, float]:
        text = server.request("/metrics/")
        names = r"^(sglang:kv_\w+_tokens|oscar:history_tokens|oscar:tokens_capacity)\{.*\} (\S+)$"
        return {name: float(value) for name, value in re.findall(names, text, re.M)}

    for length in (40, 700, 90):
        server.generate([length % 250] * length, 20)
        found, again = read(), {}
        while found != again:
            time.sleep(0.2)
            found, again = read(), found
        used, evictable, free = (
            found[f"sglang:kv_{kind}_tokens"] for kind in ("used", "evictable", "available")
        )
        assert found["oscar:history_tokens"] == used + evictable >= length - 1, found
        assert found["oscar:tokens_capacity"] == CAPACITY == used + evictable + free, found


def test_window_tokens_of_a_running_request(server):
    work = threading.Thread(target=server.generate, args=([11] * 100, 200))
    work.start()
    seen = set()
    while work.is_alive():
        seen.add(server.state()["window_tokens"])
        time.sleep(0.05)
    work.join()
    assert SINK + RECENT in seen and seen <= {0, SINK + RECENT}, seen
    assert server.state()["window_tokens"] == 0


def test_flush_empties_the_gauges(server):
    server.generate([13] * 60, 2)
    server.state()
    assert scrape(server)["history_tokens"] > 0
    server.flush()
    after = scrape(server)
    assert after["history_tokens"] == 0 and after["demoted_tokens_total"] > 0
    agree(after, server.state())


@pytest.mark.parametrize("n_sink,n_recent,block", [(4, 6, 1), (1, 1, 1), (8, 3, 1), (5, 9, 8)])
def test_window_tokens_is_what_attention_reads_exactly(n_sink, n_recent, block):
    """Against the reference: a decode step reads all but [n_sink, hist_end) exactly."""
    windows = WindowLayout(n_sink, n_recent)
    for start in range(0, 25, block):
        for length in range(start + 1, 40):  # at least one token is its own
            step = torch.tensor([length - 1])
            end = int(history_end(step, torch.tensor([start]), windows, block))
            exact = length - max(0, end - n_sink)
            assert window_tokens([(start, length)], windows, block) == exact, (start, length)
