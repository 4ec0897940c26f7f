"""The serving benchmark's own arithmetic: merging runs, speed-ups, latencies from streams."""

import shlex
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.lib import provenance
from scripts.lib.context_cost import lines
from scripts.lib.serving_rows import add_speedups, markdown, merge
from scripts.lib.traffic import steady_itl, tpot_figures


def row(cache: str, scenario: str = "decode", **more) -> dict:
    base = {"cache": cache, "model": "qwen3-8b", "scenario": scenario, "conditions": {}}
    return base | {"context": 32768, "batch": 1} | more


def stream(start: float, ttft: float, itl: list[float]) -> SimpleNamespace:
    return SimpleNamespace(start_time=start, ttft=ttft, itl=itl)


def test_merge_replaces_the_same_case_and_keeps_the_rest():
    old = [
        row("int2", tpot_ms=9), row("bf16", tpot_ms=8), row("int2", batch=8, tpot_ms=7),
        row("int2", model="qwen3-4b", tpot_ms=6),
        {"cache": "int2", "model": "qwen3-8b", "scenario": "ttft", "ttft_ms": 5},
    ]  # fmt: skip
    found = merge(old, [row("int2", tpot_ms=1)])
    assert [r["tpot_ms"] for r in found] == [1, 8, 7, 6]


def test_speedups_have_the_right_direction():
    rows = add_speedups([
        row("bf16", tpot_ms=8), row("fp8", tpot_ms=6), row("int2", tpot_ms=4),
        row("bf16", "memory", tokens_held=100), row("int2", "memory", tokens_held=700),
        row("bf16", "job", requests_per_s=1), row("int2", "job", requests_per_s=5),
    ])  # fmt: skip
    found = {r["scenario"]: r for r in rows if r["cache"] == "int2"}
    assert (found["decode"]["speedup_bf16"], found["decode"]["speedup_fp8"]) == (2, 1.5)
    assert found["memory"]["speedup_bf16"] == 7 and "speedup_fp8" not in found["memory"]
    assert found["job"]["speedup_bf16"] == 5
    assert not any("speedup_bf16" in r for r in rows if r["cache"] != "int2")


@pytest.mark.parametrize(
    "change", [{"model": "qwen3-4b"}, {"batch": 8}, {"conditions": {"mem_fraction": "0.3"}}]
)
def test_no_speedup_across_cases_or_conditions(change):
    (*_, int2) = add_speedups([row("bf16", tpot_ms=8), row("int2", tpot_ms=4, **change)])
    assert "speedup_bf16" not in int2


def test_an_outdated_speedup_goes_with_its_baseline():
    assert "speedup_fp8" not in add_speedups([row("int2", tpot_ms=4, speedup_fp8=3)])[0]


def test_steady_time_is_when_all_streams_decode():
    """The second stream starts 1 s later, which stalls the first; alone, the first is faster."""
    first = stream(0, 1.0, [0.1] * 5 + [0.5] + [0.2] * 40 + [0.1] * 30)
    second = stream(1, 1.0, [0.2] * 40)
    for kept in steady_itl([first, second]):
        assert len(kept) == 40 and np.allclose(kept, 0.2)
    figures = tpot_figures([[first, second]])
    assert figures["tpot_ms"] == pytest.approx(200) and figures["samples"] == 80


def test_tokens_that_arrive_together_do_not_shorten_the_median():
    """Two tokens a chunk: half of the latencies are zero, the step still took 10 ms."""
    figures = tpot_figures([[stream(0, 1.0, [0.0, 0.02] * 32)]])
    assert figures["tpot_ms"] == figures["tpot_mean_ms"] == pytest.approx(10)
    assert figures["tpot_p99_ms"] == pytest.approx(20)


def test_too_short_streams_are_refused():
    with pytest.raises(RuntimeError, match="ask for more tokens"):
        tpot_figures([[stream(0, 1.0, [0.1] * 20)]])


def test_markdown_has_one_line_per_case():
    rows = [row(c, tpot_ms=t, tpot_p99_ms=t + 1) for c, t in (("bf16", 8), ("int2", 4))]
    rows.append(row("int2", "soak", slots_lost=0))
    lines = list(markdown(add_speedups(rows)))
    assert lines[2:] == ["| decode, 1 x 32k | 8.00 ms (9.00) |  | 4.00 ms (5.00) | **2.00x** |  |"]


def decode_rows(cache: str, points: dict[tuple[int, int], float]) -> list[dict]:
    return [
        row(cache, context=context, batch=batch, tpot_ms=ms)
        for (context, batch), ms in points.items()
    ]


def test_lines_give_slope_and_break_even():
    """BF16 4 ms + 32 us per 1024 tokens, int2 5 ms + 8: equal at 1 ms / 24 us = 41.7 thousand."""
    thousand = 1024
    rows = decode_rows("bf16", {(k * thousand, 1): 4 + 0.032 * k for k in (1, 32, 100)})
    rows += decode_rows("int2", {(k * thousand, 1): 5 + 0.008 * k for k in (1, 32, 64, 100)})
    rows += decode_rows("fp8", {(k * thousand, 1): 3 + 0.031 * k for k in (1, 32, 100)})
    found = lines(rows, "qwen3-8b", "context")
    exact, ours, fp8 = (found[c] for c in ("bf16", "int2", "fp8"))
    assert exact.us_per_1k == pytest.approx(32) and ours.us_per_1k == pytest.approx(8)
    assert [x for x, _ in ours.points] == [1024, 32768, 102400], "only what every cache has"
    assert max(line.residual for line in found.values()) < 1e-9
    assert ours.break_even(exact) == (round(1000 / 24 * 1024), True)
    assert exact.break_even(ours) is None, "its slope is steeper"
    assert fp8.break_even(exact) == (1024, False), "faster everywhere: not extrapolated"


def test_lines_over_streams_count_the_tokens_of_all():
    rows = decode_rows("bf16", {(32768, b): 5 + b for b in (1, 8)})
    rows += decode_rows("bf16", {(1024, 1): 9})
    assert lines(rows, "qwen3-8b", "batch")["bf16"].points == ((32768, 6), (262144, 13))
    assert lines(rows[:1], "qwen3-8b", "context") == {}


@pytest.mark.parametrize(
    "main, words", [("scripts.demo", ["python", "-m", "scripts.demo"]), (None, ["x/oscar-sglang"])]
)
def test_a_result_names_the_command_that_was_typed(monkeypatch, main, words):
    """Python replaces the name of a module by the path of its file."""
    spec = main and SimpleNamespace(name=main)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "argv", ["x/oscar-sglang", "--out", "a b"])
    assert shlex.split(provenance.command()) == [*words, "--out", "a b"]


def test_a_package_that_is_not_installed_has_no_version():
    versions = provenance.header("CPU", "abc", ("torch", "no-such-package"))["versions"]
    assert versions["no-such-package"] == "none" and versions["torch"][0].isdigit()
