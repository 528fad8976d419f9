"""The row schema: what is written is read again, and files of the other benchmarks become rows of it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from python_tests.bench import bench_rows, row_adapters
from python_tests.bench.bench_cpu_decode import Row as CpuRow
from python_tests.bench.bench_cuda_kernels import Row as KernelRow
from python_tests.bench.bench_cuda_kernels import record
from python_tests.bench.bench_rows import Row
from python_tests.bench.cpu_case import Setup
from python_tests.bench.cuda_layers import Shape
from python_tests.bench.gqa_case import PRESETS, Case, cache_text, with_cache
from python_tests.reference.format import CacheDtype


def example(**changes: object) -> Row:
    """A row that ran: 1,000,000 bytes in 2 us of a possible 1 TB/s."""
    row = Row(
        harness="gqa", site="ours", version="1.21.0+kvq.1", ours=True, provider="cuda", device="GPU",
        date="2026-12-01", command="python -m x", preset="llama3-8b", heads=32, kv_heads=8, head_size=128,
        cache="int8", activation="fp16", batch=1, tokens=1024, k_mode="PER_TOKEN", v_mode="PER_TOKEN",
        scale_type="fp32", bytes=10**6, cache_bytes=10**6, operations=3 * 10**6, us=(1.0, 2.0, 9.0), read_gb_s=1000.0,
        read_method="kernel", parts={"append": 0.5},
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


def test_round_trip(tmp_path: Path) -> None:
    """Rows that ran and rows that did not, with everything they have."""
    rows = (example(), example(us=(), reason="no such wheel", window=4096, sinks=True, error=0.25))
    path = tmp_path / "folder" / "rows.json"
    bench_rows.save(path, ["one", "two"], rows)
    report = bench_rows.loads(path.read_text(encoding="utf-8"))
    assert report == bench_rows.Report(("one", "two"), rows)
    assert row_adapters.load(path) == report
    assert bench_rows.dumps(report) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("change", [{"colour": "red"}, {"heads": None}])
def test_other_fields_are_refused(change: dict[str, object]) -> None:
    """A row with a field too many or too few is not guessed at."""
    content = json.loads(bench_rows.dumps(bench_rows.Report((), (example(),))))
    row = content["rows"][0] | change
    content["rows"] = [{k: v for k, v in row.items() if v is not None}]
    with pytest.raises(ValueError, match=next(iter(change))):
        bench_rows.loads(json.dumps(content))


def test_other_schemas_are_refused() -> None:
    """By the number that stands in the file."""
    with pytest.raises(ValueError, match="schema 2 where 1"):
        bench_rows.loads('{"schema": 2, "rows": []}')


def test_what_follows_from_a_row() -> None:
    """Median, rates in 1e9 and 1e12, and the part of the bandwidth."""
    row = example()
    assert (row.median, row.gb_s, row.of_read, row.tflop_s) == (2.0, 500.0, 0.5, 1.5)
    assert row.format == "int8 PER_TOKEN"
    assert replace(row, k_mode="PER_CHANNEL", scale_type="fp16").format == "int8 PER_CHANNEL/PER_TOKEN (fp16 scales)"
    cells = bench_rows.line(row).split(" | ")
    assert cells[6:11] == ["2.00", "1.20", "7.60", "500", "50%"]
    head = bench_rows.HEADER[0].count("|")
    assert bench_rows.line(row).count("|") == bench_rows.line(replace(row, us=(), reason="a|b")).count("|") == head


def kernel_file(shape: Shape, path: str) -> str:
    """A file as bench_cuda_kernels writes it."""
    row = KernelRow(shape, 16, path, 4, 0, 1e-4, [1.0, 2.0, 3.0], {"append": 0.5, "decode": 1.0})
    about = ["GPU, 132 multiprocessors, read bandwidth 4500 GB/s, 2026-11-30", "int8, sources abc", "repeat: x"]
    return json.dumps({"about": about, "read_gb_s": 4500.0, "rows": [record(row)]})


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_rows_of_the_kernels(dtype: CacheDtype) -> None:
    """Bytes and operations are those that the benchmark counts itself; the command names the row."""
    shape = Shape(dtype=dtype, tokens=4096, seq=4, batch=2, heads=28, kv_heads=4)
    (row,) = row_adapters.loads(kernel_file(shape, "KV_CACHE_QUANT_DECODE")).rows
    assert (row.bytes, row.operations) == (shape.cache_bytes, shape.operations)
    assert (row.harness, row.preset, row.device, row.version) == ("cuda_kernels", "qwen2.5-7b", "GPU", "abc")
    assert (row.median, row.parts["append"], row.kernel) == (2.0, 0.5, "KV_CACHE_QUANT_DECODE")
    for part in ("--path decode", "--tokens 4096", "--seq 4", f"--formats {dtype}", "--batch 2", "--kv-heads 4"):
        assert part in row.command


def test_rows_of_a_prompt() -> None:
    """A prompt's command has its path and no number of new tokens."""
    shape = Shape(dtype=CacheDtype.INT8, tokens=512, seq=512)
    (row,) = row_adapters.loads(kernel_file(shape, "KV_CACHE_QUANT_PROMPT")).rows
    assert row.prompt
    assert row.operations == shape.operations
    assert "--path prompt" in row.command
    assert "--seq" not in row.command


def cpu_file(repeat: str) -> str:
    """A file as bench_cpu_decode writes it: the installed wheel and a peer, the peer without the feature."""
    setup = Setup("fp32", "int8", "PER_TOKEN")
    rows = [CpuRow(0, "1.21.0+kvq.1", setup, 64, bytes=2 * 8 * 64 * 132, ms=[0.5, 1.0, 1.5], error=1e-6)]
    rows.append(CpuRow(1, "1.32.0", Setup("fp32", "fp32", ""), 64, bytes=2 * 8 * 64 * 512, ms=[2.0]))
    about = ["CPU, 2 cores, 2 threads, load 0.0 at the start", "Linux, Python 3, 2026-11-30", f"repeat: {repeat}"]
    return json.dumps({"about": about, "rows": [asdict(row) for row in rows], "bars": []})


def test_rows_of_the_cpu() -> None:
    """Milliseconds become microseconds; the command keeps the peers and narrows the rest."""
    repeat = "python -m python_tests.bench.bench_cpu_decode --tokens 64 128 --peer-python /p/python --json f --rounds 3"
    ours, stock = row_adapters.loads(cpu_file(repeat)).rows
    assert (ours.median, ours.bytes, ours.ours, ours.provider) == (1000.0, 2 * 8 * 64 * 132, True, "cpu")
    assert ours.cache_bytes == ours.bytes
    assert (stock.ours, stock.site, stock.format) == (False, "stock 1.32.0", "fp32")
    assert shlex.split(ours.command)[3:] == [
        "--peer-python", "/p/python", "--rounds", "3", "--tokens", "64", "--only", "int8 PER_TOKEN",
    ]  # fmt: skip


def test_recorded_rows_count_as_the_case_does() -> None:
    """Rows of the earlier program have the bytes of this one's cases."""
    entry = {"tag": "stock", "ort": "1.31.1", "mode": "int8_per_channel", "B": 16, "H": 32, "HK": 8, "D": 128, "L": 9}
    entry |= {"T": 1024, "us": 25.0, "us_min": 24.0, "bytes": 2 * 16 * 8 * 1024 * 128}
    content = {"bw": 4.37e12, "copy": 4.2e12, "rows": [entry, {"tag": "stock", "mode": "x", "error": "no"}]}
    (row,) = row_adapters.loads(json.dumps(content)).rows
    case = with_cache(Case(batch=16, tokens=1024), "int8:PER_CHANNEL")
    assert (row.harness, row.ours, row.format, row.median) == ("recorded", False, "int8 PER_CHANNEL", 25.0)
    assert row.cache_bytes == case.cache_bytes
    assert row.operations == case.operations
    assert row.preset == "llama3-8b"


def test_stock_figures_are_kept() -> None:
    """What bars and pictures compare with where no stock wheel is at hand."""
    rows = row_adapters.recorded_rows()
    plain = {row.tokens: row.median for row in rows if row.version == "1.31.1" and row.batch == 1 and
             row.preset == "llama3-8b" and row.format == "fp16"}  # fmt: skip
    assert {tokens: round(us, 1) for tokens, us in plain.items()} == {
        1024: 16.3, 4096: 21.2, 16384: 32.0, 65536: 77.8, 131072: 140.1,
    }  # fmt: skip
    assert not any(row.ours for row in rows)


def test_other_files_are_refused() -> None:
    """By their keys."""
    with pytest.raises(ValueError, match="keys answer"):
        row_adapters.loads('{"answer": 42}')


def test_presets_are_found_by_their_sizes() -> None:
    """And sizes without a preset are named by themselves."""
    assert row_adapters.preset_of(*PRESETS["gemma-16-8"][:3]) == "gemma-16-8"
    assert row_adapters.preset_of(3, 1, 64) == "3/1/64"


def test_texts_of_caches() -> None:
    """Every cache's text is read as that cache."""
    for text in ("plain", "int8:PER_TOKEN", "fp8:PER_TENSOR", "int4:PER_CHANNEL", "int8:PER_CHANNEL/PER_TOKEN"):
        assert cache_text(with_cache(Case(), text)) == text
    with pytest.raises(ValueError, match="int7"):
        with_cache(Case(), "int7")
