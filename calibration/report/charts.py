"""The charts of the report, each a function from results to an SVG string."""

from __future__ import annotations

import statistics
from typing import Any

from ..methods import family
from .svg import Canvas, Labels, decades, layer_ticks, linear, log

# CSS class of a ``Method.family``.
_CLASSES = {"ours": "ours", "published": "served", "baseline": "base"}
_BIT_TICKS = [(b, f"{b:g}") for b in (2, 2.5, 3, 4, 6, 8)]
_KL_FLOOR = 1e-4


def css_class(method: str) -> str:
    """Of a method: ours, another served codec, or a baseline."""
    return _CLASSES[family(method)]


def pareto(rows: list[dict[str, Any]]) -> str:
    """KL against measured bits; the line joins what nothing else beats in both."""
    rows = [r for r in rows if r["bits"] <= 8.01]
    c = Canvas(height=440, right=110)
    kls = [max(r["kl"], _KL_FLOOR) for r in rows]
    low, high = min(kls) / 1.6, max(kls) * 1.6
    x, y = log(1.8, 8.2, c.x0 + 10, c.x1), log(low, high, c.y0, c.y1)
    c.y_axis(y, decades(low, high), "KL from the exact cache, nats a token (log)")
    c.x_axis(x, _BIT_TICKS, "bits per element of the history, measured (log)")
    _front(c, [(x(r["bits"]), y(max(r["kl"], _KL_FLOOR))) for r in rows])
    labels = Labels(c)
    ordered = sorted(rows, key=lambda r: (css_class(r["method"]) != "ours", r["kl"]))
    for r in ordered:
        labels.block(x(r["bits"]), y(max(r["kl"], _KL_FLOOR)))
    for r in ordered:
        px, py = x(r["bits"]), y(max(r["kl"], _KL_FLOOR))
        css = css_class(r["method"])
        own_windows = "@" in r["codec"]
        tip = f"{r['codec']}: {r['bits']:.3f} bits, KL {r['kl']:.4f}, top-1 {r['top1']:.1%}"
        c.dot(px, py, f"dot {css}{' hollow' * own_windows}", tip)
        if not own_windows:
            labels.place(px, py, r["codec"], f"label {css}")
    return c.render("quality against bits of every method")


def _front(c: Canvas, points: list[tuple[float, float]]) -> None:
    best, front = -1.0, []
    for px, py in sorted(points, key=lambda p: (p[0], -p[1])):
        if py > best:  # lower KL is further down
            best = py
            front.append((px, py))
    if len(front) > 1:
        c.path(front, "front")


def layer_lines(rows: list[dict[str, Any]]) -> str:
    """Error of attention outputs per layer, one line a method."""
    c = Canvas(height=330, right=150)
    layers = len(rows[0]["layer_error"])
    values = [max(e, 1e-6) for r in rows for e in r["layer_error"]]
    low, high = min(values) / 1.3, max(values) * 1.3
    x, y = linear(0, max(1, layers - 1), c.x0 + 8, c.x1 - 8), log(low, high, c.y0, c.y1)
    c.y_axis(y, [(v, _percent(v)) for v, _ in decades(low, high)], "squared error / energy (log)")
    c.x_axis(x, layer_ticks(layers), "layer")
    labels = Labels(c)
    for i, r in enumerate(rows):
        points = [(x(j), y(max(e, 1e-6))) for j, e in enumerate(r["layer_error"])]
        c.path(points, f"line s{i}")
        for (px, py), (j, e) in zip(points, enumerate(r["layer_error"]), strict=True):
            c.dot(px, py, f"dot s{i}", f"{r['codec']}, layer {j}: {e:.2%}", 2.5)
        labels.place(*points[-1], r["codec"], f"label s{i}", sides=(1,))
    return c.render("error of attention outputs per layer")


def _percent(value: float) -> str:
    return f"{100 * value:g}%"


def heatmap(values: list[list[float]], rows: str, what: str, log_scale: bool = True) -> str:
    """values [L][heads]: layers across, heads down; darker is larger."""
    layers, heads = len(values), len(values[0])
    cell = min(28, 700 // layers)
    tall = max(12, min(cell, 300 // heads))
    c = Canvas(width=96 + cell * layers + 140, height=24 + tall * heads + 44, left=96, right=140)
    flat = [max(v, 1e-9) for layer in values for v in layer]
    low, high = min(flat), max(flat)
    low = min(low, high / 1.0001)
    shade = (log if log_scale else linear)(low, high, 0.06, 1.0)
    for i, layer in enumerate(values):
        for j, v in enumerate(layer):
            style = f"fill-opacity:{shade(max(v, 1e-9)):.2f}"
            tip = f"layer {i}, {rows} {j}: {v:.2%}"
            c.box(c.x0 + i * cell, c.y1 + j * tall, cell - 1, tall - 1, "cell", tip, style)
    for j in range(0, heads, max(1, heads // 8)):
        c.text(c.x0 - 8, c.y1 + (j + 0.5) * tall + 4, str(j), "tick", "end")
    for i, label in layer_ticks(layers):
        c.text(c.x0 + (i + 0.5) * cell, c.y1 + heads * tall + 16, label, "tick", "middle")
    c.text(c.x0 + layers * cell / 2, c.height - 6, "layer", "title", "middle")
    c.text(0, c.y1 + heads * tall / 2 + 4, rows, "title")
    _legend(c, c.x0 + layers * cell + 20, low, high)
    return c.render(what)


def _legend(c: Canvas, x: float, low: float, high: float) -> None:
    for i in range(5):
        c.box(x, c.y1 + 11 * (4 - i), 14, 10, "cell", style=f"fill-opacity:{0.06 + i * 0.235:.2f}")
    c.text(x + 20, c.y1 + 9, f"{high:.2%}", "tick")
    c.text(x + 20, c.y1 + 53, f"{low:.2%}", "tick")


def spectrum(values: list[list[list[float]]]) -> str:
    """Cumulative share of K's energy in its leading eigenvectors, a thin line per head."""
    c = Canvas(height=300, right=40)
    heads = [head for layer in values for head in layer]
    n = len(heads[0])
    x, y = linear(1, n, c.x0 + 8, c.x1), linear(0, 1, c.y0, c.y1)
    c.y_axis(y, [(v / 4, f"{25 * v}%") for v in range(5)], "share of K's energy")
    c.x_axis(x, [(i, str(i)) for i in range(1, n + 1)], "leading eigenvectors of E[kᵀk]")
    sums = []
    for head in heads:
        total, points = 0.0, []
        for v in head:
            total += v
            points.append(total)
        sums.append(points)
        c.path([(x(i + 1), y(p)) for i, p in enumerate(points)], "thin")
    median = [statistics.median(s[i] for s in sums) for i in range(n)]
    c.path([(x(i + 1), y(p)) for i, p in enumerate(median)], "line s0")
    c.text(x(n) - 6, y(median[-1]) - 8, "median head", "label s0", "end")
    return c.render("spectrum of K per head")


def token_norms(quantiles: list[list[float]], sinks: list[float]) -> str:
    """Spread of |k| over tokens per layer, relative to its median, and the largest sink."""
    c = Canvas(height=300, right=110)
    layers = len(quantiles)
    low = min(min(q) for q in quantiles) / 1.15
    high = max(max(q[-1], s) for q, s in zip(quantiles, sinks, strict=True)) * 1.15
    x, y = linear(0, max(1, layers - 1), c.x0 + 14, c.x1 - 14), log(low, high, c.y0, c.y1)
    c.y_axis(y, decades(low, high), "|k| / median (log)")
    c.x_axis(x, layer_ticks(layers), "layer")
    for i, (q, sink) in enumerate(zip(quantiles, sinks, strict=True)):
        tip = f"layer {i}: 1% {q[0]:.2f}, 25% {q[1]:.2f}, 75% {q[3]:.2f}, 99% {q[4]:.2f}"
        c.line(x(i), y(q[0]), x(i), y(q[4]), "whisker")
        c.box(x(i) - 5, y(q[3]), 10, y(q[1]) - y(q[3]), "bar", tip)
        c.dot(x(i), y(sink), "dot served", f"layer {i}, largest sink token: {sink:.2f}", 3)
    c.text(c.x1 + 2, y(quantiles[-1][4]) + 4, "1–99%", "label")
    c.text(c.x1 + 2, y(quantiles[-1][2]) + 4, "25–75%", "label ours")
    c.text(
        c.x1 + 2, min(y(sinks[-1]) + 4, y(quantiles[-1][4]) - 10), "largest sink", "label served"
    )
    return c.render("norm of K over tokens per layer")


def window_lines(rows: list[dict[str, Any]], name: str) -> str:
    """KL against one window's size; ``name`` is sink or recent."""
    rows = sorted(rows, key=lambda r: r[name])
    c = Canvas(width=420, height=260, right=30)
    kls = [max(r["kl"], _KL_FLOOR) for r in rows]
    low, high = min(kls) / 1.3, max(kls) * 1.3
    x, y = linear(0, len(rows) - 1, c.x0 + 20, c.x1 - 10), log(low, high, c.y0, c.y1)
    c.y_axis(y, decades(low, high), "KL (log)")
    c.x_axis(x, [(i, str(r[name])) for i, r in enumerate(rows)], f"{name} window, tokens")
    points = [(x(i), y(v)) for i, v in enumerate(kls)]
    c.path(points, "line s0")
    for point, r in zip(points, rows, strict=True):
        c.dot(*point, "dot ours", f"{r['sink']} + {r['recent']}: KL {r['kl']:.4f}", 4)
    return c.render(f"KL against the {name} window")
