# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Memory over context length as SVG text: transparent, without a package, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 72, 150, 48, 56
# The page does not tell its theme: of medium lightness, 4.2 times that of a dark page and a 4.2th of a white one.
INK, GRID, BAND = "#727a85", "#727a8540", "#727a8520"
COLORS = ("#d14b4b", "#1873f6", "#268b42", "#8b64d2")
_LABEL_WIDTH, _LABEL_HEIGHT = 46.0, 14.0
DASHES = ("", "9 4", "3 3", "12 3 3 3")


@dataclass(frozen=True)
class Line:
    """A cache kind. per_token: bytes. fits: tokens at which it meets each device's memory; 0 for never.

    end: what stands beside the line where it leaves the plot at the right.
    """

    label: str
    per_token: int
    fits: tuple[int, ...]
    end: str = ""


def short_count(value: float) -> str:
    """950, 12K, 1.3M in decimal thousands."""
    for unit, name in ((1e6, "M"), (1e3, "K")):
        if value >= unit:
            scaled = value / unit
            return f"{scaled:.0f}{name}" if scaled >= 100 or scaled == int(scaled) else f"{scaled:.1f}{name}"
    return f"{value:.0f}"


def round_steps(top: float, count: int = 6) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, from 0 to at most `top`."""
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [i * step for i in range(math.floor(top / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = INK, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{extra}>{escape(text)}</text>'


def _drawn(
    line: Line, style: int, fixed: int, at: Callable[[float, float], tuple[float, float]], extent: tuple[int, int]
) -> list[str]:
    """The line from no tokens to the edge of the plot, named in the legend, with its crossings marked."""
    tokens, memory = extent
    color, dash = COLORS[style % len(COLORS)], DASHES[style % len(DASHES)]
    end = min(tokens, max(0, memory - fixed) // line.per_token)
    (x0, y0), (x1, y1) = at(0, fixed), at(end, fixed + end * line.per_token)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{color}" stroke-width="2"{dashed}/>']
    for count in line.fits:
        if 0 < count <= tokens:
            x, y = at(count, fixed + count * line.per_token)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
    x, y = WIDTH - 340 + 112 * style, 26
    parts.append(f'<path d="M{x} {y - 4}h26" stroke="{color}" stroke-width="2"{dashed}/>')
    parts.append(_text(x + 32, y, line.label, color=color))
    return [f"<g><title>{escape(line.label)}</title>", *parts, "</g>"]


def _counts(
    lines: Sequence[Line], fixed: int, at: Callable[[float, float], tuple[float, float]], tokens: int
) -> list[str]:
    """Tokens beside each crossing; where crossings lie close, the next one's stands a line lower."""
    parts = []
    for device in range(len(lines[0].fits)):
        last, row = -math.inf, 0
        for style, line in enumerate(lines):
            if 0 < (count := line.fits[device]) <= tokens:
                x, y = at(count, fixed + count * line.per_token)
                row = row + 1 if x - last < _LABEL_WIDTH else 0
                last = x
                color = COLORS[style % len(COLORS)]
                parts.append(_text(x + 6, y + 15 + _LABEL_HEIGHT * row, short_count(count), color=color))
    return parts


def _margin(labels: Sequence[tuple[float, str, str]]) -> list[str]:
    """Labels (y, text, colour) beside the right edge, at their height or below the one above."""
    parts, last = [], -math.inf
    for y, text, color in sorted(labels):
        last = max(y + 4, last + _LABEL_HEIGHT)
        parts.append(_text(WIDTH - RIGHT + 8, last, text, color=color))
    return parts


def draw(
    title: str, lines: Sequence[Line], fixed: int, devices: Sequence[tuple[int, str]], extent: tuple[int, int]
) -> str:
    """The file's text. fixed: bytes at no tokens. devices: bytes and label. extent: tokens and bytes at the ends."""
    tokens, memory = extent
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / tokens * (right - LEFT), bottom - y / memory * (bottom - TOP)

    body = [f"<title>{escape(title)}</title>", _text(LEFT, 26, title, extra=' font-size="15" font-weight="600"')]
    for value in round_steps(memory / 1e9):
        _, y = at(0, value * 1e9)
        body += [f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>', _text(LEFT - 8, y + 4, f"{value:g}", "end")]
    for value in round_steps(tokens):
        x, _ = at(value, 0)
        body += [
            f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{GRID}"/>',
            _text(x, bottom + 18, short_count(value), "middle"),
        ]
    body.append(_text((LEFT + right) / 2, HEIGHT - 14, "tokens of context", "middle"))
    middle = (TOP + bottom) / 2
    body.append(_text(18, middle, "GB", "middle", extra=f' transform="rotate(-90 18 {middle:.1f})"'))
    _, floor = at(0, fixed)
    if fixed < memory:
        body.append(
            f'<rect x="{LEFT}" y="{floor:.1f}" width="{right - LEFT}" height="{bottom - floor:.1f}" fill="{BAND}"/>'
        )
        body.append(_text(right - 6, bottom - 6, "weights and scratch", "end"))
    margin = []
    for size, label in devices:
        _, y = at(0, size)
        body.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{INK}" stroke-width="1.5" stroke-dasharray="2 4"/>')
        margin.append((y, label, INK))
    for i, line in enumerate(lines):
        body += _drawn(line, i, fixed, at, extent)
        if line.end:
            margin.append((at(0, fixed + tokens * line.per_token)[1], line.end, COLORS[i % len(COLORS)]))
    body += _counts(lines, fixed, at, tokens)
    body += _margin(margin)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12" fill="none">'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"
