"""Every pair of format, granularity, scale type, activation type, shape and feature."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from python_tests.op.checks import verify
from python_tests.op.gqa_case import Case
from python_tests.op.pairwise import Choice, allowed_pairs, pairwise
from python_tests.op.providers import Provider, selected
from python_tests.reference.format import CacheDtype, Granularity

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": CacheDtype.INT8},
    "fp8": {"dtype": CacheDtype.FP8},
    "fp8u8": {"dtype": CacheDtype.FP8, "fp8_as_uint8": True},
    "int4": {"dtype": CacheDtype.INT4},
}
# (S, tokens after the call of up to three entries, host total or None): lengths around the kernel's 128-token tile.
LENGTHS: dict[str, tuple[int, tuple[int, ...], int | None]] = {
    "prompt": (37, (37, 20, 1), None),
    "prompt-long": (131, (131, 128, 65), None),
    "step": (1, (40, 1, 23), 48),
    "step-long": (1, (150, 129, 128), 160),
    "burst": (4, (43, 4, 29), None),
    "burst-long": (17, (150, 17, 129), None),
    "chunk": (37, (37, 37, 40), 48),
}
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
PARAMETERS: dict[str, list[Any]] = {
    "head_size": [8, 64, 72, 80, 96, 128, 192, 256],
    "lengths": list(LENGTHS),
    "rotary": list(ROTARY),
    "format": list(FORMATS),
    "group": [1, 3, 4, 8],
    "sinks": list(SINKS),
    "k": list(Granularity)[1:],
    "v": list(Granularity)[1:],
    "window": [-1, 6, 130],
    "batch": [1, 3],
    "scale_type": ["float32", "float16"],
    "activation": list(selected().activations),
    "softcap": [0.0, 4.0],
    "scale": [0.0, 0.4],
    "packed": [False, True],
    "in_place": [True, False],
    "seqlens_2d": [False, True],
}


def forbidden(left: Choice, right: Choice) -> bool:
    """Pairs that the contract excludes: static scales are float, and both scales have one type."""
    if left == ("scale_type", "float16") and right[0] in ("k", "v"):
        return right[1] is not Granularity.PER_TOKEN
    # A rotary part of a head of 8 would be no multiple of 8.
    return left == ("head_size", 8) and right[0] == "rotary" and str(right[1]).endswith("part")


ROWS = pairwise(PARAMETERS, forbidden)


def case_of(row: dict[str, Any]) -> Case:
    """The case of one table row."""
    seq, totals, total = LENGTHS[row["lengths"]]
    rotary = dict(ROTARY[row["rotary"]])
    part = row["head_size"] // 2 // 16 * 16 or 16
    rotary_dim = min(part, row["head_size"]) if rotary.pop("part", False) else None
    kv_heads = 2 if row["group"] > 1 else 3
    return Case(
        id="-".join(str(value) for value in row.values()),
        **FORMATS[row["format"]], **SINKS[row["sinks"]], **rotary,
        rotary_dim=rotary_dim, k_quant=row["k"], v_quant=row["v"], scale_type=row["scale_type"],
        activation=row["activation"], heads=kv_heads * row["group"], kv_heads=kv_heads, head_size=row["head_size"],
        capacity=160 if max(totals) > 48 else 48, seq=seq, totals=totals[: row["batch"]], total=total,
        window=row["window"], softcap=row["softcap"], scale=row["scale"], packed=row["packed"],
        in_place=row["in_place"], seqlens_2d=row["seqlens_2d"],
    )  # fmt: skip


CASES = [case_of(row) for row in ROWS]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_pair(case: Case, provider: Provider) -> None:
    """Output within the bound; bytes, scales, guards and untouched rows exact."""
    verify(case, provider)


def test_table_is_complete() -> None:
    """Every allowed pair occurs, none that is forbidden does, and ids (the seeds) are distinct."""
    seen = {((a, row[a]), (b, row[b])) for row in ROWS for a, b in combinations(PARAMETERS, 2)}
    assert seen == set(allowed_pairs(PARAMETERS, forbidden))
    assert len({case.id for case in CASES}) == len(CASES)


def test_excluded_pairs() -> None:
    """What the constraint removes is known: 2 static granularities of K and V, 2 partial rotations."""
    assert len(allowed_pairs(PARAMETERS, lambda a, b: False)) - len(allowed_pairs(PARAMETERS, forbidden)) == 6


def test_impossible_pair_is_reported() -> None:
    """A value that excludes all values of a third parameter cannot be covered and must not be dropped silently."""
    with pytest.raises(ValueError, match="no row can hold"):
        pairwise({"a": [1, 2], "b": [1], "c": [1, 2]}, lambda x, y: x == ("a", 1) and y[0] == "c")
