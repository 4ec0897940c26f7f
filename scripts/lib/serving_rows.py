"""Rows of the serving benchmark's JSON: merging runs, speed-ups, the table of scripts/README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# The figure that a scenario is about; +1 where more is better.
PRIMARY = {
    "memory": ("tokens_held", 1),
    "prefill": ("tokens_per_s", 1),
    "decode": ("tpot_ms", -1),
    "ttft": ("ttft_ms", -1),
    "job": ("requests_per_s", 1),
    "agents": ("requests_per_s", 1),
}
BASELINES = ("bf16", "fp8")


def case(row: dict) -> tuple:
    """What was measured, whatever the cache."""
    return tuple(row.get(k) for k in ("model", "scenario", "context", "batch", "turn", "variant"))


def merge(old: Iterable[dict], new: Iterable[dict]) -> list[dict]:
    """``old`` with the rows of ``new``, which replace those of the same case, cache and window.

    Rows without conditions, of an older format, are left out: nothing says what they compare with.
    """
    rows = {}
    for row in [*old, *new]:
        if "conditions" in row:
            rows[row["cache"], case(row), row.get("prefix_window")] = row
    return list(rows.values())


def add_speedups(rows: list[dict]) -> list[dict]:
    """The rows, those of int2 with ``speedup_bf16`` and ``speedup_fp8`` wherever the baseline was
    measured in the same case under the same conditions."""
    found = {(r["cache"], case(r)): r for r in rows}
    result = []
    for row in rows:
        row = {k: v for k, v in row.items() if not k.startswith("speedup_")}
        if row["cache"] == "int2" and row["scenario"] in PRIMARY:
            figure, sign = PRIMARY[row["scenario"]]
            for cache in BASELINES:
                other = found.get((cache, case(row)))
                if other and other["conditions"] == row["conditions"]:
                    row["speedup_" + cache] = round((row[figure] / other[figure]) ** sign, 3)
        result.append(row)
    return result


def thousands(tokens: int) -> str:
    """32768 -> 32k, 102400 -> 100k."""
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def label(row: dict) -> str:
    """A case in words."""
    context, batch = row.get("context"), row.get("batch")
    match row["scenario"]:
        case "memory":
            return "tokens held"
        case "prefill":
            return f"prefill, fresh {thousands(context)}"
        case "decode":
            return f"decode, {batch} x {thousands(context)}"
        case "ttft":
            reused = ", window reused" if row.get("prefix_window") == "reuse" else ""
            return f"first token, {row['turn']} on {thousands(context)}{reused}"
        case "job" if row["variant"] == "hot":
            return f"job, {thousands(context)}, all cached"
        case "job":
            return f"job, {row['conditions']['documents']} x {thousands(context)}"
        case "agents":
            radix = "" if row["variant"] == "radix" else ", no prefix cache"
            return f"agents, {batch} sessions{radix}"
    raise ValueError(row["scenario"])


def _cell(row: dict | None) -> str:
    if row is None:
        return ""
    value = row[PRIMARY[row["scenario"]][0]]
    match row["scenario"]:
        case "memory":
            return f"{value / 1e6:.2f} M"
        case "prefill":
            return f"{value:,} tok/s"
        case "decode":
            return f"{value:.2f} ms ({row['tpot_p99_ms']:.2f})"
        case "ttft":
            return f"{value:.0f} ms"
    more = f", {row['output_tokens_per_s']:.0f} tok/s, {row['cache_hit_rate']:.0%} hits"
    return f"{value:.3g} req/s{more}"


def ordered(rows: Iterable[dict]) -> list[dict]:
    """Those that have a figure to compare, by scenario and size."""

    def key(row: dict) -> tuple:
        place = list(PRIMARY).index(row["scenario"]), row.get("variant") or ""
        return *place, row.get("context") or 0, row.get("batch") or 0, -row.get("turn", 0)

    return sorted((r for r in rows if r["scenario"] in PRIMARY), key=key)


def markdown(rows: list[dict]) -> Iterator[str]:
    """Table lines; times are medians, in brackets the 99th percentile."""
    for i, model in enumerate(sorted({r["model"] for r in rows})):
        yield from [""] * (i > 0)
        yield f"| {model} | BF16 | FP8 | int2 | against BF16 | against FP8 |"
        yield "|---|---|---|---|---|---|"
        mine = ordered(r for r in rows if r["model"] == model)
        baselines = {(r["cache"], case(r)): r for r in mine if r["cache"] in BASELINES}
        lines = [r for r in mine if r["cache"] == "int2"]
        missing = {case(r) for r in baselines.values()} - {case(r) for r in lines}
        lines += [next(r for r in mine if case(r) == c) for c in missing]
        for row in ordered(lines):
            found = {c: baselines.get((c, case(row))) for c in BASELINES}
            found["int2"] = row if row["cache"] == "int2" else None
            cells = [label(row)]
            cells += [_cell(found.get(cache)) for cache in (*BASELINES, "int2")]
            for cache in BASELINES:
                ratio = row.get("speedup_" + cache)
                cells.append("" if ratio is None else f"**{ratio:.2f}x**")
            yield "| " + " | ".join(cells) + " |"
