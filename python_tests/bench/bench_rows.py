"""The one row schema of all benchmarks, and the JSON file that holds rows.

A file is {"schema": 1, "about": [lines], "rows": [Row as an object, ...]}. Units: bytes, microseconds, 1e9 bytes a
second. A row that did not run has no times (us is empty) and says why in `reason`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

SCHEMA = 1
Harness: TypeAlias = Literal["gqa", "cuda_kernels", "cpu_decode", "recorded"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration in one wheel.

    Who ran. harness: "gqa" (bench_gqa: the operator through onnxruntime), "cuda_kernels" (the launchers alone),
    "cpu_decode", or "recorded" (figures of another program, kept to compare with). site: what the wheel is called in
    the run. version: the wheel's, or the digest of the kernels' sources. ours: whether the wheel is this repository's.
    provider: cuda or cpu. device: its name. date: ISO. command: repeats this row.

    What ran. preset: name of the shape. heads, kv_heads, head_size: query heads, KV heads, D. window: -1 for none.
    cache: fp32, fp16, bf16 (unquantized), int8, fp8, int4; k_mode, v_mode: PER_TOKEN, PER_TENSOR, PER_CHANNEL, "" where
    unquantized; scale_type: of a PER_TOKEN scale. batch; tokens: of each entry after the call; seq: how many of them
    are new; capacity: rows of the buffers; prompt: whether attention is over the new tokens alone. layers: nodes in the
    model, each with a cache of its own. graph: whether the times are of a replayed CUDA graph. kernel: what served it,
    as the provider prints.

    Counted. bytes: of codes and scales that one layer's call must read, from the tensors' shapes. cache_bytes: all that
    one layer's K, V and scales take. operations: multiplications and additions of both products, masked ones left out.
    session_bytes: device memory that the session took beside the bound tensors, code loaded with it included, -1 where
    not known.

    Measured. us: of one layer, one number a round. parts: medians of single launchers. read_gb_s: read bandwidth of
    the same process, by read_method: "kernel" (a kernel that only reads), "copy" (device to device, both directions
    counted), "host threads"; 0 where not known. error: largest error of the output in units of its largest value,
    against float64 attention over the dequantized cache. reason: why it did not run. note: what else to know.
    """

    harness: Harness
    site: str
    version: str
    ours: bool
    provider: str
    device: str
    date: str
    command: str
    preset: str
    heads: int
    kv_heads: int
    head_size: int
    cache: str
    activation: str
    batch: int
    tokens: int
    seq: int = 1
    capacity: int = 0
    prompt: bool = False
    window: int = -1
    sinks: bool = False
    rotary: bool = True
    packed: bool = False
    k_mode: str = ""
    v_mode: str = ""
    scale_type: str = ""
    layers: int = 1
    graph: bool = False
    kernel: str = ""
    bytes: int = 0
    cache_bytes: int = 0
    operations: int = 0
    session_bytes: int = -1
    us: tuple[float, ...] = ()
    parts: dict[str, float] = field(default_factory=dict)
    read_gb_s: float = 0.0
    read_method: str = ""
    error: float = 0.0
    reason: str = ""
    note: str = ""

    def percentile(self, q: float) -> float:
        """Microseconds of a layer; only for a row that ran."""
        return float(np.percentile(self.us, q))

    @property
    def ran(self) -> bool:
        """Whether there are times."""
        return bool(self.us)

    @property
    def median(self) -> float:
        """Microseconds of a layer."""
        return self.percentile(50)

    @property
    def quantized(self) -> bool:
        """Whether the cache is."""
        return bool(self.k_mode)

    @property
    def gb_s(self) -> float:
        """Bytes that must be read by the time it took."""
        return self.bytes / self.median / 1e3

    @property
    def of_read(self) -> float:
        """Part of the read bandwidth, 0 where that is not known."""
        return self.gb_s / self.read_gb_s if self.read_gb_s else 0.0

    @property
    def tflop_s(self) -> float:
        """Operations by the time it took, 1e12 a second."""
        return self.operations / self.median / 1e6

    @property
    def format(self) -> str:
        """The cache in words: int8 PER_TOKEN, int8 PER_CHANNEL/PER_TOKEN, fp16."""
        modes = self.k_mode if self.k_mode == self.v_mode else f"{self.k_mode}/{self.v_mode}"
        half = " (fp16 scales)" if self.scale_type == "fp16" else ""
        return f"{self.cache} {modes}{half}".strip()

    @property
    def shape(self) -> str:
        """The call in words, without the cache."""
        parts = [f"{self.heads}/{self.kv_heads} x {self.head_size}"]
        parts += [f"window {self.window}"] if self.window >= 0 else []
        parts += ["sinks"] if self.sinks else []
        parts += [self.activation] if self.activation != "fp16" else []
        return " ".join(parts)


@dataclass(frozen=True)
class Report:
    """The rows of one run and what was said about it."""

    about: tuple[str, ...]
    rows: tuple[Row, ...]


def row_from(fields_by_name: dict[str, Any]) -> Row:
    """A row from its JSON object. Raises ValueError for fields that are unknown or missing."""
    known = {f.name for f in fields(Row)}
    unknown = sorted(set(fields_by_name) - known)
    if unknown:
        msg = f"unknown fields of a row: {', '.join(unknown)}"
        raise ValueError(msg)
    try:
        return Row(**(fields_by_name | {"us": tuple(fields_by_name.get("us", ()))}))
    except TypeError as error:
        msg = f"not a row: {error}"
        raise ValueError(msg) from error


def dumps(report: Report) -> str:
    """The file's text, a line a row."""
    rows = ",\n".join(json.dumps(asdict(row)) for row in report.rows)
    return f'{{"schema": {SCHEMA}, "about": {json.dumps(list(report.about))}, "rows": [\n{rows}\n]}}\n'


def loads(text: str) -> Report:
    """Rows of a file. Raises ValueError where it is not of this schema."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        msg = f"schema {found} where {SCHEMA} is expected"
        raise ValueError(msg)
    return Report(tuple(content["about"]), tuple(row_from(row) for row in content["rows"]))


def save(path: Path, about: Iterable[str], rows: Iterable[Row]) -> None:
    """Write a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(Report(tuple(about), tuple(rows))), encoding="utf-8")


HEADER = (
    "| wheel | shape | batch | tokens | new | cache | us | p10 | p90 | GB/s | of read | TFLOP/s | layers | error |",
    "|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def line(row: Row) -> str:
    """A line of the Markdown table; a row that did not run has its reason instead of numbers."""
    head = [row.site, row.shape, str(row.batch), f"{row.tokens:,}", str(row.seq), row.format]
    if not row.ran:
        cells = [row.reason or "did not run", *[""] * 7]
    else:
        cells = [
            f"{row.median:.2f}", f"{row.percentile(10):.2f}", f"{row.percentile(90):.2f}", f"{row.gb_s:.0f}",
            f"{row.of_read:.0%}" if row.read_gb_s else "", f"{row.tflop_s:.1f}", str(row.layers), f"{row.error:.1e}",
        ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "/") for cell in [*head, *cells]) + " |"


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table."""
    return [*HEADER, *(line(row) for row in rows)]
