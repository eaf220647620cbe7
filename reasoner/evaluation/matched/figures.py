"""Pictures of a report as SVG in its page: lines over a logarithmic axis, with intervals, labels and a Pareto front.

Colours are classes of the page, so that they fit its light and its dark theme; shapes of the points tell the lines
apart without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 74, 210, 14, 46
LABEL_GAP = 16
"""Pixels between two labels."""
MAX_TICKS = 8
SERIES_CLASSES = 8
_SHAPES = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0",
    "M-4.5 -4.5h9v9h-9z",
    "M0 -6l6 6l-6 6l-6 -6z",
    "M0 -6l5.5 10h-11z",
    "M0 6l5.5 -10h-11z",
    "M-5 -5l10 10M5 -5l-10 10",
    "M0 -6v12M-6 0h12",
    "M-6 0h12",
)
"""Outlines of points around the origin: disc, square, diamond, triangles, crosses, bar."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a line with the interval of its value, and a text that is shown where the pointer rests."""

    x: float
    value: float
    low: float
    high: float
    note: str


@dataclass(frozen=True, slots=True)
class Series:
    """A line; ``is_reference`` draws it grey and dotted, without points."""

    name: str
    points: Sequence[Point]
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """Lines in one picture. ``front`` is the way along the Pareto front, drawn as steps."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    front: Sequence[tuple[float, float]] = field(default=())

    def draw(self) -> str:
        """Return the picture as an ``svg`` element."""
        points = [point for line in self.series for point in line.points]
        low, high = min(point.x for point in points), max(point.x for point in points)
        if low == high:
            low, high = low / 2, high * 2
        top = min(1.0, math.ceil(10 * max(point.high for point in points)) / 10)
        start, end = math.log(low), math.log(high)

        def place_x(value: float) -> float:
            return LEFT + 12 + (math.log(value) - start) / (end - start) * (WIDTH - LEFT - RIGHT - 24)

        def place_y(value: float) -> float:
            return HEIGHT - BOTTOM - value / max(top, 1e-9) * (HEIGHT - TOP - BOTTOM)

        parts = [self._draw_axes(low, high, top, place_x=place_x, place_y=place_y)]
        if len(self.front) > 1:
            parts.append(f'<path class="front" d="{_draw_steps(self.front, place_x, place_y)}"/>')
        styled = list(zip(self.series, _number_lines(self.series), strict=True))
        parts += [_draw_line(line, number, place_x, place_y) for line, number in styled]
        parts += _draw_labels(styled, place_x, place_y)
        label = escape(self.title, quote=True)
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'

    def _draw_axes(
        self,
        low: float,
        high: float,
        top: float,
        place_x: Callable[[float], float],
        place_y: Callable[[float], float],
    ) -> str:
        right, base = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = []
        for tenth in range(round(top * 10) + 1):
            if top > 0.5 and tenth % 2:
                continue
            y = place_y(tenth / 10)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
            parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{tenth * 10} %</text>')
        for value in choose_ticks(low, high):
            x = place_x(value)
            parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{base}"/>')
            parts.append(f'<text class="tick middle" x="{x:.1f}" y="{base + 18}">{shorten_number(value)}</text>')
        middle = (LEFT + right) / 2
        parts.append(f'<text class="axis middle" x="{middle}" y="{HEIGHT - 8}">{escape(self.x_label)}</text>')
        turned = f'transform="translate(16 {(TOP + base) / 2}) rotate(-90)"'
        parts.append(f'<text class="axis middle" {turned}>{escape(self.y_label)}</text>')
        return "".join(parts)


def choose_ticks(low: float, high: float) -> list[float]:
    """Return at most ``MAX_TICKS`` round numbers of an axis from ``low`` to ``high``, or both ends."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors, step in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 4)):
        ticks = [factor * 10.0**decade for decade in decades[::step] for factor in factors]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) <= MAX_TICKS:
            break
    return ticks if len(ticks) > 1 else [low, high]


def shorten_number(value: float) -> str:
    """Return a number with few characters: ``2k``, ``1.5M``, ``0.002``, ``3e+12``."""
    for size, unit in ((1e12, ""), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value:.3g}" if not unit else f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _number_lines(series: Sequence[Series]) -> list[int]:
    """Return the number of each line's colour and shape; references have none of their own."""
    numbers, last = [], -1
    for line in series:
        last += not line.is_reference
        numbers.append(-1 if line.is_reference else last)
    return numbers


def _draw_line(line: Series, number: int, place_x: Callable[[float], float], place_y: Callable[[float], float]) -> str:
    path = "L".join(f"{place_x(point.x):.1f} {place_y(point.value):.1f}" for point in line.points)
    if line.is_reference:
        return f'<g class="reference"><path class="line" d="M{path}"/></g>'
    parts = [f'<path class="line" d="M{path}"/>']
    for point in line.points:
        x, y = place_x(point.x), place_y(point.value)
        parts.append(f'<path class="interval" d="M{x:.1f} {place_y(point.low):.1f}V{place_y(point.high):.1f}"/>')
        shape = _SHAPES[number % len(_SHAPES)]
        parts.append(
            f'<path class="point" transform="translate({x:.1f} {y:.1f})" d="{shape}">'
            f"<title>{escape(point.note)}</title></path>"
        )
    return f'<g class="s{number % SERIES_CLASSES}">{"".join(parts)}</g>'


def _draw_labels(
    styled: Sequence[tuple[Series, int]], place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> list[str]:
    """Return the names beside the ends of the lines, moved apart where they would overlap."""
    ends = sorted(styled, key=lambda item: -item[0].points[-1].value)
    heights: list[float] = []
    for line, _ in ends:
        wanted = place_y(line.points[-1].value)
        heights.append(max(wanted, heights[-1] + LABEL_GAP if heights else TOP + 6))
    limit = float(HEIGHT - BOTTOM)
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], limit)
        limit = heights[index] - LABEL_GAP
    parts = []
    for (line, number), height in zip(ends, heights, strict=True):
        end, left = line.points[-1], WIDTH - RIGHT + 22
        kind = "reference" if line.is_reference else f"s{number % SERIES_CLASSES}"
        lead = f"M{place_x(end.x) + 7:.1f} {place_y(end.value):.1f}L{left - 18} {height:.1f}"
        outline, at = _SHAPES[number % len(_SHAPES)], f"translate({left - 9} {height:.1f})"
        shape = "" if line.is_reference else f'<path class="point" transform="{at}" d="{outline}"/>'
        parts.append(
            f'<g class="{kind}"><path class="lead" d="{lead}"/>{shape}'
            f'<text class="name" x="{left}" y="{height + 4:.1f}">{escape(line.name)}</text></g>'
        )
    return parts


def _draw_steps(
    front: Sequence[tuple[float, float]], place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> str:
    (x, value), *rest = front
    path = f"M{place_x(x):.1f} {place_y(value):.1f}"
    for x, value in rest:
        path += f"H{place_x(x):.1f}V{place_y(value):.1f}"
    return path
