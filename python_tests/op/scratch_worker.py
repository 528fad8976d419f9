"""Prints by how many bytes one call raises the peak resident memory of this process.

Usage: python -m python_tests.op.scratch_worker DTYPE SEQ CAPACITY, DTYPE one of the quantized types or "none".
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from python_tests.op.gqa_case import Case, make_inputs, poisoned_cache
from python_tests.op.gqa_model import build_model, input_buffers, make_session, output_buffers, run
from python_tests.op.providers import CPU
from python_tests.reference.format import CacheDtype


def resident_peak() -> int:
    """VmHWM in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    msg = "no VmHWM in /proc/self/status"
    raise RuntimeError(msg)


def main(dtype: str, seq: int, capacity: int) -> int:
    """Bytes by which the first call of a session raises the peak. All bound memory is touched before."""
    case = Case(
        id="scratch", dtype=None if dtype == "none" else CacheDtype(dtype), heads=8, kv_heads=2, head_size=64, seq=seq,
        totals=(capacity,), capacity=capacity, total=capacity,
    )  # fmt: skip
    cache = poisoned_cache(case, capacity)
    for array in (cache.key, cache.value, cache.k_scale, cache.v_scale):
        if array is not None:
            array[...] = 1
    session = make_session(build_model(case), CPU)
    ins = input_buffers(case, make_inputs(case), cache, CPU)
    outs = output_buffers(case, ins, None, CPU)
    # Writing 5 sets VmHWM to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    run(session, ins, outs)
    growth = resident_peak() - before
    assert np.isfinite(outs["output"].read()).all()
    return growth


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
