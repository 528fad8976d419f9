"""Memory of a call beside its tensors: it must not grow with the context, and no copy of the cache may exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from python_tests.op.providers import Provider

ROOT = Path(__file__).parents[2]
MIB = 2**20
SHORT, LONG = 2048, 131072
# One float32 copy of K and V of the long context: 2 heads * 64 * 4 bytes * 2.
DEQUANTIZED = LONG * 2 * 64 * 4 * 2


def growth(dtype: str, seq: int, capacity: int) -> int:
    """Bytes of resident memory that one call adds at its peak, in a process of its own."""
    command = [sys.executable, "-m", "python_tests.op.scratch_worker", dtype, str(seq), str(capacity)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.fixture(autouse=True)
def needs_linux_cpu(provider: Provider) -> None:
    """The measure is Linux's and the host's."""
    if provider.device != "cpu":
        pytest.skip("test_cuda_memory.py measures device memory")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc/self/clear_refs: peak memory cannot be reset")


@pytest.mark.parametrize("seq", [1, 48])
@pytest.mark.parametrize("dtype", ["int8", "float8e4m3fn", "int4"])
def test_scratch_does_not_grow_with_the_context(dtype: str, seq: int) -> None:
    """64 times the context: less than 4 MiB more, where a dequantized copy would be 128 MiB."""
    assert DEQUANTIZED == 128 * MIB
    short, long = growth(dtype, seq, SHORT), growth(dtype, seq, LONG)
    assert long - short < 4 * MIB, f"{short} bytes at {SHORT} tokens, {long} at {LONG}"


def test_the_measure_sees_scratch() -> None:
    """Control: the unquantized operator of this release keeps S x heads x context scores in memory."""
    long = growth("none", 48, LONG)
    assert long > 48 * 8 * LONG * 4 // 2
