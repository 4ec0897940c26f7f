"""A few lines of SVG: scales, axes, marks. Colours are CSS variables of ``page.STYLE``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

Scale = Callable[[float], float]


def linear(low: float, high: float, start: float, stop: float) -> Scale:
    span = (high - low) or 1.0
    return lambda v: start + (v - low) / span * (stop - start)


def log(low: float, high: float, start: float, stop: float) -> Scale:
    inner = linear(math.log(low), math.log(high), start, stop)
    return lambda v: inner(math.log(max(v, 1e-12)))


@dataclass
class Canvas:
    """An SVG under construction; y grows downwards, margins surround the plotting area."""

    width: int = 860
    height: int = 360
    left: int = 64
    right: int = 24
    top: int = 16
    bottom: int = 44
    parts: list[str] = field(default_factory=list)

    @property
    def x0(self) -> int:
        return self.left

    @property
    def x1(self) -> int:
        return self.width - self.right

    @property
    def y0(self) -> int:
        return self.height - self.bottom

    @property
    def y1(self) -> int:
        return self.top

    def line(self, x1, y1, x2, y2, css: str = "grid") -> None:
        coordinates = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line class="{css}" {coordinates}/>')

    def path(self, points: Sequence[tuple[float, float]], css: str) -> None:
        steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path class="{css}" d="M{steps}"/>')

    def dot(self, x, y, css: str, tip: str = "", radius: float = 5) -> None:
        self._mark(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"', "circle", tip)

    def box(self, x, y, width, height, css: str, tip: str = "", style: str = "") -> None:
        style = f' style="{style}"' if style else ""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0, width):.1f}" height="{max(0, height):.1f}"'
        self._mark(f'<rect class="{css}" {size}{style}', "rect", tip)

    def text(self, x, y, words: str, css: str = "label", anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{css}" {place}>{escape(words)}</text>')

    def x_axis(self, scale: Scale, ticks, title: str) -> None:
        """``ticks``: (value, label) pairs."""
        self.line(self.x0, self.y0, self.x1, self.y0, "axis")
        for value, label in ticks:
            self.text(scale(value), self.y0 + 16, label, "tick", "middle")
        self.text((self.x0 + self.x1) / 2, self.height - 6, title, "title", "middle")

    def y_axis(self, scale: Scale, ticks, title: str) -> None:
        for value, label in ticks:
            y = scale(value)
            self.line(self.x0, y, self.x1, y)
            self.text(self.x0 - 8, y + 4, label, "tick", "end")
        self.parts.append(
            f'<text class="title" text-anchor="middle" transform="translate(14 '
            f'{(self.y0 + self.y1) / 2:.0f}) rotate(-90)">{escape(title)}</text>'
        )

    def render(self, label: str) -> str:
        body = "".join(self.parts)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(label)}">{body}</svg>'
        )

    def _mark(self, start: str, tag: str, tip: str) -> None:
        end = f"><title>{escape(tip)}</title></{tag}>" if tip else "/>"
        self.parts.append(start + end)


def decades(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks of a log axis: powers of ten, and 2 and 5 times them on short axes."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if high / low < 200 else (1,)
    values = [f * 10.0**e for e in range(first, last + 1) for f in factors]
    return [(v, f"{v:g}") for v in values if low * 0.999 <= v <= high * 1.001]


def layer_ticks(layers: int) -> list[tuple[int, str]]:
    step = max(1, math.ceil(layers / 16))
    return [(i, str(i)) for i in range(0, layers, step)]


class Labels:
    """Places text beside marks so that it covers neither marks nor other text."""

    def __init__(self, canvas: Canvas) -> None:
        self.canvas = canvas
        self.taken: list[tuple[float, float, float, float]] = []

    def block(self, x: float, y: float, radius: float = 6) -> None:
        self.taken.append((x - radius, y - radius, x + radius, y + radius))

    def place(self, x: float, y: float, words: str, css: str, sides=(1, -1)) -> None:
        width = 6.6 * len(words)
        for dx, dy in (o for o in _OFFSETS if math.copysign(1, o[0]) in sides):
            left = x + dx if dx > 0 else x + dx - width
            box = (left, y + dy - 8, left + width, y + dy + 4)
            inside = self.canvas.x0 < box[0] and box[2] < self.canvas.width
            if inside and not any(_overlap(box, t) for t in self.taken):
                break
        else:
            return  # the tooltip has it
        self.taken.append(box)
        if abs(dy - 4) > 6 or abs(dx) > 12:
            self.canvas.line(x, y, x + dx - math.copysign(2, dx), y + dy - 3, "leader")
        self.canvas.text(left, y + dy, words, css)


_OFFSETS = [
    (side * dx, 4 + dy)
    for dx in (10, 22, 40, 64)
    for dy in (0, -12, 12, -24, 24, -38, 38)
    for side in (1, -1)
]


def _overlap(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
