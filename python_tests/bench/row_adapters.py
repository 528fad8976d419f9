"""Rows from the files of all benchmarks: python -m python_tests.bench.row_adapters FILE... --json ROWS.

Read are files of bench_rows' own schema, of bench_cuda_kernels, of bench_cpu_decode, and of the program that measured
stock wheels before this one (keys bw, copy, rows), whose rows become "recorded".
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from python_tests.bench import bench_rows
from python_tests.bench.bench_rows import Report, Row
from python_tests.bench.cpu_case import HEAD_SIZE, HEADS, KV_HEADS, Setup
from python_tests.bench.gqa_case import PRESETS, Case, Heads, with_cache

CACHES = {"float8e4m3fn": "fp8"}
# Figures of stock wheels on an H200, from an earlier program; the bars and pictures take them where a run has none.
RECORDED = Path(__file__).parent / "recorded"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def preset_of(heads: int, kv_heads: int, head_size: int) -> str:
    """The first preset of these sizes, or the sizes."""
    wanted = Heads(heads, kv_heads, head_size)
    return next((name for name, found in PRESETS.items() if found == wanted), f"{heads}/{kv_heads}/{head_size}")


def _options(values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def from_cuda_kernels(content: dict[str, Any]) -> Report:
    """Rows of bench_cuda_kernels: the launchers alone. fp16, PER_TOKEN with float scales, separate QKV."""
    about = content["about"]
    date, digest = _DATE.search(" ".join(about)), re.search(r"sources (\S+)", " ".join(about))
    rows = []
    for entry in content["rows"]:
        shape = entry["shape"]
        sizes = {k: shape[k] for k in ("heads", "kv_heads", "head_size", "batch", "tokens", "seq")}
        prompt = shape["seq"] == shape["tokens"] and shape["seq"] > 1
        cache = CACHES.get(shape["dtype"], shape["dtype"])
        path = "prompt" if prompt else "prefill" if "PREFILL" in entry["path"] else "decode"
        options = {"path": path, "tokens": shape["tokens"], "seq": shape["seq"], "formats": shape["dtype"]}
        options |= {"batch": shape["batch"], "heads": shape["heads"], "kv-heads": shape["kv_heads"]}
        options |= {"head-size": shape["head_size"], "rounds": len(entry["us"])}
        if path != "decode":
            # Chunks of these paths come from lists; only decode takes --seq.
            options.pop("seq")
        heads = (shape["heads"], shape["kv_heads"], shape["head_size"])
        row = Row(
            harness="cuda_kernels", site="kernels alone", version=digest.group(1) if digest else "", ours=True,
            provider="cuda", device=about[0].split(",")[0], date=date.group() if date else "",
            command=shlex.join(["python", "-m", "python_tests.bench.bench_cuda_kernels", *_options(options)]),
            preset=preset_of(*heads), cache=cache, activation="fp16", prompt=prompt, capacity=shape["tokens"],
            k_mode="PER_TOKEN", v_mode="PER_TOKEN", scale_type="fp32", layers=entry["layers"], graph=True,
            kernel=entry["path"], us=tuple(entry["us"]), parts=entry["parts"], read_gb_s=content["read_gb_s"],
            read_method="kernel", error=entry["error"], **sizes,
        )  # fmt: skip
        rows.append(_counted(row))
    return Report(tuple(about), tuple(rows))


def _counted(row: Row) -> Row:
    """The row with bytes and operations, for shapes without a preset's window."""
    token, per_head = row.k_mode == "PER_TOKEN", row.batch * row.kv_heads * row.tokens
    width = {"int4": row.head_size // 2, "int8": row.head_size, "fp8": row.head_size, "fp32": 4 * row.head_size}
    size = 2 * per_head * (width.get(row.cache, 2 * row.head_size) + (4 if token else 0))
    size += {"PER_TENSOR": 8, "PER_CHANNEL": 8 * row.kv_heads * row.head_size}.get(row.k_mode, 0)
    first = row.tokens - row.seq
    seen = row.seq * first + row.seq * (row.seq + 1) // 2
    operations = 4 * row.batch * row.heads * row.head_size * seen
    return replace(row, bytes=size, cache_bytes=size, operations=operations)


def from_cpu_decode(content: dict[str, Any]) -> Report:
    """Rows of bench_cpu_decode: one layer, batch 1. Wheel 0 is the one of this repository."""
    about, rows = content["about"], []
    date = _DATE.search(" ".join(about))
    repeat = next((line.removeprefix("repeat: ") for line in about if line.startswith("repeat: ")), "")
    for entry in content["rows"]:
        setup, ours = Setup(**entry["setup"]), "kvq" in entry["version"]
        row = Row(
            harness="cpu_decode", site="installed" if entry["wheel"] == 0 else f"stock {entry['version']}",
            version=entry["version"], ours=ours, provider="cpu", device=about[0].split(",")[0],
            date=date.group() if date else "", command=_cpu_command(repeat, setup, entry["tokens"]),
            preset=preset_of(HEADS, KV_HEADS, HEAD_SIZE), heads=HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE,
            cache=setup.cache, activation=setup.activation, batch=1, tokens=entry["tokens"], capacity=entry["tokens"],
            rotary=False, k_mode=setup.mode, v_mode=setup.mode, us=tuple(1e3 * ms for ms in entry["ms"]),
            scale_type="fp32" if setup.mode == "PER_TOKEN" else "", error=entry["error"],
            reason=entry.get("unsupported", ""),
        )  # fmt: skip
        rows.append(replace(_counted(row), bytes=entry["bytes"]))
    return Report(tuple(about), tuple(rows))


def _cpu_command(repeat: str, setup: Setup, tokens: int) -> str:
    """The run's command, narrowed to a row: its peers stay, its lengths, filter and file do not."""
    words, kept = shlex.split(repeat) if repeat else ["python", "-m", "python_tests.bench.bench_cpu_decode"], []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word in ("--tokens", "--only", "--json")
        if not skipping:
            kept.append(word)
    return shlex.join([*kept, "--tokens", str(tokens), "--only", setup.label])


def from_recorded(content: dict[str, Any]) -> Report:
    """Rows of the earlier program: medians only, packed QKV, no rotary, static scales."""
    rows = []
    for entry in [entry for entry in content["rows"] if "us" in entry]:
        name, _, mode = entry["mode"].partition("_")
        text = "plain" if name == "fp16" else f"{name}:{mode.upper()}"
        case = with_cache(Case(batch=entry["B"], tokens=entry["T"]), text)
        preset = preset_of(entry["H"], entry["HK"], entry["D"])
        known = preset in PRESETS
        case = replace(case, preset=preset) if known else case
        command = ["python", "-m", "python_tests.bench.bench_gqa", *_options({
            "preset": preset, "cache": text, "batch": entry["B"], "tokens": entry["T"], "layers": entry["L"],
            "site": "stock=FOLDER",
        })]  # fmt: skip
        row = Row(
            harness="recorded", site="ours" if "kvq" in entry["ort"] else f"stock {entry['ort']}", version=entry["ort"],
            ours="kvq" in entry["ort"], provider="cuda", device="NVIDIA H200", date="", command=shlex.join(command),
            preset=preset, heads=entry["H"], kv_heads=entry["HK"], head_size=entry["D"], cache=case.cache,
            activation="fp16", batch=entry["B"], tokens=entry["T"], capacity=entry["T"], rotary=False, packed=True,
            k_mode=case.k_mode, v_mode=case.v_mode, layers=entry["L"], graph=True, us=(entry["us"],),
            read_gb_s=content["bw"] / 1e9, read_method="kernel", note="recorded by another program, without rotary",
        )  # fmt: skip
        rows.append(replace(_counted(row), bytes=entry["bytes"]))
    return Report(("recorded figures: medians, packed QKV, no rotary, static scales",), tuple(rows))


def loads(text: str) -> Report:
    """Rows of a file of any of these kinds. Raises ValueError for others."""
    content = json.loads(text)
    if "schema" in content:
        return bench_rows.loads(text)
    if "bw" in content:
        return from_recorded(content)
    if "read_gb_s" in content:
        return from_cuda_kernels(content)
    if "bars" in content:
        return from_cpu_decode(content)
    msg = f"not a benchmark's file: keys {', '.join(content)}"
    raise ValueError(msg)


def load(path: Path) -> Report:
    """Rows of a file."""
    return loads(path.read_text(encoding="utf-8"))


def recorded_rows() -> list[Row]:
    """Rows of the files in RECORDED."""
    return [row for path in sorted(RECORDED.glob("*.json")) for row in load(path).rows]


def main() -> int:
    """Print rows of some files as a table, and write them to one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    arguments = parser.parse_args()
    reports = [load(path) for path in arguments.files]
    rows = [row for report in reports for row in report.rows]
    print("\n".join(bench_rows.table(rows)))
    if arguments.json:
        bench_rows.save(arguments.json, (line for report in reports for line in report.about), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
