"""Each call is served by the kernels that are meant for it: otherwise the other tests would prove little."""

from __future__ import annotations

import pytest

from python_tests.op.kernel_paths import CASES, Fields, observed
from python_tests.op.providers import Provider

pytestmark = pytest.mark.gpu
# The most query rows per KV head that a decode step has, what a unit of a step has, and, by padded head size, what one
# of anything longer has at most.
DECODE_ROWS, UNITS, PREFILL_ROWS = 16, (8, 16), {64: 128, 128: 128, 256: 64}
QUANTIZED = [name for name in CASES if not name.startswith("plain")]
PLAIN = [name for name in CASES if name.startswith("plain")]


@pytest.fixture
def printed(cuda: Provider) -> dict[str, list[Fields]]:
    """The lines of every case."""
    assert cuda.device == "cuda"
    return observed()


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(name: str, printed: dict[str, list[Fields]]) -> None:
    """One line, with the path that follows from the shape; nothing dequantizes the cache for another kernel."""
    case = CASES[name]
    rows = case.seq * case.heads // case.kv_heads
    path = "PROMPT" if case.prompt else "DECODE" if rows <= DECODE_ROWS else "PREFILL"
    padded = next(size for size in (64, 128, 256) if case.head_size <= size)
    unit = UNITS[rows > UNITS[0]] if path == "DECODE" else min(-(-rows // 16) * 16, PREFILL_ROWS[padded])
    assert len(printed[name]) == 1, printed[name]
    line = printed[name][0]
    kind = "bf16" if case.activation == "bfloat16" else "fp16"
    expected = {
        "Operator": "GroupQueryAttention", "Node": "gqa", "DataType": kind,
        "SdpaKernel": f"KV_CACHE_QUANT_{path}", "HeadSize": str(case.head_size), "PaddedHeadSize": str(padded),
        "UnitRows": str(unit),
    }  # fmt: skip
    assert {field: line.get(field) for field in expected} == expected


@pytest.mark.parametrize("name", PLAIN)
def test_unquantized(name: str, printed: dict[str, list[Fields]]) -> None:
    """The unquantized operator takes the kernel that this release always took."""
    assert [line["SdpaKernel"] for line in printed[name]] == ["FLASH_ATTENTION"]


def test_splits(printed: dict[str, list[Fields]]) -> None:
    """A short cache is not split, a long one is, and only its capacity decides: the plan of a graph fits any length."""
    splits = {name: int(lines[0]["Splits"]) for name, lines in printed.items() if "Splits" in lines[0]}
    assert splits["step-int8"] == splits["prompt"] == 1
    assert splits["long-capacity"] == splits["long-context"] > 1
    assert workspace_of("step-int8", printed) == 0 < workspace_of("long-capacity", printed)


def workspace_of(name: str, printed: dict[str, list[Fields]]) -> int:
    """Scratch of a case, in bytes."""
    return int(printed[name][0]["WorkspaceBytes"])


def test_scratch(printed: dict[str, list[Fields]]) -> None:
    """At 131,072 tokens, 8 KV heads and D 128: under 16 MB for a step, and for a chunk of 512 no copy of the cache."""
    assert workspace_of("issue-step", printed) < 16e6
    assert workspace_of("issue-burst", printed) < 16e6
    copy = 2 * 8 * 131072 * 128 * 2
    assert workspace_of("issue-chunk", printed) < copy / 8
