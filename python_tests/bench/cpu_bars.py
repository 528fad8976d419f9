"""What the CPU decode kernel has to reach, judged from the rows of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from python_tests.bench.cpu_case import Setup

STOCK, LATER = "1.21.0", "1.32.0"
FLOAT = Setup("fp32", "fp32", "")
INT8, INT8_STATIC = Setup("fp32", "int8", "PER_TOKEN"), Setup("fp32", "int8", "PER_TENSOR")
INT4, INT4_STATIC = Setup("fp32", "int4", "PER_TOKEN"), Setup("fp32", "int4", "PER_TENSOR")
LONG = (16384, 65536)


class Measured(Protocol):
    """What a bar needs of a row."""

    wheel: int
    version: str
    setup: Setup
    tokens: int

    def percentile(self, q: float) -> float:
        """Milliseconds."""


@dataclass(frozen=True)
class Bar:
    """time of `left` * factor <= time of `right`, in ms; passed is None where a wheel or row is missing."""

    text: str
    tokens: int
    left: float | None
    right: float | None
    factor: float
    passed: bool | None


def find_bars(rows: Sequence[Measured], slack: float) -> list[Bar]:
    """All bars of every length that was measured. Times are medians; slack is for noise in 'not slower'."""

    def time_of(setup: Setup, tokens: int, version: str = "") -> float | None:
        found = [
            row.percentile(50)
            for row in rows
            if row.setup == setup
            and row.tokens == tokens
            and (row.wheel > 0 and row.version == version if version else row.wheel == 0)
        ]
        return found[0] if found else None

    def bar(text: str, tokens: int, left: float | None, right: float | None, factor: float) -> Bar:
        passed = None if left is None or right is None else left * factor <= right
        return Bar(text, tokens, left, right, factor, passed)

    bars, even = [], 1 / (1 + slack)
    for tokens in sorted({row.tokens for row in rows}):
        plain, int8, int4 = (time_of(setup, tokens) for setup in (FLOAT, INT8, INT4))
        if tokens in LONG:
            bars.append(bar("int8 PER_TOKEN at least 2.5x as fast as this wheel's fp32", tokens, int8, plain, 2.5))
            later = time_of(INT8_STATIC, tokens, LATER)
            bars.append(bar(f"int8 PER_TOKEN not slower than {LATER} int8 PER_TENSOR", tokens, int8, later, even))
            later = time_of(INT4_STATIC, tokens, LATER)
            bars.append(bar(f"int4 PER_TOKEN not slower than {LATER} int4 PER_TENSOR", tokens, int4, later, even))
        stock = time_of(FLOAT, tokens, STOCK)
        bars.append(bar(f"fp32 not slower than stock {STOCK}", tokens, plain, stock, even))
    return bars


def bar_lines(bars: Sequence[Bar]) -> list[str]:
    """One line per bar: verdict, both times, and their ratio."""
    lines = []
    for bar in bars:
        verdict = {True: "pass", False: "MISS", None: "not measured"}[bar.passed]
        times = "" if bar.left is None or bar.right is None else (
            f": {bar.left:.3f} ms against {bar.right:.3f} ms, {bar.right / bar.left:.2f}x"
        )  # fmt: skip
        lines.append(f"{verdict:12s} {bar.tokens:6d} tokens, {bar.text}{times}")
    return lines
