"""A line chart as SVG text: deterministic, without a package, readable on light and on dark pages.

The background is transparent. Colours are of medium lightness and series differ in dashes and markers, too, because a
page that embeds the picture does not tell it which theme it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 72, 236, 44, 52
INK, GRID = "#7d8590", "#7d859055"
COLORS = ("#2f81f7", "#d9730d", "#2da44e", "#bf4b8a", "#8a63d2", "#1b9aaa", "#b08800", "#cf4444")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
MARKERS = ("circle", "square", "diamond", "triangle")
_LABEL_STEP = 16.0


@dataclass(frozen=True)
class Series:
    """A line. points: (x, y), ascending in x. style: its colour, marker and dashes. model: thin, without markers."""

    label: str
    points: tuple[tuple[float, float], ...]
    style: int
    model: bool = False


@dataclass(frozen=True)
class Axis:
    """low, high: the ends. log: logarithmic. ticks: positions with their labels."""

    title: str
    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def part(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def tokens_text(value: float) -> str:
    """256, 4K, 1M in binary thousands."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if value >= unit and value % unit == 0:
            return f"{int(value // unit)}{name}"
    return f"{value:g}"


def doubling_axis(title: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis from the least to the largest value, with ticks at powers of two from the least on."""
    low, high = min(values), max(max(values), 2 * min(values))
    count = math.floor(math.log2(high / low) + 1e-9)
    step = 1 if count <= 9 else 2
    ticks = tuple((low * 2**i, tokens_text(low * 2**i)) for i in range(0, count + 1, step))
    return Axis(title, low, high, True, ticks)


def decimal_axis(title: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis a little wider than the values, with ticks at 1, 2 and 5 times powers of ten."""
    low, high = min(values) / 1.25, max(values) * 1.25
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    places = [m * 10.0**p for p in powers for m in ((1, 2, 5) if high / low < 2000 else (1,))]
    return Axis(title, low, high, True, tuple((v, f"{v:g}") for v in places if low <= v <= high))


def percent_axis(title: str) -> Axis:
    """0 to 100 %."""
    return Axis(title, 0, 100, False, tuple((float(i), f"{i} %") for i in range(0, 101, 20)))


def _marker(kind: str, x: float, y: float, color: str) -> str:
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'
    if kind == "square":
        return f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4" fill="{color}"/>'
    if kind == "diamond":
        shape = [(0.0, -4.6), (4.6, 0.0), (0.0, 4.6), (-4.6, 0.0)]
    else:
        shape = [(0.0, -4.4), (4.2, 3.2), (-4.2, 3.2)]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shape)
    return f'<polygon points="{points}" fill="{color}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", color: str = INK, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{extra}>{escape(text)}</text>'


def spread(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least a label's height apart, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    placed = [0.0] * len(wanted)
    at = -math.inf
    for i in order:
        at = placed[i] = max(wanted[i], at + _LABEL_STEP, low)
    at = math.inf
    for i in reversed(order):
        at = placed[i] = min(placed[i], at - _LABEL_STEP, high)
    return placed


class Chart:
    """One plot area with labels at the ends of the lines."""

    def __init__(self, title: str, x: Axis, y: Axis, series: Sequence[Series], note: str = "") -> None:
        self.title, self.x, self.y, self.series, self.note = title, x, y, list(series), note

    def _at(self, point: tuple[float, float]) -> tuple[float, float]:
        left, bottom = LEFT, HEIGHT - BOTTOM
        across = left + self.x.part(point[0]) * (WIDTH - RIGHT - left)
        return across, bottom - self.y.part(point[1]) * (bottom - TOP)

    def _axes(self) -> list[str]:
        lines, right, bottom = [], WIDTH - RIGHT, HEIGHT - BOTTOM
        for value, text in self.y.ticks:
            _, y = self._at((self.x.low, value))
            lines.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>')
            lines.append(_text(LEFT - 8, y + 4, text, anchor="end"))
        for value, text in self.x.ticks:
            x, _ = self._at((value, self.y.low))
            lines.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{GRID}"/>')
            lines.append(_text(x, bottom + 18, text, anchor="middle"))
        lines.append(_text((LEFT + right) / 2, HEIGHT - 12, self.x.title, anchor="middle"))
        turned = f' transform="rotate(-90 16 {(TOP + bottom) / 2:.1f})"'
        lines.append(_text(16, (TOP + bottom) / 2, self.y.title, anchor="middle", extra=turned))
        lines.append(_text(LEFT, 24, self.title, extra=' font-size="15" font-weight="600"'))
        return lines

    def _line(self, series: Series) -> list[str]:
        color = COLORS[series.style % len(COLORS)]
        points = [self._at(point) for point in series.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = "4 4" if series.model else DASHES[series.style // len(COLORS) % len(DASHES)]
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        width, opacity = (1.3, ' opacity="0.8"') if series.model else (2, "")
        lines = [f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash}{opacity}/>']
        if not series.model:
            kind = MARKERS[series.style % len(MARKERS)]
            lines += [_marker(kind, x, y, color) for x, y in points]
        return [f"<g><title>{escape(series.label)}</title>", *lines, "</g>"]

    def _labels(self) -> list[str]:
        named = [s for s in self.series if s.label and not s.model]
        ends = [(series, self._at(series.points[-1])) for series in named]
        right = WIDTH - RIGHT
        # A line that ends early has its name at its end: a leader to the margin would cross the others.
        early = [(series, at) for series, at in ends if at[0] < right - 24]
        late = [(series, at) for series, at in ends if at[0] >= right - 24]
        heights = spread([y for _, (_, y) in late], TOP + 4, HEIGHT - BOTTOM - 2)
        lines = []
        for series, (x, y) in early:
            lines.append(_text(x, y - 9, series.label, anchor="middle", color=COLORS[series.style % len(COLORS)]))
        for (series, (x, y)), height in zip(late, heights, strict=True):
            color = COLORS[series.style % len(COLORS)]
            lines.append(f'<path d="M{x + 5:.1f} {y:.1f}L{right + 10} {height:.1f}" stroke="{color}" opacity="0.5"/>')
            lines.append(_text(right + 14, height + 4, series.label, color=color))
        if self.note:
            lines.append(_text(right + 14, HEIGHT - 12, self.note))
        return lines

    def svg(self) -> str:
        """The file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'role="img" font-family="system-ui, sans-serif" font-size="12" fill="none">'
        )
        body = [f"<title>{escape(self.title)}</title>", *self._axes()]
        for series in self.series:
            body += self._line(series)
        return "\n".join([head, *body, *self._labels(), "</svg>"]) + "\n"
