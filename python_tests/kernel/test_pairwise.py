"""Every pair of format, granularity, type, shape, length and feature, through LaunchGqa."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, GRANULARITIES, HALVES, ROTARY, SINKS, params, rotary_of
from python_tests.kernel.verify import path_of, verify
from python_tests.op.pairwise import Choice, allowed_pairs, pairwise
from python_tests.reference.format import Granularity

# (S, tokens after the call, host total)
LENGTHS: dict[str, tuple[int, tuple[int, ...], int | None]] = {
    "prompt": (37, (37, 20, 1), None),
    "prompt-long": (131, (131, 128, 65), None),
    "step": (1, (40, 1, 23), 48),
    "step-long": (1, (150, 129, 128), 160),
    "burst": (4, (43, 4, 29), None),
    "burst-long": (16, (150, 16, 129), None),
    "chunk": (37, (37, 37, 40), 48),
    "chunk-long": (65, (160, 65, 128), None),
}
PARAMETERS: dict[str, list[Any]] = {
    "head_size": [8, 24, 64, 72, 80, 96, 128, 192, 256],
    "lengths": list(LENGTHS),
    "rotary": list(ROTARY),
    "dtype": FORMATS,
    "group": [1, 2, 3, 4, 7, 8, 12, 24],
    "sinks": list(SINKS),
    "k_quant": GRANULARITIES,
    "v_quant": GRANULARITIES,
    "window": [-1, 6, 63, 130],
    "batch": [1, 3],
    "scale_type": ["float32", "float16"],
    "activation": HALVES,
    "softcap": [0.0, 4.0],
    "scale": [0.0, 0.4],
    "packed": [False, True],
    "in_place": [True, False],
    "multiprocessors": [1, 4, 132],
}


def forbidden(left: Choice, right: Choice) -> bool:
    """Static scales are float, and both scales have one type. A part of a head of 8 would be all of it."""
    if left == ("scale_type", "float16") and right[0] in ("k_quant", "v_quant"):
        return right[1] is not Granularity.PER_TOKEN
    return left == ("head_size", 8) and right[0] == "rotary" and str(right[1]).endswith("part")


ROWS = pairwise(PARAMETERS, forbidden)


def case_of(row: dict[str, Any]) -> KernelCase:
    """The case of one table row."""
    seq, totals, total = LENGTHS[row["lengths"]]
    kv_heads = 2 if row["group"] > 1 else 3
    same = ("dtype", "k_quant", "v_quant", "head_size", "window", "scale_type", "activation", "softcap", "scale")
    return KernelCase(
        id="-".join(map(str, row.values())), **{k: row[k] for k in same}, **SINKS[row["sinks"]],
        **rotary_of(row["rotary"], row["head_size"]), heads=kv_heads * row["group"], kv_heads=kv_heads,
        capacity=160 if max(totals) > 48 else 48, seq=seq, totals=totals[: row["batch"]], total=total,
        packed=row["packed"], in_place=row["in_place"], multiprocessors=row["multiprocessors"],
    )  # fmt: skip


CASES = [case_of(row) for row in ROWS]


@pytest.mark.gpu
@pytest.mark.parametrize("case", params(CASES))
def test_pair(case: KernelCase, device: Device) -> None:
    """Output within the bound; bytes, scales, guards and untouched rows exact."""
    verify(case, device)


def test_table_is_complete() -> None:
    """Every allowed pair occurs, none that is forbidden does, and each kernel serves part of the rows."""
    seen = {((a, row[a]), (b, row[b])) for row in ROWS for a, b in combinations(PARAMETERS, 2)}
    assert seen == set(allowed_pairs(PARAMETERS, forbidden))
    paths = [path_of(case) for case in CASES]
    assert min(paths.count(path) for path in set(paths)) >= 10
    assert len(set(paths)) == 3
