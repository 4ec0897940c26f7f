"""The committed measurements: what they compare with is named, 2 bits are not slower than BF16
where that is claimed, and the READMEs' figures are those of the files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.context_cost import markdown
from scripts.lib.model_kinds import KINDS, UNMEASURED

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
# The front page, and where all measurements stand.
FRONT, MEASURED = (ROOT / "README.md").read_text(), (ROOT / "scripts" / "README.md").read_text()
# What a file does not say itself; its own fields win.
SOURCES = json.loads((RESULTS / "sources.json").read_text())
FILES = sorted(p.name for p in RESULTS.glob("*.json") if p.name != "sources.json")
COMMIT = re.compile(r"[0-9a-f]{7,40}( \+ working tree)?")


def load(name: str):
    return json.loads((RESULTS / name).read_text())


def field(data, name: str, key: str):
    """From the file's head or its set-up, else from every row, else from sources.json."""
    rows = data if isinstance(data, list) else data.get("rows") or data.get("runs") or []
    heads = [] if isinstance(data, list) else [data, data.get("setup", {})]
    for head in heads:
        if head.get(key) and not (key == "commit" and not COMMIT.fullmatch(head[key])):
            return head[key]
    found = [r.get(key) for r in rows]
    if found and all(found):
        return found[0]
    return SOURCES.get(name, {}).get(key)


@pytest.mark.parametrize("name", FILES)
def test_a_result_says_where_it_comes_from(name):
    data = load(name)
    device, command, date = (field(data, name, k) for k in ("device", "command", "date"))
    assert device and re.fullmatch(r"\d{4}-\d\d-\d\d", date or "")
    assert re.search(r"\w+\.py |^oscar-sglang \w+|^python -m scripts\.\w+", command), command
    assert COMMIT.fullmatch(field(data, name, "commit"))
    versions = field(data, name, "versions")
    assert "torch" in versions and versions.keys() & {"sglang", "transformers"}
    assert field(data, name, "baselines"), "which baseline?"


def test_sources_name_existing_files():
    assert set(SOURCES) <= set(FILES)


def test_a_missing_field_is_noticed():
    good = {"rows": [{"commit": "0123abc"}, {"commit": "0123abc"}]}
    assert field(good, "new.json", "commit") == "0123abc"
    assert field({"rows": [{"commit": "0123abc"}, {}]}, "new.json", "commit") is None
    assert field({"commit": "HEAD"}, "new.json", "commit") is None


# -- speed -------------------------------------------------------------------------------------


def decode_rows() -> dict[tuple[int, int], dict[str, float]]:
    """(batch, context) -> cache -> milliseconds per output token, of the Qwen3-8B shape."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in load("serving-h200.json")["rows"]:
        if row["scenario"] == "decode" and row["model"] == "qwen3-8b":
            found.setdefault((row["batch"], row["context"]), {})[row["cache"]] = row["tpot_ms"]
    return found


def kernel_rows() -> list[dict]:
    """The CUDA kernels; the Triton form is the portable one and makes no claim."""
    rows = load("kernels-h200.json")["rows"]
    return [r for r in rows if r["op"] == "decode_attention" and r["kernel"].startswith("attend_")]


def test_decode_is_not_slower_than_bf16():
    rows = decode_rows()
    assert {batch for batch, _ in rows} >= {1, 8, 32}
    for (batch, context), ms in rows.items():
        limit = ms["bf16"] * (1.1 if context < 16384 else 1.0)
        assert ms["int2"] <= limit, f"{batch} x {context}: {ms}"
        if context >= 32768:
            assert ms["int2"] <= ms["fp8"], f"{batch} x {context}: {ms}"


def test_attention_is_not_slower_than_the_best_bf16():
    rows = kernel_rows()
    assert {r["context"] for r in rows} >= {8192, 32768, 131072}
    for row in rows:
        exact = {k: us for k, us in row["baselines"].items() if "bf16" in k}
        assert len(exact) >= 2 and row["us"] <= min(exact.values()), row
        assert row["speedup_bf16"] == pytest.approx(min(exact.values()) / row["us"], rel=5e-3)


def claims(text: str) -> Iterator[tuple[tuple[int, int], list[str], list[str]]]:
    """(batch, context), the times of BF16, FP8 and int2, and the factors against the first two,
    as written in a README's table of decode speeds: one case a line."""
    for line in text.splitlines():
        case = re.match(r"\|[^|]*\b(\d+) x (\d+)k\b[^|]*\|", line)
        times, factors = re.findall(r"(\d+\.\d+) ms", line), re.findall(r"(\d+\.\d+)x", line)
        if case and len(times) == 3 and len(factors) == 2:
            yield (int(case[1]), int(case[2]) * 1024), times, factors


def same(written: str, value: float) -> bool:
    """Whether ``value`` rounds to what is written, give or take one unit of a rounded source."""
    return abs(float(written) - value) <= 0.51 * 10 ** -len(written.partition(".")[2]) + 1e-3


@pytest.mark.parametrize("text, least", [(FRONT, 2), (MEASURED, 4)], ids=["front", "measured"])
def test_the_readmes_quote_the_decode_speeds(text, least):
    rows, found = decode_rows(), list(claims(text))
    assert len(found) >= least
    for case, times, factors in found:
        ms = [rows[case][cache] for cache in ("bf16", "fp8", "int2")]
        ratios = [exact / ms[2] for exact in ms[:2]]
        for written, value in zip(times + factors, ms + ratios, strict=True):
            assert same(written, value), f"{case}: {written}, measured {value:.3f}"


def test_the_readme_quotes_the_kernels():
    kernels = {
        (r["batch"], r["context"]): r["speedup_bf16"]
        for r in kernel_rows()
        if (r["page_size"], r["gqa"]) == (16, 4)
    }
    sentence = MEASURED[MEASURED.index("Kernels alone") :].partition("\n\n")[0]
    quoted = re.findall(r"(\d+\.\d+)x[^\d]*?at (\d+) x (\d+)k", sentence)
    assert quoted
    for factor, batch, context in quoted:
        assert same(factor, kernels[int(batch), int(context) * 1024])


def test_the_readme_quotes_what_context_costs():
    table = list(markdown(load("serving-h200.json")["rows"], "qwen3-8b"))
    assert len(table) == 8 and "\n".join(table) in MEASURED


def test_time_per_byte_of_the_codecs():
    """The kernels' README: a codec's time, and its time per byte over that of FP16 step and lo."""
    text = (ROOT / "triton_kernels" / "README.md").read_text()
    rows = {
        (r["codec"], r["batch"]): r
        for r in kernel_rows()
        if (r["context"], r["gqa"]) == (32768, 4)
        and r["page_size"] == (128 if r["codec"] == "omni" else 16)
    }
    for codec in ("compact", "lloyd", "omni"):
        (line,) = re.findall(rf"\| `{codec}` \| (\d+\.\d, .*) \|", text)
        for batch, cell in zip((1, 8, 32), line.split(" | "), strict=True):
            us, per_byte = cell.split(", ")
            row, base = rows[codec, batch], rows["any", batch]
            assert same(us, row["us"])
            assert same(per_byte, base["copy_share"] / row["copy_share"])


JOBS = {
    "questions about 6 documents of 100k": ("job", "shared", 102400),
    "questions about 18 documents of 32k": ("job", "shared", 32768),
    "100k, a stream for each document that fits": ("job", "hot", 102400),
    "32k, a stream for each document that fits": ("job", "hot", 32768),
    "32 agents of 10 turns, 8k shared prompt": ("agents", "radix", 8192),
}


def line_of(readme: str, label: str) -> str:
    """The cells after the one that begins with ``label``."""
    (line,) = re.findall(rf"^\| {re.escape(label)}[^|]*\|(.*)", readme, re.MULTILINE)
    return line


@pytest.mark.parametrize(
    "readme, labels", [(FRONT, list(JOBS)[:1]), (MEASURED, JOBS)], ids=["front", "measured"]
)
def test_the_readmes_quote_the_jobs(readme, labels):
    rows = [r for r in load("serving-h200.json")["rows"] if r["model"] == "qwen3-8b"]
    for text, case in ((label, JOBS[label]) for label in labels):
        found = {
            r["cache"]: r
            for r in rows
            if (r["scenario"], r.get("variant"), r.get("context")) == case
        }
        values = [found[cache]["requests_per_s"] for cache in ("bf16", "fp8", "int2")]
        values += [values[2] / values[0], values[2] / values[1]]
        written = re.findall(r"\d+\.\d+", line_of(readme, text))
        assert len({json.dumps(r["conditions"]) for r in found.values()}) == 1
        for figure, value in zip(written, values, strict=True):
            assert same(figure, value), f"{text}: {figure}, measured {value:.3f}"


@pytest.mark.parametrize("readme", [FRONT, MEASURED], ids=["front", "measured"])
def test_first_tokens_and_prompts_are_those_of_the_file(readme):
    def measured(figure: str, **case) -> list[float]:
        case |= {"model": "qwen3-8b"}
        rows = [r for r in load("serving-h200.json")["rows"] if case.items() <= r.items()]
        rows = [r for r in rows if r.get("prefix_window") != "reuse"]
        return [next(r[figure] for r in rows if r["cache"] == c) for c in ("bf16", "fp8", "int2")]

    ms = measured("ttft_ms", scenario="ttft", turn=128, context=102400)
    line = line_of(readme, "first token of a 128-token turn on a cached 100k prefix")
    written = re.findall(r"(\d+) ms", line) + re.findall(r"(\d+\.\d+)x", line)
    values = ms + [exact / ms[2] for exact in ms[:2]]
    assert all(same(w, x) for w, x in zip(written, values, strict=True)), line
    if readme is MEASURED:
        speed = measured("tokens_per_s", scenario="prefill", context=8192)
        line = line_of(readme, "fresh 8k prompt")
        written = re.findall(r"(\d+\.\d)k tok/s", line) + re.findall(r"(\d+\.\d+)x", line)
        values = [x / 1000 for x in speed] + [speed[2] / x for x in speed[:2]]
        assert all(same(w, x) for w, x in zip(written, values, strict=True)), line


@pytest.mark.parametrize("readme", [FRONT, MEASURED], ids=["front", "measured"])
def test_tokens_held_are_those_of_the_file(readme):
    rows = load("serving-h200.json")["rows"]
    rows = [r for r in rows if r["scenario"] == "memory" and r["model"] == "qwen3-8b"]
    held = {r["cache"]: r["tokens_held"] / 1e6 for r in rows}
    millions = [held[cache] for cache in ("bf16", "fp8", "int2")]
    line = line_of(readme, "tokens held in the same memory")
    written = re.findall(r"(\d+\.\d+) M", line) + re.findall(r"(\d+\.\d+)x", line)
    ratios = [millions[2] / x for x in millions[:2]]
    assert all(same(w, x) for w, x in zip(written, millions + ratios, strict=True)), line


# -- models and soaks --------------------------------------------------------------------------


def test_every_kind_of_model_agrees():
    """Servers on a GPU: with graphs and without the same to the bit, the rest within its limit."""
    models = load("models-h200.json")["models"]
    assert set(models) == {*KINDS, "real"} - UNMEASURED
    for name, row in models.items():
        found = {(c["run"], c["with"]): c for c in row["comparisons"]}
        assert row["ok"] and len(found) >= 3, name
        # With head_dim 256 and FlashInfer single distributions differed once, by next to nothing.
        assert found["eager", "default"]["max"] <= (2e-5 if name == "llama-256" else 0), name
        assert found["wide", "exact"]["ratio"] < 1e-3, name
    real = {(c["run"], c["with"]) for c in models["real"]["comparisons"]}
    assert ("default", "reference") in real  # the CPU's answers


def test_decode_waits_no_more_often_than_bf16():
    caches = load("profile-h200.json")["caches"]
    waits = {c: sum(run["decode"]["waits_per_step"].values()) for c, run in caches.items()}
    assert waits["int2"] <= waits["bf16"]
    (line,) = re.findall(r"(\d+\.\d) against (\d+\.\d) times a step", MEASURED)
    assert all(same(w, waits[c]) for w, c in zip(line, ("int2", "bf16"), strict=True))


@pytest.mark.parametrize("name", ["soak-agents-h200.json", "soak-tags-h200.json"])
def test_soaks_end_as_they_began(name):
    for run in load(name)["runs"]:
        assert not run["problems"] and run["corrupt"] == 0 and not run["log"]["errors"]
        for held in ("history_tokens", "tokens_capacity"):
            assert run["after"][held] == run["before"][held]


def test_the_readme_quotes_the_tags():
    readme = " ".join(MEASURED.split())
    for run, codec in zip(load("soak-tags-h200.json")["runs"], ("feedback", "omni"), strict=True):
        (written,) = re.findall(rf"(\d+) (?:steps )?and 1\.1 M (?:reads )?of `{codec}`", readme)
        after = run["after"]["debug_tags"]
        assert int(written) == after["checked_steps"]
        assert same("1.1", after["checked_tokens"] / 1e6)


# -- quality -----------------------------------------------------------------------------------


def test_the_readme_quotes_the_kl_gate():
    """As written, mean and standard error; a stock cache gives its own rows back."""
    rows = load("kl-gate-cpu.json")["rows"]
    names = {"qwen3-nano": "qwen3-nano", "SmolLM2-135M": "smollm2-135m"}
    caches = {
        "SGLang's own cache": "stock",
        "codec `feedback`": "int2",
        "codec `position`": "position",
    }
    quoted = re.findall(r"\| ([^|]+), (qwen3-nano|SmolLM2-135M) \| (0\..*) \|", MEASURED)
    assert len(quoted) * 3 == len(rows)
    for cache, model, cells in quoted:
        found = [r for r in rows if (r["model"], r["cache"]) == (names[model], caches[cache])]
        assert [r["case"] for r in found] == ["turns", "prefix hit", "answer hit"]
        for row, cell in zip(found, cells.split(" | "), strict=True):
            kl, *error = cell.split(" ± ")
            assert same(kl, row["kl"]) and (not error or same(error[0], row["error"]))
            assert row["hit"] == 1.0 and row["below"]["DCP"]
            assert row["cache"] != "stock" or row["kl"] < 1e-9


def test_sglangs_kits_end_the_same_on_both():
    data = load("kits-cpu.json")
    tests = [(r["kit"], t, r["tests"]) for r in data["rows"] for t in r["tests"]["stock"]]
    assert data["differences"] == [] and all("skipped" not in str(t) for *_, t in tests)
    passed = failed = 0
    for kit, test, found in tests:
        stock, int2 = found["stock"][test], found["int2"][test]
        assert (stock["result"], stock["why"]) == (int2["result"], int2["why"]), (kit, test)
        passed += stock["result"] == "passed"
        failed += stock["result"] == "failed"
    quoted = re.search(
        r"(\d+) tests of (\d+) kits.*?(\d+) passed\s+and (\d+) failed", MEASURED, re.S
    )
    written = [int(n) for n in quoted.groups()]
    assert written == [len(tests), len(data["rows"]), passed, failed]


def test_both_parts_of_omni_are_needed():
    """OScaR's ablation on SmolLM2: rotation and token norm together are better than either, with
    the values coded and without; and the served pool gives the evaluator's figure."""
    rows = {r["part"]: r for r in load("omni-ablation-smollm2.json")["rows"]}
    assert set(rows) == {"both", "rotation", "scaling", "neither"}
    for figure in ("kl", "kl_keys_only"):
        both, *others = (rows[p][figure] for p in ("both", "rotation", "scaling"))
        assert 1.1 * both < min(others) and max(others) < rows["neither"][figure]
    pool = {r["codec"]: r["kl"] for r in load("pool-quality-smollm2.json")}
    assert pool["omni"] == pytest.approx(rows["both"]["kl"], rel=0.01)
    assert pool["omni"] == pytest.approx(0.052, rel=0.25)


def test_the_readmes_quote_the_quality():
    """The front's FP8 is the cache as SGLang serves it, without exact windows; both figures are of
    the same documents at the same context."""
    pool = {r["codec"]: r for r in load("pool-quality-smollm2.json")}
    judged = {
        r["codec"]: r for r in load("quality-smollm2.json")["results"] if r["context"] == 2048
    }
    (nano,) = load("pool-quality-nano-h200.json")
    assert judged["feedback"]["kl"] == pytest.approx(pool["feedback"]["kl"], rel=0.01)
    exact, fp8, int2 = re.findall(r"\d[\d.]*", line_of(FRONT, "KL from the exact cache"))
    assert (
        exact == "0" and same(fp8, judged["fp8@0+0"]["kl"]) and same(int2, pool["feedback"]["kl"])
    )
    (top1,) = re.findall(r"the same at (\d+\.\d)% of positions", " ".join(FRONT.split()))
    assert same(top1, 100 * pool["feedback"]["top1"])
    three = [pool[c] for c in ("feedback", "aligned", "oscar")]
    for label, rows in (
        ("SmolLM2-135M `feedback`", three),
        ("qwen3-nano", [nano]),
        ("SmolLM2-135M, FP8", [judged["fp8@0+0"]]),
    ):
        _, kl, top1 = line_of(MEASURED, label).strip(" |").split("|")
        for cell, key, scale in ((kl, "kl", 1), (top1, "top1", 100)):
            written = re.findall(r"\d+\.\d+", cell)
            assert all(same(w, scale * r[key]) for w, r in zip(written, rows, strict=True)), label


def test_claims_are_read():
    table = "| tokens held | 0.39 M | 0.79 M | 2.67 M | **6.77x** | **3.39x** |\n"
    table += "| 8 x 32k, cached | 11.14 ms | 11.00 ms | 6.93 ms | **1.61x** | **1.59x** |\n"
    found = [((8, 32768), ["11.14", "11.00", "6.93"], ["1.61", "1.59"])]
    assert list(claims(table)) == found
    assert same("1.6", 1.638) and not same("1.6", 1.66) and not same("1.64", 1.65)


def test_the_port_to_the_pinned_sglang_cost_no_speed():
    """int2's rows on 0.5.23 against those of 0.5.17, other days of the same kind of machine: decode
    within 3% (what differs between runs), the fresh prompt within 5%."""
    new = load("serving-h200-0.5.23.json")
    assert new["versions"]["sglang"] == "0.5.23"

    def key(row):
        return tuple(row.get(k) for k in ("cache", "model", "scenario", "context", "batch", "turn"))

    old = {key(r): r for r in load("serving-h200.json")["rows"]}
    compared = 0
    for row in new["rows"]:
        before = old[key(row)]
        if row["scenario"] == "memory":
            assert row["tokens_held"] == before["tokens_held"]
        elif row["scenario"] == "decode":
            assert row["tpot_ms"] <= 1.03 * before["tpot_ms"], row
        else:
            assert row["tokens_per_s"] >= 0.95 * before["tokens_per_s"], row
        compared += 1
    assert compared >= 7
