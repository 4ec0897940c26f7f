"""The JSON of an evaluation -> one HTML page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from ...config import DEFAULT_CODEC
from ...kernels.codec import CODECS
from ..errors import CalibrationError
from . import charts
from .verdict import TWO_BIT, best_served, main_rows, sweep_rows, verdict

# Whose errors per layer are drawn beside those of the best.
_COMPARED = (
    DEFAULT_CODEC,
    *(name for name, codec in CODECS.items() if codec.family == "published"),
    "quarot",
)


def read_evaluation(path: Path) -> dict[str, Any]:
    """Raises CalibrationError if ``path`` is no finished evaluation."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["results"], list) or "setup" not in found:
            raise KeyError("results")
        return found
    except OSError:
        raise
    except (ValueError, KeyError, TypeError):
        raise CalibrationError(
            f"{path}: holds no finished evaluation; make one with oscar-sglang eval --json"
        ) from None


def page(evaluation: dict[str, Any]) -> str:
    """The whole report."""
    setup = evaluation["setup"]
    rows = main_rows(evaluation)
    body = [
        f"<h1>2-bit KV cache for {escape(str(setup['model']))}</h1>",
        f"<p class=sub>{escape(_subtitle(setup))}</p>",
        '<section class="verdict">',
        *(f"<p>{escape(s)}</p>" for s in verdict(evaluation)),
        "</section>",
    ]
    if rows:
        body += _quality(rows)
    body += _tables(evaluation["results"])
    if rows:
        body += _layers(rows)
    if evaluation.get("profile"):
        body += _keys(evaluation["profile"])
    best = best_served(rows)
    if best:
        body += _windows(evaluation, best)
    body.append(f"<footer>{escape(str(evaluation.get('tool', '')))}. {_NOTES}</footer>")
    title = f"2-bit KV cache: {setup['model']}"
    return _HTML.format(title=escape(title), style=STYLE, body="\n".join(body))


def _subtitle(setup: dict[str, Any]) -> str:
    return (
        f"{setup['layers']} layers, {setup['heads']} query and {setup['kv_heads']} KV heads of "
        f"{setup['head_dim']} channels. Calibrated on {setup['calibration']}. Exact windows: "
        f"first {setup['sink']} and last {setup['recent']} tokens."
    )


def _figure(title: str, svg: str, caption: str) -> str:
    return (
        f"<figure><h2>{escape(title)}</h2>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _quality(rows: list[dict[str, Any]]) -> list[str]:
    key = (
        '<p class="key"><span class="ours">&#9679; this project</span> '
        '<span class="served">&#9679; OSCAR, its Lloyd-Max form, OScaR</span> '
        '<span class="base">&#9679; other baselines</span> '
        "<span>&#9675; with its own windows or none</span></p>"
    )
    caption = (
        f"Lower and further left is better. Mean over {rows[0]['documents']} documents at "
        f"{rows[0]['context']} tokens; hover a mark for its numbers."
    )
    return [_figure("Quality against bits", key + charts.pareto(rows), caption)]


def _tables(results: list[dict[str, Any]]) -> list[str]:
    parts, results = [], [r for r in results if not r.get("swept")]
    for context in dict.fromkeys(r["context"] for r in results):
        rows = [r for r in results if r["context"] == context]
        exact = [r for r in rows if r["codec"] == "exact"]
        rest = sorted((r for r in rows if r["codec"] != "exact"), key=lambda r: r.get("kl", 0))
        title = f"All methods at {context} tokens" if context else "All methods"
        parts.append(f"<h2>{title}</h2>{_table(exact + rest)}")
    return parts


_COLUMNS = (
    ("bits", "bits", "{:.3f}"),
    ("with windows", "bits_with_windows", "{:.2f}"),
    ("KL", "kl", "{:.4f}"),
    ("top-1", "top1", "{:.1%}"),
    ("ΔNLL", "dnll", "{:+.4f}"),
    ("perplexity", "perplexity", "{:.2f}"),
    ("same greedy tokens", "agree", "{:.0f}"),
    ("induction", "induct", "{:.1%}"),
)


def _table(rows: list[dict[str, Any]]) -> str:
    used = [c for c in _COLUMNS if any(r.get(c[1]) is not None for r in rows)]
    recalls = list(dict.fromkeys(c for r in rows for c in r.get("recall", {})))
    heads = [h for h, _, _ in used] + [f"recall {int(c) // 1024}k" for c in recalls]
    lines = ["<th>codec</th>" + "".join(f"<th>{h}</th>" for h in heads)]
    for r in rows:
        cells = [_cell(r.get(name), form) for _, name, form in used]
        cells += [_cell(r.get("recall", {}).get(c), "{:.0%}") for c in recalls]
        name = f'<th class="{charts.css_class(r["method"])}">{escape(r["codec"])}</th>'
        lines.append(name + "".join(cells))
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in lines)}</table></div>'


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "<td></td>"
    return f"<td>{form.format(round(value, 5) + 0.0).replace('-', '−')}</td>"


def _layers(rows: list[dict[str, Any]]) -> list[str]:
    best = best_served(rows)
    by_name = {r["codec"]: r for r in rows if r.get("layer_error")}
    chosen = [by_name[n] for n in dict.fromkeys((best["codec"], *_COMPARED)) if n in by_name]
    caption = (
        "Each layer by itself: exact queries on the quantised cache, before the output "
        "projection; what earlier layers already spoiled is left out."
    )
    return [
        _figure("Error per layer", charts.layer_lines(chosen), caption),
        _figure(
            f"Error per query head: {best['codec']}",
            charts.heatmap(best["head_error"], "head", "error per layer and query head"),
            "Squared error of the attention output over its energy; darker is worse (log scale).",
        ),
    ]


def _keys(profile: dict[str, Any]) -> list[str]:
    return [
        _figure(
            "How much of K is its mean",
            charts.heatmap(profile["k_mean_energy"], "KV head", "K mean energy", log_scale=False),
            "Part of K's energy held by its mean over tokens. A dominant mean costs a 2-bit code "
            "its range unless a rotation turns it into a constant, which the zero-point carries.",
        ),
        _figure(
            "Spectrum of K",
            charts.spectrum(profile["k_spectrum"]),
            "A line per layer and KV head. A first eigenvector far above the others is the mean.",
        ),
        _figure(
            "Token-norm imbalance",
            charts.token_norms(profile["token_norm"], profile["sink_norm"]),
            "Norms of K over tokens. Codes shared by several tokens (per-channel methods) suffer "
            "where they differ widely; sink tokens are outside the boxes and kept exact.",
        ),
    ]


def _windows(evaluation: dict[str, Any], best: dict[str, Any]) -> list[str]:
    rows = sweep_rows(evaluation["results"], best["method"], best["context"])
    if not rows:
        return []
    at = {
        "sink": [r for r in rows if r["recent"] == best["recent"]],
        "recent": [r for r in rows if r["sink"] == best["sink"]],
    }
    drawn = "".join(charts.window_lines(r, name) for name, r in at.items() if len(r) > 1)
    requests = evaluation.get("concurrency", 1)
    lines = [
        f"<tr><th>{r['sink']} + {r['recent']}</th><td>{r['kl']:.4f}</td><td>{r['top1']:.1%}</td>"
        f"<td>{r['window_bytes'] / 2**20:.0f} MiB</td></tr>"
        for r in sorted(rows, key=lambda r: (r["window_bytes"], r["sink"]))
    ]
    head = f"<tr><th>sink + recent</th><th>KL</th><th>top-1</th><th>{requests} requests</th></tr>"
    table = f'<div class="wide"><table>{head}{"".join(lines)}</table></div>'
    caption = "Memory: exact rows of K and V in 16 bits, all layers, for that many requests."
    return [
        _figure(
            f"Window sizes: {best['codec']}", f'<div class="pair">{drawn}</div>{table}', caption
        )
    ]


_NOTES = (
    "Procedure: all but the last 129 tokens are prefilled exactly, their K and V outside the "
    "windows pass through the codec, and the last 129 rows run through all layers on that cache. "
    f"Bits are bytes of encoded rows, metadata included; up to {TWO_BIT} bits count as 2-bit."
)
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head><body><main>
{body}
</main></body></html>
"""
