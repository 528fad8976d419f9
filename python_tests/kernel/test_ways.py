"""The lists of GPU tests visit each way to merge splits with each number of warps. By an H200's plans: needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from python_tests.kernel import test_decode, test_late_lengths, test_sanitizer
from python_tests.kernel.case import KernelCase
from python_tests.kernel.params import GqaPlan, HostLibrary
from python_tests.kernel.test_plan import CLUSTERS, H200, call
from python_tests.kernel.verify import path_of
from python_tests.reference.format import CacheDtype

# With 8 rows at most; whole rows of 8 warps have too few splits for the merge kernel.
WIDE_WAYS = {
    ("one-split", 8), ("one-split", 16), ("last-block", 8), ("last-block", 16), ("cluster", 8), ("cluster", 16),
    ("merge-kernel", 16),
}  # fmt: skip


def plan_of(library: HostLibrary, case: KernelCase) -> GqaPlan:
    """What an H200 would plan for the case."""
    assert case.dtype is not None
    p = call(
        case.dtype, batch=case.batch, seq=case.seq, group=case.heads // case.kv_heads, kv_heads=case.kv_heads,
        head_size=case.head_size, capacity=case.present_capacity, prompt=case.prompt,
    )  # fmt: skip
    plan = library.make_plan(p, case.multiprocessors or H200[0], H200[1], CLUSTERS if case.clusters else ())
    assert plan.path == path_of(case)
    return plan


def ways(library: HostLibrary, cases: Iterable[KernelCase]) -> set[tuple[str, int]]:
    """Who merges, and warps of a block."""
    return {(plan.merge, plan.warps) for plan in (plan_of(library, case) for case in cases)}


@pytest.mark.parametrize("dtype", CacheDtype)
def test_sanitizer_visits_all(library: HostLibrary, dtype: CacheDtype) -> None:
    """Every instance of the decode kernel in every way it can be planned."""
    for head_size, seq in product((24, 64, 72, 128, 136, 256), (1, 4)):
        cases = [c for c in test_sanitizer.DECODE if (c.dtype, c.head_size, c.seq) == (dtype, head_size, seq)]
        found = ways(library, cases)
        if head_size > 128 and seq == 4:
            assert all(warps == 0 for _, warps in found)
        elif head_size in (64, 128) and seq == 1:
            assert found == WIDE_WAYS
        else:
            warps = 4 if head_size > 128 else 8
            assert found == {(way, warps) for way in ("one-split", "last-block", "cluster", "merge-kernel")}


@pytest.mark.parametrize("dtype", CacheDtype)
@pytest.mark.parametrize("head_size", [64, 128])
def test_decode_visits_all(library: HostLibrary, head_size: int, dtype: CacheDtype) -> None:
    """Wide blocks with each group of the list, and each way to merge."""
    cases = [c for c in test_decode.CASES if (c.dtype, c.head_size) == (dtype, head_size)]
    assert ways(library, cases) >= WIDE_WAYS
    for group in (1, 4, 7, 8):
        grouped = [c for c in test_decode.WIDE if c in cases and c.heads == group * c.kv_heads]
        assert ways(library, grouped) >= {("cluster", 16), ("last-block", 16)}


@pytest.mark.parametrize("dtype", CacheDtype)
def test_late_lengths_are_planned_as_named(library: HostLibrary, dtype: CacheDtype) -> None:
    """Each way of test_late_lengths.py for all of its changes, and its crowds, which occupy most multiprocessors."""
    named = test_late_lengths.WAYS | test_late_lengths.OTHER_WAYS
    for name, change in test_late_lengths.VISITS:
        way = named[name]
        assert ways(library, [test_late_lengths.case_of(name, change, dtype)]) == {(way.merge, way.warps)}, name
    for name, crowd in test_late_lengths.CROWDS.items():
        case, early = test_late_lengths.crowd_of(name, dtype)
        plan = plan_of(library, case)
        assert (plan.merge, plan.warps) == (crowd.way.merge, crowd.way.warps), name
        assert len(early) == case.batch
        assert case.batch * case.kv_heads * plan.splits >= 96
