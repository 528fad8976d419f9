"""Lengths, sizes and features at the ends of what the attention kernels handle, shared by their test files."""

from __future__ import annotations

from typing import Any

import pytest

from python_tests.kernel.case import KernelCase
from python_tests.reference.format import CacheDtype, Granularity
from python_tests.reference.half_attention import HalfName

FORMATS = list(CacheDtype)
HALVES: list[HalfName] = ["float16", "bfloat16"]
GRANULARITIES = list(Granularity)[1:]
# Around 8 and 16 rows of a matrix instruction, tiles of 32 and 64 tokens, and splits of 128 tokens and more.
TOKENS = (1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
HEAD_SIZES = (8, 16, 24, 40, 64, 72, 80, 88, 96, 128, 136, 192, 248, 256)
# What a plan is made for: one multiprocessor leaves one or few splits, 132 as many as there are tokens for.
MULTIPROCESSORS = (1, 2, 5, 132)
SINKS: dict[str, dict[str, Any]] = {
    "off": {},
    "smooth": {"smooth": True},
    "sink": {"sink": True},
    "both": {"smooth": True, "sink": True},
}
ROTARY: dict[str, dict[str, Any]] = {
    "none": {},
    "half": {"rotary": "half"},
    "interleaved": {"rotary": "interleaved"},
    "half-part": {"rotary": "half", "part": True},
    "interleaved-part": {"rotary": "interleaved", "part": True},
}


def params(cases: list[KernelCase]) -> list[Any]:
    """pytest parameters whose ids are the cases'."""
    assert len({case.id for case in cases}) == len(cases)
    return [pytest.param(case, id=case.id) for case in cases]


def rotary_of(name: str, head_size: int) -> dict[str, Any]:
    """Arguments of a case for an entry of ROTARY; a part is about half of the head."""
    arguments = dict(ROTARY[name])
    if arguments.pop("part", False):
        arguments["rotary_dim"] = head_size // 2 // 16 * 16 or 8
    return arguments
