"""Pictures are well-formed, have every line, and are the same each time; the model is what it says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from python_tests.bench.bench_rows import Row
from python_tests.bench.gqa_case import Case, with_cache
from python_tests.bench.gqa_suites import SCALING
from python_tests.bench.plot import pictures, scaling_rows
from python_tests.bench.svg_chart import (
    HEIGHT,
    WIDTH,
    Axis,
    Chart,
    Series,
    decimal_axis,
    doubling_axis,
    spread,
    tokens_text,
)
from python_tests.bench.test_gqa_bars import row, stock
from python_tests.bench.time_model import comparison, fit

SVG = "{http://www.w3.org/2000/svg}"


def rows() -> list[Row]:
    """Two wheels, three caches, five lengths; and int8 over batches."""
    found = []
    for tokens in (1024, 4096, 16384, 65536, 131072):
        for cache in ("int8", "fp8", "int4"):
            case = with_cache(Case(tokens=tokens), cache)
            found.append(row(case, 5 + case.read_bytes / 4.4e6))
        plain = with_cache(Case(tokens=tokens), "plain")
        found.append(stock(plain, 15 + plain.read_bytes / 4e6))
    for batch, tokens in SCALING:
        case = with_cache(Case(batch=batch, tokens=tokens), "int8")
        found.append(row(case, 5 + case.read_bytes / 4.0e6))
    return found


def labels(text: str) -> set[str]:
    """Texts of a picture that are written in a line's colour."""
    texts = ET.fromstring(text).iter(f"{SVG}text")
    return {t.text or "" for t in texts if t.get("fill") != "#7d8590"}


def test_pictures_have_every_line() -> None:
    """Each wheel and cache is a line with a name; in the scaling each batch is two, measured and modelled."""
    found = pictures(rows(), "llama3-8b", 1)
    assert set(found) == {"time-per-layer.svg", "bandwidth.svg", "memory.svg", "scaling.svg"}
    named = {"ours, int8 per token", "ours, fp8 per token", "ours, int4 per token", "stock, fp16"}
    assert labels(found["time-per-layer.svg"]) == labels(found["bandwidth.svg"]) == named
    assert labels(found["memory.svg"]) == {"fp16", "fp8, int8 per token", "int4 per token"}
    assert labels(found["scaling.svg"]) == {f"batch {b}" for b in (1, 4, 16, 64, 256)}
    for name, text in found.items():
        groups = ET.fromstring(text).findall(f"{SVG}g")
        lines = [g.find(f"{SVG}path") for g in groups]
        assert len(groups) == {"memory.svg": 3, "scaling.svg": 10}.get(name, 4)
        assert all(path is not None and path.get("d", "").startswith("M") for path in lines)


def test_pictures_are_deterministic_and_inside() -> None:
    """Whatever the rows' order; no mark lies outside, no number is missing, nothing is loaded from elsewhere."""
    found = pictures(rows(), "llama3-8b", 1)
    assert pictures(list(reversed(rows())), "llama3-8b", 1).keys() == found.keys()
    assert pictures(rows(), "llama3-8b", 1) == found
    for text in found.values():
        assert "nan" not in text
        assert "inf" not in text.replace("information", "")
        assert not re.search(r"href|@import|<script|url\(", text)
        for mark in ET.fromstring(text).iter(f"{SVG}circle"):
            assert 0 <= float(mark.get("cx", "-1")) <= WIDTH
            assert 0 <= float(mark.get("cy", "-1")) <= HEIGHT


def test_pictures_suit_light_and_dark() -> None:
    """No background, and no colour that is near white or near black."""
    for text in pictures(rows(), "llama3-8b", 1).values():
        for color in set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})', text)):
            red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
            assert 0.2 < 0.299 * red + 0.587 * green + 0.114 * blue < 0.7, color
        assert 'fill="white"' not in text


def test_figures_of_another_run_are_marked() -> None:
    """With a star, which is explained."""
    case = with_cache(Case(tokens=1024), "plain")
    found = pictures([*rows(), stock(case, 16.0, site="stock 1.31.1", harness="recorded")], "llama3-8b", 1)
    assert "stock 1.31.1 *, fp16" in labels(found["time-per-layer.svg"])
    assert "* recorded in another run" in found["bandwidth.svg"]
    assert "*" not in pictures(rows(), "llama3-8b", 1)["bandwidth.svg"]
    assert "dashed: the model" in found["scaling.svg"]


def test_no_rows_no_pictures() -> None:
    """Neither for another shape, nor for rows that did not run."""
    assert pictures(rows(), "gpt-oss", 1) == {}
    assert pictures([replace(r, us=()) for r in rows()], "llama3-8b", 1) == {}
    assert "scaling.svg" not in pictures([r for r in rows() if r.batch == 1], "llama3-8b", 1)


def test_scaling_takes_one_wheel() -> None:
    """The one with most rows: measurements of two do not make a line."""
    other = [replace(r, site="other") for r in rows() if r.cache == "int8"][:4]
    assert {r.site for r in scaling_rows([*other, *rows()], "llama3-8b")} == {"ours"}


def test_model() -> None:
    """The fixed part is the smallest call's, the slope the bandwidth."""
    case = with_cache(Case(tokens=256), "int8")
    small, large = row(case, 6.0, read_gb_s=4000.0), row(replace(case, tokens=131072), 80.0, read_gb_s=4000.0)
    model = fit([large, small])
    assert model.us(small.bytes) == pytest.approx(6.0)
    assert model.us(large.bytes) - model.us(small.bytes) == pytest.approx((large.bytes - small.bytes) / 4e6)
    lines = comparison([large, small])
    assert lines[4].split(" | ")[3:6] == ["6.00", "6.00", "1.00"]
    with pytest.raises(ValueError, match="no row"):
        fit([replace(small, us=())])


def test_axes() -> None:
    """Ends are the data's; ticks lie between them."""
    axis = doubling_axis("x", [256.0, 2.0**20])
    assert [text for _, text in axis.ticks] == ["256", "1K", "4K", "16K", "64K", "256K", "1M"]
    assert (axis.part(256), axis.part(2**20)) == (0, 1)
    decimal = decimal_axis("y", [3.0, 450.0])
    assert [text for _, text in decimal.ticks] == ["5", "10", "20", "50", "100", "200", "500"]
    assert all(0 <= decimal.part(value) <= 1 for value, _ in decimal.ticks)
    assert Axis("p", 0, 100, False, ()).part(25) == 0.25
    assert [tokens_text(v) for v in (256, 1024, 1536, 2**21)] == ["256", "1K", "1536", "2M"]


def test_labels_do_not_touch() -> None:
    """Labels keep their order and a line's height; special characters are escaped."""
    placed = spread([100.0, 101.0, 99.0, 300.0], 0, 400)
    assert placed[2] < placed[0] < placed[1] < placed[3]
    assert min(b - a for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False)) >= 16
    series = [Series("a < b & c", ((1.0, 1.0), (2.0, 2.0)), 0)]
    axis = Axis("x", 1, 2, False, ())
    assert labels(Chart("t", axis, axis, series).svg()) == {"a < b & c"}
