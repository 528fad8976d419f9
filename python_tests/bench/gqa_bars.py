"""What the CUDA kernels have to reach, judged from rows: python -m python_tests.bench.gqa_bars FILE... [--check].

Files are of bench_gqa or bench_cuda_kernels (row_adapters.py says which others). Every wheel of this repository, and
the kernels alone, are judged by themselves. A time that a bar compares with comes from a stock wheel of the same files,
else from recorded figures of one, else from this wheel's own unquantized operator; the table says which.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from python_tests.bench.bench_rows import Row
from python_tests.bench.row_adapters import load, recorded_rows

BASE = "llama3-8b"
# The read bandwidth at which the bars in microseconds were set, GB/s.
BAR_READ_GB_S = 4370.0
# (batch, tokens): microseconds of a whole call, at most; 8-bit formats and int4.
DECODE_8 = {
    (1, 1024): 6.0, (1, 4096): 8.0, (1, 16384): 14.0, (1, 65536): 40.0, (1, 131072): 72.0, (16, 8192): 72.0,
    (16, 1024): 13.0,
}  # fmt: skip
DECODE_4 = {(1, 1024): 6.0, (1, 4096): 7.0, (1, 16384): 11.0, (1, 65536): 24.0, (1, 131072): 42.0}
AIM_8 = {(1, 1024): 5.0, (1, 4096): 6.0, (1, 16384): 12.0, (1, 65536): 36.0, (1, 131072): 67.0}
SHAPE_FACTOR, BFLOAT16_FACTOR, CHUNK_SPEED = 1.25, 1.05, 0.85
CHUNKS = (512, 2048)
CHUNK_PASTS = (32768,)


@dataclass(frozen=True)
class Bar:
    """`measured` has to be at most `limit`, both microseconds; passed is None where either is missing.

    group: which rule; row: what was measured; beside: where the limit comes from.
    """

    group: str
    row: str
    measured: float | None
    limit: float | None
    beside: str = ""

    @property
    def passed(self) -> bool | None:
        """The verdict."""
        return None if self.measured is None or self.limit is None else self.measured <= self.limit


def _same_call(a: Row, b: Row) -> bool:
    """The same shape and lengths; formats and types may differ."""

    def key(row: Row) -> tuple[object, ...]:
        shape = (row.heads, row.kv_heads, row.head_size, row.window, row.sinks)
        return (*shape, row.batch, row.tokens, row.seq, row.prompt, row.provider)

    return key(a) == key(b)


def _name(row: Row) -> str:
    """A row in words."""
    new = f", {row.seq:,} new" if row.seq > 1 else ""
    return f"{row.site}: {row.shape}, B {row.batch}, {row.tokens:,} tokens{new}, {row.format}"


class _Judge:
    """Bars of one wheel, or of the kernels alone. mine: its rows; others: all rows of stock wheels."""

    def __init__(self, mine: Sequence[Row], others: Sequence[Row]) -> None:
        self.mine, self.others = mine, others
        self.tokenwise = [r for r in mine if r.k_mode == r.v_mode == "PER_TOKEN"]
        self.base = [r for r in self.tokenwise if self._is_base(r) and r.seq == 1]

    @staticmethod
    def _is_base(row: Row) -> bool:
        plain = row.window < 0 and not row.sinks and row.activation == "fp16"
        return (row.heads, row.kv_heads, row.head_size) == (32, 8, 128) and plain

    def decode(self) -> list[Bar]:
        """Microseconds by length, and the aim beyond."""
        bars = []
        for row in self.base:
            limits = DECODE_4 if row.cache == "int4" else DECODE_8
            size = (row.batch, row.tokens)
            for group, table in (("decode", limits), ("aim", {} if row.cache == "int4" else AIM_8)):
                if size in table:
                    bars.append(Bar(group, _name(row), row.median, table[size], f"{table[size]:g} us"))
        return bars

    def _base_time(self, row: Row) -> float | None:
        """What a 32/8/128 decode row of the same format, with the same bytes, takes: between measured ones."""
        known = sorted(
            {r.bytes: r.median for r in self.base if r.cache == row.cache and r.batch == 1 and not r.prompt}.items()
        )
        if len(known) < 2 or not known[0][0] <= row.bytes <= known[-1][0]:
            return None
        sizes, times = zip(*known, strict=True)
        return float(np.interp(row.bytes, sizes, times))

    def shapes(self) -> list[Bar]:
        """Other shapes, and bursts of four, against the base with the same bytes."""
        bars = []
        for row in self.tokenwise:
            burst = self._is_base(row) and row.seq == 4
            other = not self._is_base(row) and row.activation == "fp16" and row.seq == 1
            if row.prompt or not (burst or other):
                continue
            time = self._base_time(row)
            beside = "32/8 x 128 with the same bytes" + ("" if time is None else f": {time:.2f} us x {SHAPE_FACTOR}")
            limit = None if time is None else SHAPE_FACTOR * time
            bars.append(Bar("shape", _name(row), row.median, limit, beside))
        return bars

    def bfloat16(self) -> list[Bar]:
        """bfloat16 activations against float16's."""
        bars = []
        for row in [r for r in self.mine if r.quantized and r.activation == "bf16"]:
            half = [r for r in self.mine if _same_call(r, row) and r.format == row.format and r.activation == "fp16"]
            limit = BFLOAT16_FACTOR * half[0].median if half else None
            beside = f"fp16: {half[0].median:.2f} us x {BFLOAT16_FACTOR}" if half else "fp16 not measured"
            bars.append(Bar("bfloat16", _name(row), row.median, limit, beside))
        return bars

    def stock_time(self, row: Row) -> tuple[float, str] | None:
        """The unquantized fp16 operator on the same call, and whose."""
        live = [r for r in self.others if r.harness != "recorded"]
        recorded = [r for r in self.others if r.harness == "recorded"]
        for rows in (live, recorded, self.mine):
            found = [r for r in rows if _same_call(r, row) and r.cache == "fp16" and r.activation == "fp16"]
            if found:
                best = min(found, key=lambda r: r.median)
                run = ", another run" if best.harness == "recorded" else ""
                whose = best.site if best.version in best.site else f"{best.site} {best.version}"
                return best.median, f"{whose} fp16{run}: {best.median:.2f} us"
        return None

    def stock(self) -> list[Bar]:
        """No configuration slower than stock fp16; chunks at a part of its speed; prompts with the quantize pass."""
        bars = []
        for row in [r for r in self.mine if r.quantized and r.activation == "fp16"]:
            found = self.stock_time(row)
            if found is None:
                continue
            group, limit, beside = "not slower than stock fp16", found[0], found[1]
            if row.prompt:
                passes = row.parts.get("append")
                group, limit = "prompt, beside its quantize pass", found[0] + (passes or 0.0)
                beside += f" + append {passes:.2f} us" if passes else ", append not known"
            elif row.seq in CHUNKS and {row.tokens, row.tokens - row.seq} & set(CHUNK_PASTS):
                group, limit = "chunk", found[0] / CHUNK_SPEED
                beside += f" / {CHUNK_SPEED}"
            bars.append(Bar(group, _name(row), row.median, limit, beside))
        return bars


def find_bars(rows: Sequence[Row]) -> list[Bar]:
    """All bars that these rows speak to."""
    ran = [row for row in rows if row.ran and row.provider == "cuda"]
    others = [row for row in ran if not row.ours]
    bars: list[Bar] = []
    for site in dict.fromkeys((row.harness, row.site) for row in ran if row.ours):
        judge = _Judge([row for row in ran if row.ours and (row.harness, row.site) == site], others)
        rules: tuple[Callable[[], list[Bar]], ...] = (judge.decode, judge.shapes, judge.bfloat16, judge.stock)
        for rule in rules:
            bars += rule()
    return bars


def bandwidth_line(rows: Iterable[Row]) -> list[str]:
    """The run's read bandwidth beside the bars'."""
    found = sorted({(r.device, round(r.read_gb_s), r.read_method) for r in rows if r.ours and r.read_gb_s})
    return [
        f"{device}: read bandwidth {rate} GB/s ({method}), {rate / BAR_READ_GB_S:.3f} of that of the bars"
        for device, rate, method in found
    ]


def bar_lines(bars: Sequence[Bar]) -> list[str]:
    """A Markdown table, in words where there is none."""
    if not bars:
        return ["no bar speaks to these rows"]
    lines = ["| verdict | bar | row | us | at most | of it | beside |", "|---|---|---|---:|---:|---:|---|"]
    for bar in bars:
        verdict = {True: "PASS", False: "MISS", None: "not measured"}[bar.passed]
        if bar.group == "aim":
            verdict = {"PASS": "reached", "MISS": "not reached"}.get(verdict, verdict)
        cells = ["" if x is None else f"{x:.2f}" for x in (bar.measured, bar.limit)]
        part = f"{bar.measured / bar.limit:.2f}" if bar.measured is not None and bar.limit else ""
        lines.append("| " + " | ".join([verdict, bar.group, bar.row, *cells, part, bar.beside]) + " |")
    judged = [bar.passed for bar in bars if bar.group != "aim"]
    counts = (judged.count(True), judged.count(False), judged.count(None))
    return [*lines, "", "{} PASS, {} MISS, {} not measured".format(*counts)]


def main() -> int:
    """Print the bars of some files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--no-recorded", action="store_true", help="without the recorded figures of stock wheels")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args()
    rows = [row for path in arguments.files for row in load(path).rows]
    bars = find_bars([*rows, *([] if arguments.no_recorded else recorded_rows())])
    print("\n".join([*bandwidth_line(rows), "", *bar_lines(bars)]))
    return int(arguments.check and any(bar.passed is False for bar in bars if bar.group != "aim"))


if __name__ == "__main__":
    sys.exit(main())
