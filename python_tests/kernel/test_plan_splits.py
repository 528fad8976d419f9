"""How MakePlan cuts a decode call: warps of a block, splits, who merges them. On the host, as test_plan.py."""

from __future__ import annotations

from itertools import product

import pytest

from python_tests.kernel.params import DECODE, PREFILL, GqaParams, GqaPlan, HostLibrary
from python_tests.kernel.plan_calls import CLUSTERS, DEVICES, H200, call
from python_tests.reference.format import CacheDtype


def blocks(p: GqaParams, plan: GqaPlan) -> int:
    """Thread blocks of the attention kernel."""
    return int(p.batch_size * p.kv_num_heads * plan.units_per_head * plan.splits)


@pytest.mark.parametrize("device", DEVICES)
def test_splits_fill_the_device(library: HostLibrary, device: tuple[int, int]) -> None:
    """A long context keeps eight of ten multiprocessors busy at least; short ones do not get more splits than tiles."""
    multiprocessors = device[0]
    for batch, kv_heads, group in product((1, 2, 7, 64), (1, 2, 8, 32), (1, 4, 8, 16)):
        p = call(batch=batch, kv_heads=kv_heads, group=group)
        plan = library.make_plan(p, *device)
        assert 10 * blocks(p, plan) >= 8 * multiprocessors
        # 16 rows, 16 warps: one block a multiprocessor.
        assert blocks(p, plan) >= multiprocessors or group > 8 or plan.warps == 16
        assert 1 <= plan.splits <= 512
        for capacity in (0, 1, 63, 64, 65, 127, 128, 129, 256, 257, 1000, 4096):
            p.capacity = capacity
            plan = library.make_plan(p, *device, CLUSTERS)
            assert 1 <= plan.splits <= max(1, -(-capacity // (256 if plan.warps == 16 else 128)))


@pytest.mark.parametrize("device", DEVICES)
def test_warps(library: HostLibrary, device: tuple[int, int]) -> None:
    """8, or 4 of heads beyond 128; twice as many from sm_80 on where cache rows are whole and query rows up to 8."""
    multiprocessors, capability = device
    for clusters, head_size, seq, group in product(((), CLUSTERS), range(8, 257, 8), (1, 2), (1, 4, 8, 16)):
        p = call(head_size=head_size, seq=seq, group=group)
        plan = library.make_plan(p, *device, clusters)
        few = 4 if head_size > 128 else 8
        if plan.path == PREFILL:
            assert plan.warps == 0
        elif head_size in (64, 128, 256) and seq * group <= 8 and multiprocessors >= 8 and capability >= 80:
            assert plan.warps == 2 * few
        else:
            assert plan.warps == few
        p.k.codes += 8
        assert library.make_plan(p, *device, clusters).warps in (0, few)


@pytest.mark.parametrize(
    ("multiprocessors", "units", "wide"),
    [
        (132, 1, True), (132, 132, True), (132, 133, False), (1, 1, True), (1, 2, False), (3, 2, False), (4, 2, True),
        (132, 70, False), (132, 28, False), (132, 26, True),
    ],
)  # fmt: skip
def test_wide_blocks_leave_no_multiprocessor_idle(
    library: HostLibrary, multiprocessors: int, units: int, wide: bool
) -> None:
    """As many multiprocessors get work as with two narrow blocks each, but for a tenth; else blocks are narrow."""
    for dtype, head_size in product(CacheDtype, (64, 128, 256)):
        p = call(dtype, kv_heads=1, batch=units, head_size=head_size)
        few = 4 if head_size == 256 else 8
        assert library.make_plan(p, multiprocessors, 90).warps == (2 * few if wide else few)
    assert library.make_plan(call(batch=0), multiprocessors, 90).warps == 8


@pytest.mark.parametrize("clusters", [(), CLUSTERS], ids=["alone", "clusters"])
@pytest.mark.parametrize("multiprocessors", [1, 16, 40, 72])
def test_blocks_before_sm_80(library: HostLibrary, multiprocessors: int, clusters: tuple[int, ...]) -> None:
    """64 KB of shared memory: no wide blocks, and cache rows of 16 query rows are read in pieces, as unaligned ones."""
    for dtype, head_size, rows in product(CacheDtype, (64, 72, 128, 136, 256), (1, 8, 9, 16)):
        p = call(dtype, head_size=head_size, group=rows)
        few, whole = (4 if head_size > 128 else 8), head_size in (64, 128, 256)
        old = library.make_plan(p, multiprocessors, 75, clusters)
        new = library.make_plan(p, multiprocessors, 80, clusters)
        assert old.path == new.path == (DECODE if rows <= (8 if head_size > 128 else 16) else PREFILL)
        assert new.whole_rows == whole
        if old.path == DECODE:
            assert old.warps == few
            assert new.warps == (2 * few if whole and rows <= 8 and multiprocessors >= 8 else few)
            assert old.whole_rows == (whole and rows <= 8)
        else:
            assert old.whole_rows == whole
        # What is read in pieces needs no more than their alignment.
        p.k.codes += 4 if dtype is CacheDtype.INT4 else 8
        assert not library.make_plan(p, multiprocessors, 75, clusters).whole_rows


def test_who_merges(library: HostLibrary) -> None:
    """Without clusters: the decode kernel up to 32 splits, with a counter for every unit; else the merge kernel."""
    for kv_heads, batch, capacity, merge in (
        (8, 1, 131_072, "begins-last"),
        (8, 8, 131_072, "begins-last"),
        (8, 16, 131_072, "one-split"),
        (1, 1, 131_072, "merge-kernel"),
        (1, 1, 8193, "merge-kernel"),
        (1, 1, 8192, "begins-last"),
        (1, 1, 257, "begins-last"),
        (1, 1, 256, "one-split"),
    ):
        plan = library.make_plan(call(kv_heads=kv_heads, batch=batch, capacity=capacity), *H200)
        assert plan.merge == merge
        assert plan.warps == 16
        assert plan.counters == (kv_heads * batch if merge == "begins-last" else 0)
        assert plan.cluster == 1
        assert (plan.splits <= 32) == (merge != "merge-kernel")
        assert (plan.workspace_bytes > 0) == (plan.splits > 1)
    assert library.make_plan(call(seq=64), *H200).counters == 0


@pytest.mark.parametrize(
    ("batch", "capacity", "warps", "splits", "cluster"),
    [
        (1, 128, 16, 1, 1), (1, 129, 8, 2, 2), (1, 896, 8, 7, 7), (1, 1024, 8, 8, 8),
        (1, 1025, 16, 5, 5), (1, 2048, 16, 8, 8), (1, 2049, 16, 9, 1), (1, 4096, 16, 16, 1),
        (1, 4097, 16, 16, 1), (1, 8192, 16, 16, 1), (1, 131_072, 16, 16, 1),
        (2, 1024, 8, 8, 8), (2, 2048, 16, 8, 1), (2, 4096, 16, 8, 1), (4, 131_072, 16, 4, 1), (8, 131_072, 16, 2, 2),
        (16, 1024, 16, 1, 1), (16, 131_072, 16, 1, 1),
    ],
)  # fmt: skip
def test_clusters(library: HostLibrary, batch: int, capacity: int, warps: int, splits: int, cluster: int) -> None:
    """Up to 8 splits are a cluster, without scratch or counters, where all clusters run at once.

    Narrow blocks where their splits fit into one cluster; else wide ones, up to 8 splits of a tile a warp.
    """
    p = call(batch=batch, capacity=capacity)
    plan = library.make_plan(p, *H200, CLUSTERS)
    assert (plan.warps, plan.splits, plan.cluster) == (warps, splits, cluster)
    assert plan.cluster in (1, plan.splits)
    if cluster > 1:
        assert plan.workspace_bytes == plan.counters == 0
        few = [n if blocks != cluster else 0 for blocks, n in enumerate(CLUSTERS)]
        assert library.make_plan(p, *H200, few).cluster != cluster
    alone = library.make_plan(p, *H200)
    assert (alone.warps, alone.cluster) == (16, 1)
    assert alone.counters == (batch * 8 if alone.splits > 1 else 0)


@pytest.mark.parametrize(
    ("head_size", "rows", "tokens", "int4_tokens", "beyond"),
    [
        (64, 8, 2048, 4096, 9), (128, 8, 2048, 4096, 9), (64, 16, 2048, 2048, 16), (128, 16, 2048, 2048, 16),
        (72, 8, 1024, 1024, 9), (72, 16, 1024, 1024, 9), (136, 8, 1024, 1024, 9), (256, 8, 1024, 1024, 9),
    ],
)  # fmt: skip
def test_a_cluster_of_8_has_a_tile_a_warp(
    library: HostLibrary, head_size: int, rows: int, tokens: int, int4_tokens: int, beyond: int
) -> None:
    """More than 8 splits of few tokens become 8, in which each warp has a tile at most; beyond that they stay.

    Tiles have 16 tokens; 32 of whole rows up to D 128 where they are int4's or query rows are more than 8. Where 8
    splits of the least size, 128 tokens or 256 of 16 warps, are as many tokens, there is nothing to change.
    """
    for dtype in CacheDtype:
        most = int4_tokens if dtype is CacheDtype.INT4 else tokens
        p = call(dtype, head_size=head_size, group=rows, capacity=most)
        plan = library.make_plan(p, *H200, CLUSTERS)
        assert (plan.splits, plan.merge) == (8, "cluster")
        p.capacity += 1
        plan = library.make_plan(p, *H200, CLUSTERS)
        assert (plan.splits, plan.merge) == (16 if most == 4096 else beyond, "begins-last")


def test_clusters_of_other_shapes(library: HostLibrary) -> None:
    """Heads beyond 128: 4 warps in clusters of all splits, 8 in those of few; 16 rows: a block a multiprocessor."""
    for head_size, capacity, warps, splits in (
        (256, 1024, 4, 8), (136, 1024, 4, 8), (256, 1025, 8, 9), (136, 1025, 4, 9), (256, 131_072, 8, 16),
        (136, 131_072, 4, 32),
    ):  # fmt: skip
        plan = library.make_plan(call(head_size=head_size, capacity=capacity), *H200, CLUSTERS)
        assert (plan.warps, plan.splits) == (warps, splits)
        assert plan.merge == ("cluster" if splits == 8 else "begins-last")
    for p in (call(batch=8, head_size=256, capacity=1025), call(batch=8, seq=4, capacity=1024)):
        plan = library.make_plan(p, *H200, CLUSTERS)
        assert (plan.warps, plan.splits, plan.cluster) == (8, 2, 2)
    # More blocks than run at once, but in full waves.
    plan = library.make_plan(call(batch=7, head_size=256, capacity=1025), *H200, CLUSTERS)
    assert (plan.warps, plan.splits, plan.merge) == (8, 7, "begins-last")
    assert library.make_plan(call(seq=64, capacity=1024), *H200, CLUSTERS).cluster == 1
