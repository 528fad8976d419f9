"""Pictures from benchmark files: python -m python_tests.bench.plot FILE... --out docs/pictures [--batch 1].

time-per-layer.svg, bandwidth.svg and memory.svg are over the context, at one shape and batch, a line for every wheel
and cache; scaling.svg is int8 over context and batch beside time_model.py's model. Without rows a picture is not made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from python_tests.bench.bench_rows import Row
from python_tests.bench.gqa_case import PRESETS, Heads
from python_tests.bench.row_adapters import load
from python_tests.bench.svg_chart import Chart, Series, decimal_axis, doubling_axis, percent_axis
from python_tests.bench.time_model import comparison, fit

LAYERS_OF_A_MODEL = 32


def label(row: Row) -> str:
    """A line's name; a star where the figures are another run's."""
    site = f"{row.site} *" if row.harness == "recorded" else row.site
    return f"{site}, {row.format}".replace("PER_", "per ").replace("TOKEN", "token").replace(
        "TENSOR", "tensor").replace("CHANNEL", "channel")  # fmt: skip


def steps(rows: Sequence[Row], preset: str, batch: int) -> list[Row]:
    """Decode rows of one token at a shape."""
    heads = PRESETS[preset]
    return [
        row for row in rows
        if row.seq == 1 and not row.prompt and row.batch == batch and row.activation in ("fp16", "fp32")
        and Heads(row.heads, row.kv_heads, row.head_size, row.window, row.sinks) == heads
    ]  # fmt: skip


def lines(rows: Sequence[Row], value: Callable[[Row], float], name: Callable[[Row], str] = label) -> list[Series]:
    """A series of each name, sorted by it; the last row of a length counts."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(name(row), {})[row.tokens] = value(row)
    return [
        Series(text, tuple(sorted((float(x), y) for x, y in found[text].items())), number)
        for number, text in enumerate(sorted(found))
    ]


def merged(series: Sequence[Series]) -> list[Series]:
    """Lines that coincide as one, with all their names and the points of the longest."""
    found: list[Series] = []
    for one in series:
        number = next((i for i, other in enumerate(found) if coincide(one, other)), len(found))
        if number == len(found):
            found.append(replace(one, style=number))
        else:
            other = found[number]
            points = max(other.points, one.points, key=len)
            found[number] = replace(other, label=joined(other.label, one.label), points=points)
    return found


def coincide(a: Series, b: Series) -> bool:
    """Whether two lines lie within a hundredth of each other wherever both have points."""
    first, second = dict(a.points), dict(b.points)
    common = first.keys() & second.keys()
    return bool(common) and all(0.99 < first[x] / second[x] < 1.01 for x in common)


def joined(first: str, second: str) -> str:
    """fp8 per token + int8 per token: fp8, int8 per token; with other modes both in full."""
    name, _, mode = second.partition(" ")
    return f"{first.removesuffix(f' {mode}')}, {name} {mode}" if first.endswith(f" {mode}") else f"{first}, {second}"


def note(rows: Sequence[Row]) -> str:
    """What the star means."""
    return "* recorded in another run" if any(row.harness == "recorded" for row in rows) else ""


def time_chart(rows: Sequence[Row], title: str) -> Chart:
    """Microseconds of a layer over the context."""
    series = lines(rows, lambda row: row.median)
    x = doubling_axis("tokens in the cache", [row.tokens for row in rows])
    return Chart(title, x, decimal_axis("microseconds", [row.median for row in rows]), series, note(rows))


def bandwidth_chart(rows: Sequence[Row], title: str) -> Chart:
    """Percent of the read bandwidth over the context."""
    series = lines(rows, lambda row: min(100.0, 100 * row.of_read))
    x = doubling_axis("tokens in the cache", [row.tokens for row in rows])
    return Chart(title, x, percent_axis("of read bandwidth"), series, note(rows))


def memory_chart(rows: Sequence[Row], title: str) -> Chart:
    """GiB of all layers' caches with their scales over the context. What it is does not depend on the wheel."""

    def size(row: Row) -> float:
        return LAYERS_OF_A_MODEL * row.cache_bytes / 2**30

    def name(row: Row) -> str:
        return f"{row.cache} {'per token' if row.k_mode == 'PER_TOKEN' else 'static'}" if row.quantized else row.cache

    series = merged(lines(rows, size, name))
    x = doubling_axis("tokens in the cache", [row.tokens for row in rows])
    return Chart(title, x, decimal_axis("GiB", [size(row) for row in rows]), series)


def scaling_chart(rows: Sequence[Row], title: str) -> Chart:
    """Microseconds over the context for each batch, beside the model."""
    model, series = fit(rows), []
    for number, batch in enumerate(sorted({row.batch for row in rows})):
        own = {row.tokens: row for row in rows if row.batch == batch}
        ordered = [own[tokens] for tokens in sorted(own)]
        series.append(Series(f"batch {batch}", tuple((float(r.tokens), r.median) for r in ordered), number))
        points = tuple((float(r.tokens), model.us(r.bytes)) for r in ordered)
        series.append(Series(f"batch {batch}, model", points, number, model=True))
    values = [y for s in series for _, y in s.points]
    x = doubling_axis("tokens in the cache of each sequence", [row.tokens for row in rows])
    return Chart(title, x, decimal_axis("microseconds", values), series, "dashed: the model")


def scaling_rows(rows: Sequence[Row], preset: str) -> list[Row]:
    """int8 PER_TOKEN decode rows of the wheel that has most of them, at all batches."""
    heads = PRESETS[preset]
    sizes = Heads(heads.heads, heads.kv_heads, heads.head_size)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        same = Heads(row.heads, row.kv_heads, row.head_size, row.window, row.sinks) == sizes
        if same and row.ours and row.format == "int8 PER_TOKEN" and row.seq == 1 and row.read_gb_s:
            groups.setdefault((row.harness, row.site), []).append(row)
    return max((groups[key] for key in sorted(groups)), key=len, default=[])


def pictures(rows: Sequence[Row], preset: str, batch: int) -> dict[str, str]:
    """File names and texts."""
    ran, found = [row for row in rows if row.ran], {}
    at = steps(ran, preset, batch)
    shape = PRESETS[preset]
    sizes = f"{shape.heads}/{shape.kv_heads} heads, D {shape.head_size}, batch {batch}"
    if at:
        device = at[0].device
        found["time-per-layer.svg"] = time_chart(at, f"Decode step of one layer, {sizes}, {device}").svg()
        text = f"K, V and scales of {LAYERS_OF_A_MODEL} layers, {sizes}"
        found["memory.svg"] = memory_chart(at, text).svg()
    if known := [row for row in at if row.read_gb_s]:
        found["bandwidth.svg"] = bandwidth_chart(known, f"Bytes of the cache a second, {sizes}, {device}").svg()
    scale = scaling_rows(ran, preset)
    if len({row.batch for row in scale}) > 1:
        title = f"int8 per token, one layer, {shape.heads}/{shape.kv_heads} heads, D {shape.head_size}"
        found["scaling.svg"] = scaling_chart(scale, f"{title}, {scale[0].device}").svg()
    return found


def main() -> int:
    """Write the pictures; print the model beside the measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for the SVG files")
    parser.add_argument("--preset", default="llama3-8b", choices=list(PRESETS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prefix", default="", help="of the file names")
    parser.add_argument("--lines", nargs="+", default=[""], help="of wheels and caches, those with one of these texts")
    arguments = parser.parse_args()
    rows = [
        row for path in arguments.files for row in load(path).rows
        if row.provider == arguments.provider and any(text in label(row) for text in arguments.lines)
    ]  # fmt: skip
    texts = pictures(rows, arguments.preset, arguments.batch)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = arguments.out / f"{arguments.prefix}{name}"
        path.write_text(text, encoding="utf-8")
        print(path)
    if "scaling.svg" in texts:
        print("\n".join(["", *comparison(scaling_rows([row for row in rows if row.ran], arguments.preset))]))
    return 0 if texts else 1


if __name__ == "__main__":
    sys.exit(main())
