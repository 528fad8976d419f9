"""A model of a decode step's time to hold beside the measurement: a fixed part, and the bytes at a read's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from python_tests.bench.bench_rows import Row


@dataclass(frozen=True)
class TimeModel:
    """time = fixed_us + bytes / read bandwidth. fixed_us: launches, ramp-up, tail and merge of the smallest call."""

    fixed_us: float
    read_gb_s: float

    def us(self, size: int) -> float:
        """Microseconds of a call that reads `size` bytes."""
        return self.fixed_us + size / self.read_gb_s / 1e3


def fit(rows: Sequence[Row]) -> TimeModel:
    """The fixed part is what the call with the fewest bytes takes beyond reading them. Raises ValueError for none."""
    ran = [row for row in rows if row.ran and row.read_gb_s > 0]
    if not ran:
        msg = "no row with a time and a read bandwidth"
        raise ValueError(msg)
    smallest = min(ran, key=lambda row: (row.bytes, row.median))
    return TimeModel(max(0.0, smallest.median - smallest.bytes / smallest.read_gb_s / 1e3), smallest.read_gb_s)


def comparison(rows: Sequence[Row]) -> list[str]:
    """A Markdown table of measurement and model, by batch and length."""
    model = fit(rows)
    lines = [
        f"time = {model.fixed_us:.2f} us + bytes / {model.read_gb_s:.0f} GB/s",
        "",
        "| batch | tokens | MB | measured, us | model, us | measured / model | of read |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted((row for row in rows if row.ran), key=lambda row: (row.batch, row.tokens)):
        wanted = model.us(row.bytes)
        cells = (
            f"{row.batch}", f"{row.tokens:,}", f"{row.bytes / 1e6:.1f}", f"{row.median:.2f}", f"{wanted:.2f}",
            f"{row.median / wanted:.2f}", f"{row.of_read:.0%}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines
