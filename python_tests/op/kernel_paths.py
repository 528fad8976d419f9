"""Which kernels served a call: what the CUDA provider prints with ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1.

As a program, `python -m python_tests.op.kernel_paths` runs CASES and prints each one's name before it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from python_tests.op.cuda_case import cuda_case
from python_tests.op.gqa_case import Case, make_inputs, make_past
from python_tests.op.gqa_model import call
from python_tests.op.providers import CUDA
from python_tests.reference.format import CacheDtype

ROOT = Path(__file__).parents[2]
SWITCH = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
_CASE = "CASE "
_COLOR = re.compile("\x1b\\[[0-9;]*m")
Fields = dict[str, str]

_STEP = cuda_case("paths", totals=(21, 9), total=64)
_LONG = replace(_STEP, capacity=8192, total=8192)
# What a plan depends on is the capacity; no token needs to be there.
_ISSUE = replace(_STEP, heads=32, kv_heads=8, capacity=131072, total=131072)
_PLAIN = replace(_STEP, dtype=None, totals=(21, 21), head_size=64)
CASES: dict[str, Case] = {
    **{f"step-{dtype}": replace(_STEP, dtype=dtype) for dtype in CacheDtype},
    "fp8-bytes": replace(_STEP, dtype=CacheDtype.FP8, fp8_as_uint8=True),
    "bfloat16": replace(_STEP, activation="bfloat16"),
    "separate": replace(_STEP, in_place=False),
    "rows-8": replace(_STEP, seq=2),
    "rows-9": replace(_STEP, heads=9, kv_heads=1),
    "rows-16": replace(_STEP, seq=4),
    "rows-17": replace(_STEP, heads=17, kv_heads=1),
    "rows-20": replace(_STEP, seq=5),
    "prompt": replace(_STEP, seq=20, totals=(20, 7), total=20),
    "prompt-of-one": replace(_STEP, totals=(1, 1), total=1),
    **{f"head-size-{d}": replace(_STEP, head_size=d) for d in (8, 64, 72, 80, 128, 136, 192, 256)},
    "long-capacity": replace(_LONG, totals=(21, 9)),
    "long-context": replace(_LONG, totals=(4000, 4096)),
    "long-chunk": replace(_LONG, seq=40, totals=(4000, 40)),
    "issue-step": replace(_ISSUE, totals=(1,)),
    "issue-burst": replace(_ISSUE, seq=4, totals=(4,)),
    "issue-chunk": replace(_ISSUE, seq=512, totals=(512,)),
    "plain-step": _PLAIN,
    "plain-prompt": replace(_PLAIN, seq=20, totals=(20, 20), total=20),
    "plain-bfloat16": replace(_PLAIN, activation="bfloat16"),
}


def parse(output: str) -> list[Fields]:
    """The fields of every line about an attention kernel."""
    lines = [_COLOR.sub("", line) for line in output.splitlines()]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines if "SdpaKernel=" in line]


@lru_cache(maxsize=1)
def observed() -> dict[str, list[Fields]]:
    """What was printed in each case, all run in one process of their own."""
    command = [sys.executable, "-m", "python_tests.op.kernel_paths"]
    env = {**os.environ, SWITCH: "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = done.stdout.split(_CASE)[1:]
    return {part.split("\n", 1)[0]: parse(part) for part in parts}


if __name__ == "__main__":
    for name, case in CASES.items():
        # The provider writes to the same descriptor, past Python's buffer.
        print(f"{_CASE}{name}", flush=True)
        call(case, make_inputs(case), make_past(case), None if case.in_place else make_past(case), CUDA)
