"""The bars of the CUDA kernels are judged as they are written, and nothing is claimed without a measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from python_tests.bench.bench_rows import Row
from python_tests.bench.gqa_bars import AIM_8, DECODE_4, DECODE_8, Bar, bandwidth_line, bar_lines, find_bars
from python_tests.bench.gqa_case import PRESETS, Case, with_cache


def row(case: Case, us: float, **changes: object) -> Row:
    """A case of this repository's wheel that took `us`."""
    m = case.model
    made = Row(
        harness="gqa", site="ours", version="1.21.0+kvq.1", ours=True, provider="cuda", device="GPU", date="",
        command="", preset=case.preset, heads=m.heads, kv_heads=m.kv_heads, head_size=m.head_size, window=m.window,
        sinks=m.sinks, cache=case.cache, activation=case.activation, batch=case.batch, tokens=case.tokens,
        seq=case.seq, prompt=case.prompt, k_mode=case.k_mode, v_mode=case.v_mode, scale_type=case.scale_type,
        bytes=case.read_bytes, cache_bytes=case.cache_bytes, us=(us,), read_gb_s=4400.0, read_method="kernel",
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def stock(case: Case, us: float, **changes: object) -> Row:
    """The same call in a stock wheel, unquantized."""
    plain = with_cache(case, "plain")
    return row(plain, us, **({"ours": False, "site": "stock", "version": "1.31.1"} | changes))


def of_group(bars: list[Bar], group: str) -> list[Bar]:
    """The bars of a rule."""
    return [bar for bar in bars if bar.group == group]


@pytest.mark.parametrize(("cache", "table"), [("int8", DECODE_8), ("fp8", DECODE_8), ("int4", DECODE_4)])
def test_decode_bars(cache: str, table: dict[tuple[int, int], float]) -> None:
    """Each length has its limit; at the limit is a pass, above it a miss. The aim is beside it, for 8-bit formats."""
    for size, limit in table.items():
        case = with_cache(Case(batch=size[0], tokens=size[1]), cache)
        for us, passed in ((limit, True), (limit + 0.01, False)):
            bars = find_bars([row(case, us)])
            assert [(bar.passed, bar.limit) for bar in of_group(bars, "decode")] == [(passed, limit)]
            aims = [] if cache == "int4" or size not in AIM_8 else [AIM_8[size]]
            assert [bar.limit for bar in of_group(bars, "aim")] == aims


def test_other_rows_have_no_bar_in_microseconds() -> None:
    """Another length, static scales, another wheel, a CPU."""
    case = with_cache(Case(tokens=1024), "int8")
    static = with_cache(case, "int8:PER_TENSOR")
    others = [row(replace(case, tokens=2048), 1.0), row(static, 1.0), row(case, 1.0, provider="cpu")]
    assert find_bars([*others, row(case, 1.0, ours=False)]) == []
    assert find_bars([replace(row(case, 1.0), us=(), reason="no")]) == []


def test_shapes_are_held_against_the_base_with_the_same_bytes() -> None:
    """Between two measured base rows the limit is 1.25 times what lies between them; beyond them none is claimed."""
    base = [row(with_cache(Case(tokens=tokens), "int8"), us) for tokens, us in ((1024, 6.0), (4096, 9.0))]
    # 28/4 heads: half of the bytes a token.
    other = with_cache(Case(preset="qwen2.5-7b", tokens=5120), "int8")
    burst = with_cache(Case(tokens=2560, seq=4), "int8")
    for case in (other, burst):
        for us, passed in ((1.25 * 7.5, True), (1.25 * 7.5 + 0.01, False)):
            (bar,) = of_group(find_bars([*base, row(case, us)]), "shape")
            assert bar.passed is passed
            assert bar.limit == pytest.approx(1.25 * 7.5)
    (bar,) = of_group(find_bars([*base, row(replace(other, tokens=65536), 1.0)]), "shape")
    assert bar.passed is None
    assert not of_group(find_bars([*base, row(replace(other, preset="llama3-8b", tokens=2048), 1.0)]), "shape")


def test_a_window_counts_what_it_reads() -> None:
    """131,072 tokens with a window of 4,096 are held against a base of about 4,096."""
    base = [row(with_cache(Case(tokens=tokens), "int8"), us) for tokens, us in ((4096, 9.0), (8192, 11.0))]
    case = with_cache(Case(preset="mistral", tokens=131072), "int8")
    (bar,) = of_group(find_bars([*base, row(case, 11.0)]), "shape")
    assert bar.limit == pytest.approx(1.25 * 9.0, rel=1e-3)


def test_bfloat16() -> None:
    """Within 5 % of float16 on the same call."""
    half = with_cache(Case(tokens=4096), "int8")
    wide = replace(half, activation="bf16")
    for us, passed in ((10.5, True), (10.6, False)):
        (bar,) = of_group(find_bars([row(half, 10.0), row(wide, us)]), "bfloat16")
        assert bar.passed is passed
    (bar,) = of_group(find_bars([row(wide, 1.0)]), "bfloat16")
    assert bar.passed is None


def test_stock_of_the_run_comes_before_recorded_figures() -> None:
    """And recorded figures before the wheel's own unquantized operator; each is named."""
    case = with_cache(Case(tokens=2048), "int8:PER_TENSOR")
    live, recorded = stock(case, 20.0), stock(case, 5.0, harness="recorded")
    own = row(with_cache(case, "plain"), 30.0)
    group = "not slower than stock fp16"
    for others, limit, text in (
        ([live, recorded, own], 20.0, "stock 1.31.1 fp16: 20.00 us"),
        ([recorded, own], 5.0, "another run"),
        ([own], 30.0, "ours"),
    ):
        (bar,) = of_group(find_bars([row(case, 10.0), *others]), group)
        assert (bar.limit, bar.passed) == (limit, limit >= 10)
        assert text in bar.beside
    assert not of_group(find_bars([row(case, 10.0), stock(replace(case, batch=2), 20.0)]), group)


def test_chunks_and_prompts() -> None:
    """0.85 of the speed on the same chunk; a prompt may take the time of the quantize pass more."""
    chunk = with_cache(Case(tokens=32768 + 512, seq=512), "int8")
    for us, passed in ((100 / 0.85 - 0.01, True), (100 / 0.85 + 0.01, False)):
        (bar,) = of_group(find_bars([row(chunk, us), stock(chunk, 100.0)]), "chunk")
        assert bar.passed is passed
    prompt = with_cache(Case(tokens=512, seq=512, prompt=True), "int8")
    for us, passed in ((104.0, True), (104.1, False)):
        (bar,) = of_group(find_bars([row(prompt, us, parts={"append": 4.0}), stock(prompt, 100.0)]),
                          "prompt, beside its quantize pass")  # fmt: skip
        assert bar.passed is passed


def test_each_wheel_is_judged_by_itself() -> None:
    """Rows of the operator and of the kernels alone do not mix."""
    case = with_cache(Case(tokens=1024), "int8")
    rows = [row(case, 5.0), row(case, 7.0, harness="cuda_kernels", site="kernels alone")]
    assert [bar.passed for bar in of_group(find_bars(rows), "decode")] == [True, False]


def test_lines() -> None:
    """A verdict for every bar, the counts, and the bandwidth beside the bars'."""
    case = with_cache(Case(tokens=1024), "int8")
    lines = bar_lines(find_bars([row(case, 5.5), stock(case, 5.0)]))
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| PASS", "| not reached", "| MISS"]
    assert lines[-1] == "1 PASS, 1 MISS, 0 not measured"
    assert bar_lines([]) == ["no bar speaks to these rows"]
    assert bandwidth_line([row(case, 1.0, read_gb_s=4370.0)]) == [
        "GPU: read bandwidth 4370 GB/s (kernel), 1.000 of that of the bars"
    ]
    assert PRESETS["gemma-8-1"].head_size == 256
