"""The planner: what it counts, that what fits fits and one token more does not, its table and its picture."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from onnx import TensorProto
from onnxruntime.transformers.kv_cache_convert import CacheChoice, quantize_caches
from onnxruntime.transformers.kv_cache_footprint import KINDS, PRESETS, model_footprint, parse_size
from onnxruntime.transformers.kv_cache_layers import CacheModelError
from onnxruntime.transformers.kv_cache_model import read_decoder
from onnxruntime.transformers.kv_cache_plan import Request, chart, main, make_plan, table
from onnxruntime.transformers.kv_cache_plan_chart import COLORS, INK, round_steps, short_count

from python_tests.transformers.models import Shape, decoder, save, save_sparse

# Billions of parameters that the models' publishers give.
PUBLISHED = {
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "mistral-7b-v0.3": 7.25,
    "qwen2.5-7b": 7.62, "qwen3-8b": 8.19, "qwen3-32b": 32.8, "phi-3-mini-128k": 3.82,
}  # fmt: skip
GB = 10**9


@pytest.mark.parametrize("name", PRESETS)
def test_presets_weigh_what_is_published(name: str) -> None:
    weights = PRESETS[name].footprint(name).weights
    assert weights / 2e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_caches_are_those_that_were_measured() -> None:
    """The device memory that docs/design.md shows for 32 layers, 8 KV heads of 128, 131,072 tokens, in GiB."""
    model = PRESETS["llama-3.1-8b"].footprint("8b")
    expected = {"fp16": 16.0, "int8": 8.25, "fp8": 8.25, "int4": 4.25}
    assert {kind: model.bytes_per_token(kind) * 131072 / 2**30 for kind in KINDS} == expected
    assert model.attention_scratch(1, 1) >= 1.6e6


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_fits_and_one_token_more_does_not(kind: str, batch: int) -> None:
    plan = make_plan(PRESETS["qwen3-8b"].footprint("q"), Request(memory=(18 * GB, 80 * GB), batch=batch))
    row = next(r for r in plan.rows if r.kind == kind)
    assert row.per_token == batch * plan.model.bytes_per_token(kind)
    for memory, tokens in zip(plan.request.memory, row.fits, strict=True):
        room = memory - plan.fixed
        assert tokens == 0 if room < row.per_token else tokens * row.per_token <= room < (tokens + 1) * row.per_token


def test_scales_and_kept_layers_are_counted() -> None:
    model = PRESETS["llama-3.1-8b"].footprint("8b")
    layers, heads, size = 32, 8, 128
    assert model.bytes_per_token("int8", scale_bytes=0) == layers * 2 * heads * size
    assert model.bytes_per_token("int8", scale_bytes=2) == layers * 2 * heads * (size + 2)
    assert model.bytes_per_token("int4", keep=2) == 2 * heads * (30 * (size // 2 + 4) + 2 * 2 * size)
    assert model.bytes_per_token("fp16", keep=2) == model.bytes_per_token("fp16")


def test_fewer_bits_weigh_less() -> None:
    half, quarter = (PRESETS["llama-3.1-8b"].footprint("8b", bits).weights for bits in (8, 4))
    assert quarter < half < PRESETS["llama-3.1-8b"].footprint("8b").weights
    table_bytes = 2 * 128256 * 4096
    assert half - quarter == pytest.approx((half - table_bytes) / 2, rel=0.01)


def test_a_model_file_is_counted_without_its_weights(tmp_path: Path) -> None:
    shape = Shape(cache=int(TensorProto.FLOAT16))
    path = save_sparse(shape, tmp_path / "model.onnx", 3 << 30)
    found = model_footprint(path)
    width, kv = 64, 32
    matrices = 2 * (2 * 64 * width + shape.layers * (2 * width * width + 2 * width * kv))
    tables = 2 * 2 * shape.table * shape.head_size // 2
    norms = 2 * 64 * (shape.layers + 1)
    assert found.weights == (3 << 30) + matrices + tables + norms + 16
    assert found.caches == ((2, 16),) * 3
    assert (found.hidden, found.vocabulary, found.heads, found.context) == (64, 64, 4, 0)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_converted_model_takes_what_was_planned(tmp_path: Path, kind: str) -> None:
    model = decoder(Shape(cache=int(TensorProto.FLOAT16)))
    path = save(model, tmp_path / "model.onnx")
    planned = model_footprint(path).bytes_per_token(kind, keep=1)
    quantize_caches(model, CacheChoice(cache_dtype=kind, keep_layers=frozenset({0})))
    assert read_decoder(model).bytes_per_token == planned
    assert model_footprint(save(model, tmp_path / "converted.onnx")).caches == ((2, 16),) * 3


def test_a_model_without_caches(tmp_path: Path) -> None:
    model = decoder(Shape(layers=0))
    with pytest.raises(CacheModelError, match="no cache to plan"):
        model_footprint(save(model, tmp_path / "model.onnx"))


def test_table() -> None:
    plan = make_plan(PRESETS["llama-3.1-8b"].footprint("llama-3.1-8b"), Request(memory=(8 * GB, 24 * GB)))
    lines = table(plan).splitlines()
    rows = {line.split()[0]: line for line in lines[3:]}
    assert lines[3].split("   ")[0].strip() == "cache"
    assert "67,584" in rows["int8"]
    assert rows["fp16"].split()[2] == "none"
    assert f"{plan.rows[0].fits[1]:,}" in rows["fp16"]
    assert "*" in rows["int4"]
    assert "*" not in rows["fp16"]
    assert lines[-1].startswith("8 GB: weights and scratch alone need ")


def test_picture() -> None:
    plan = make_plan(PRESETS["llama-3.1-8b"].footprint("llama-3.1-8b"), Request(memory=(24 * GB, 80 * GB)))
    picture = chart(plan)
    assert picture == chart(plan)
    root = ET.fromstring(picture)
    groups = root.findall("{http://www.w3.org/2000/svg}g")
    titles = [g.findtext("{http://www.w3.org/2000/svg}title") for g in groups]
    assert titles == ["fp16", "int8, fp8", "int4"]
    assert all(len(g.findall("{http://www.w3.org/2000/svg}circle")) == 2 for g in groups)
    words = {t.text for t in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"24 GB", "80 GB", "GB", "tokens of context"} <= words
    assert {short_count(row.fits[1]) for row in plan.rows} <= words
    with pytest.raises(ValueError, match="nothing to draw"):
        chart(make_plan(plan.model, Request(memory=(8 * GB,))))


def test_picture_up_to_a_context() -> None:
    """It ends at the context that was asked for and names the caches' sizes there; what fits beyond is not marked."""
    model = PRESETS["llama-3.1-8b"].footprint("llama-3.1-8b")
    plan = make_plan(model, Request(memory=(24 * GB,), context=131072))
    root = ET.fromstring(chart(plan))
    words = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fp16: 17.18 GB", "int8, fp8: 8.86 GB", "int4: 4.56 GB", "24 GB", "53.2K", "103K"} <= set(words)
    assert "200K" not in words
    circles = [g.findall("{http://www.w3.org/2000/svg}circle") for g in root.iter("{http://www.w3.org/2000/svg}g")]
    assert [len(c) for c in circles] == [1, 1, 0]
    assert "cache at 131,072" in table(plan)
    none_fits = make_plan(model, Request(memory=(8 * GB,), context=1000))
    margin = {t.text: float(t.attrib["y"]) for t in ET.fromstring(chart(none_fits)).iter() if "y" in t.attrib}
    heights = sorted(margin[text] for text in ("fp16: 0.13 GB", "int8, fp8: 67.6 MB", "int4: 34.8 MB"))
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 14


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb, as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", [INK, *COLORS])
@pytest.mark.parametrize("page", ["#ffffff", "#0d1117", "#000000"])
def test_text_can_be_read_on_light_and_on_dark_pages(color: str, page: str) -> None:
    """4.34 is the most that a colour can have against white and #0d1117 alike."""
    low, high = sorted((luminance(color), luminance(page)))
    assert (high + 0.05) / (low + 0.05) > 4.2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * GB),
        ("24 GiB", 24 * 2**30),
        ("1.5gb", 1_500_000_000),
        ("500MB", 500_000_000),
        ("4096", 4096),
        ("2tib", 2**41),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "24XB", "24GBs", "-1GB", "0", "nan", "inf", "1e30GB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_steps_and_counts() -> None:
    assert round_steps(90.0) == [0, 20, 40, 60, 80]
    assert [short_count(n) for n in (0, 950, 12_000, 53_208, 480_454, 1_808_769)] == [
        "0",
        "950",
        "12K",
        "53.2K",
        "480K",
        "1.8M",
    ]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    call = ["--preset", "llama-3.1-8b", "--memory", "24GB", "80GB", "--svg", str(picture)]
    assert main(call) == 0
    assert "tokens in 24 GB" in capsys.readouterr().out
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert main(call) == 1
    assert "plan.svg" in capsys.readouterr().err
    path = save(decoder(Shape()), tmp_path / "model.onnx")
    assert main(["--model", str(path), "--memory", "24GB", "--weights", "16GB"]) == 0
    assert "weights 16 GB" in capsys.readouterr().out
    assert main(["--model", str(tmp_path / "none.onnx"), "--memory", "24GB"]) == 1
    assert "there is no such file" in capsys.readouterr().err
    for wrong in (
        ["--memory", "24GB"],
        ["--preset", "gpt-9", "--memory", "24GB"],
        ["--preset", "qwen3-8b", "--memory", "x"],
        ["--preset", "qwen3-8b", "--memory", "24GB", "--context", "-1"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
