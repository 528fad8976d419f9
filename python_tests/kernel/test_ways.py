"""The lists of GPU tests visit each way to merge splits with each number of warps. By an H200's plans: needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import get_args

import pytest

from python_tests.kernel import (
    test_decode,
    test_late_lengths,
    test_merge,
    test_merge_kernel,
    test_prefill,
    test_sanitizer,
    test_values,
)
from python_tests.kernel.case import KernelCase
from python_tests.kernel.params import DECODE, GqaPlan, HostLibrary, Merge
from python_tests.kernel.plan_calls import CLUSTERS, H200, call
from python_tests.kernel.verify import path_of
from python_tests.reference.format import CacheDtype

# Each padded size with and without padding.
HEAD_SIZES = (24, 64, 72, 128, 136, 256)
MERGES = get_args(Merge)
KEYS = list(product(CacheDtype, HEAD_SIZES, (8, 16)))


def all_ways(head_size: int, rows: int) -> set[tuple[str, int]]:
    """Who merges, and warps of a block, of units of so many rows; none: prefill."""
    few, wide = (4, 8) if head_size > 128 else (8, 16)
    if head_size > 128 and rows > 8:
        return set()
    if head_size not in (64, 128, 256) or rows > 8:
        return set(product(MERGES, (few,)))
    # Narrow blocks have too few splits for the merge kernel.
    return set(product(MERGES, (few, wide))) - {("merge-kernel", few)}


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


def of_key(cases: Iterable[KernelCase], dtype: CacheDtype, head_size: int, rows: int) -> list[KernelCase]:
    """The cases of a format, a head size and units of 8 or 16 rows."""
    found = [c for c in cases if (c.dtype, c.head_size) == (dtype, head_size) and not c.prompt]
    return [c for c in found if (c.seq * c.heads // c.kv_heads > 8) == (rows > 8)]


@pytest.mark.parametrize(("dtype", "head_size", "rows"), KEYS)
def test_ways_of_an_h200(library: HostLibrary, dtype: CacheDtype, head_size: int, rows: int) -> None:
    """all_ways is what whole calls on all of its multiprocessors are planned for, and nothing else."""
    capacities = (100, 129, 700, 1024, 1025, 2048, 2049, 4096, 4097, 8193, 20_000, 131_072)
    found = set()
    for batch, kv_heads, group in product((1, 2, 3, 5, 7, 8, 14, 16, 33, 66, 133), (1, 2, 4, 8), (rows // 2 + 1, rows)):
        p = call(dtype, batch=batch, kv_heads=kv_heads, group=group, head_size=head_size)
        for p.capacity in capacities:
            plan = library.make_plan(p, *H200, CLUSTERS)
            if plan.path == DECODE:
                assert plan.unit_rows == rows
                found.add((plan.merge, plan.warps))
    assert found == all_ways(head_size, rows)


@pytest.mark.parametrize(("dtype", "head_size", "rows"), KEYS)
def test_sanitizer_visits_all(library: HostLibrary, dtype: CacheDtype, head_size: int, rows: int) -> None:
    """Every instance of the decode kernel in every way it can be planned."""
    cases = of_key(test_sanitizer.DECODE, dtype, head_size, rows)
    assert cases
    assert {way for way in ways(library, cases) if way[1] > 0} == all_ways(head_size, rows)


@pytest.mark.parametrize("dtype", CacheDtype)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_sanitizer_visits_merge_kernels(library: HostLibrary, head_size: int, dtype: CacheDtype) -> None:
    """Prefill of one split, of few, of what 256 threads of the merge kernel read together, and of more."""
    cases = [c for c in test_sanitizer.PREFILL if (c.dtype, c.head_size) == (dtype, head_size)]
    splits = sorted(plan_of(library, case).splits for case in cases)
    together = 8 * 256 // (next(n for n in (64, 128, 256) if n >= head_size) // 4)
    one, few, some, many = splits
    assert one == 1 < few <= 8 < some <= together < many


@pytest.mark.parametrize(("dtype", "head_size", "rows"), [key for key in KEYS if key[1] != 24])
def test_decode_visits_all(library: HostLibrary, dtype: CacheDtype, head_size: int, rows: int) -> None:
    """Every way with four or 16 query heads for a KV head, and the ways of wide blocks with each number of them."""
    wanted = all_ways(head_size, rows)
    cases = of_key(test_decode.WAYS, dtype, head_size, rows)
    assert ways(library, [c for c in cases if c.heads in (4, 16)]) == wanted
    if head_size in (64, 128, 256) and rows == 8:
        warps = 8 if head_size == 256 else 16
        for group in (1, 7, 8):
            grouped = [c for c in cases if c.heads == group]
            assert ways(library, grouped) >= {("cluster", warps), ("begins-last", warps)}
    for case in cases:
        plan = plan_of(library, case)
        assert case.id.startswith(f"decode-{plan.merge}-"), case.id


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


def test_late_lengths_visit_all(library: HostLibrary) -> None:
    """Every way at some head size, with 8 and with 16 rows, and every way to merge of wide heads."""
    found: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for way in (test_late_lengths.WAYS | test_late_lengths.OTHER_WAYS).values():
        rows = 16 if way.arguments.get("heads") == 32 else 8
        head_size = 256 if way.arguments.get("head_size") == 256 else 128
        found.setdefault((head_size, rows), set()).add((way.merge, way.warps))
    # ("merge-kernel", 8): of padded heads.
    assert found[128, 8] == all_ways(128, 8) | {("merge-kernel", 8)}
    assert found[256, 8] == all_ways(256, 8)
    assert found[128, 16] == all_ways(128, 16)


@pytest.mark.parametrize("dtype", CacheDtype)
def test_merges_are_planned_as_named(library: HostLibrary, dtype: CacheDtype) -> None:
    """test_merge.py: warps and splits of its cases, and more blocks than run at once where it says so."""
    for name, splits, window in test_merge.VISITS:
        plan = plan_of(library, test_merge.case_of(name, splits, dtype, window=window))
        assert (plan.merge, plan.warps, plan.splits) == ("begins-last", test_merge.BLOCKS[name].warps, splits), name
        assert plan.unit_rows == (16 if name.startswith("16-rows") else 8)
        assert plan.whole_rows == ("24" not in name and "72" not in name and "136" not in name)
        assert plan.counters == test_merge.ENTRIES
    for name in test_merge.WAVES:
        case = test_merge.waves_of(name, dtype)
        plan = plan_of(library, case)
        assert plan.merge == "begins-last"
        blocks = case.batch * case.kv_heads * plan.splits
        assert blocks > H200[0] * (2 if plan.unit_rows == 8 and plan.warps == 8 and case.head_size == 128 else 1)
    case = test_values.case_of("any", "begins-last", dtype=dtype)
    assert plan_of(library, case).merge == "begins-last"


def test_prefill_merges_are_planned_as_named(library: HostLibrary) -> None:
    """Each number of splits of the list."""
    for case in test_prefill.MERGED:
        assert 128 * plan_of(library, case).splits == case.capacity, case.id


@pytest.mark.parametrize("dtype", CacheDtype)
def test_merge_kernels_are_planned_as_named(library: HostLibrary, dtype: CacheDtype) -> None:
    """test_merge_kernel.py: its splits, and rows that are few for merge.cu, or are not."""
    for d, splits, whole in test_merge_kernel.VISITS:
        case = test_merge_kernel.case_of(d, splits, dtype, whole=whole)
        plan = plan_of(library, case)
        assert (plan.merge, plan.splits) == ("merge-kernel", splits), case.id
        pieces = plan.padded_head_size // 64
        assert (case.batch * case.seq * case.heads * pieces > 128) == whole, case.id
