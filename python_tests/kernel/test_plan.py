"""MakePlan on the host, compiled by the C++ compiler: paths, splits, scratch and errors. Needs no GPU."""

from __future__ import annotations

from itertools import product

import pytest

from python_tests.kernel.params import (
    DECODE,
    FORMATS,
    MODES,
    PREFILL,
    PROMPT,
    GqaParams,
    GqaPlan,
    HostLibrary,
    check_layout,
    mirrored_fields,
)
from python_tests.reference.format import CacheDtype, Granularity, row_bytes

H200 = (132, 90)
# Of an H200: [n] clusters of n blocks, one block a multiprocessor.
CLUSTERS = (0, 0, 66, 39, 30, 20, 17, 15, 15)
DEVICES = (H200, (1, 75), (16, 75), (40, 86), (68, 80), (108, 80), (128, 89), (148, 100), (170, 120))
MEGABYTE = 10**6


def call(
    dtype: CacheDtype = CacheDtype.INT8,
    *,
    batch: int = 1,
    seq: int = 1,
    group: int = 4,
    kv_heads: int = 8,
    head_size: int = 128,
    capacity: int = 131_072,
    prompt: bool = False,
) -> GqaParams:
    """Parameters without memory behind them: MakePlan looks at shapes and addresses only."""
    p = GqaParams(
        batch_size=batch, sequence_length=seq, num_heads=kv_heads * group, kv_num_heads=kv_heads, group_size=group,
        head_size=head_size, row_bytes=row_bytes(dtype, head_size), capacity=capacity, past_capacity=capacity,
        is_prompt=prompt, format=FORMATS[dtype],
    )  # fmt: skip
    for side in (p.k, p.v):
        side.mode = MODES[Granularity.PER_TOKEN]
        side.codes = 0x7F0000000000
    return p


def test_structs_are_mirrored(library: HostLibrary) -> None:
    """Every field of both languages, and no gap in which one could be missing."""
    check_layout(library)
    ends: dict[str, int] = {}
    for name, offset, size in mirrored_fields():
        struct, _, field = name.partition(".")
        if field:
            assert 0 <= offset - ends.get(struct, 0) < 8, name
            ends[struct] = offset + size
    assert ends.keys() == {"KvSide", "GqaParams", "GqaPlan"}


def test_a_moved_field_is_noticed(library: HostLibrary) -> None:
    """Negative control of the mirror."""
    fields = library.fields()
    fields["GqaParams.scale"] = (fields["GqaParams.scale"][0] + 4, 4)

    class Moved(HostLibrary):
        def __init__(self) -> None:
            """Without loading anything."""

        def fields(self) -> dict[str, tuple[int, int]]:
            return fields

    with pytest.raises(AssertionError, match=r"GqaParams\.scale"):
        check_layout(Moved())


@pytest.mark.parametrize(
    ("seq", "group", "head_size", "path"),
    [
        (1, 1, 128, DECODE), (1, 16, 128, DECODE), (16, 1, 64, DECODE), (2, 8, 128, DECODE), (5, 3, 72, DECODE),
        (1, 17, 128, PREFILL), (17, 1, 128, PREFILL), (3, 6, 64, PREFILL), (1, 64, 128, PREFILL),
        (1, 8, 256, DECODE), (8, 1, 192, DECODE), (1, 9, 256, PREFILL), (3, 3, 136, PREFILL), (512, 4, 128, PREFILL),
    ],
)  # fmt: skip
def test_path(library: HostLibrary, seq: int, group: int, head_size: int, path: int) -> None:
    """Few rows a KV head decode, more prefill; a prompt is a prompt whatever its rows are."""
    for dtype in CacheDtype:
        plan = library.make_plan(call(dtype, seq=seq, group=group, head_size=head_size), *H200)
        assert plan.path == path
        assert library.path_name(plan) == ("KV_CACHE_QUANT_DECODE", "KV_CACHE_QUANT_PREFILL")[path]
        assert plan.unit_rows * plan.units_per_head >= seq * group > plan.unit_rows * (plan.units_per_head - 1)
        prompt = library.make_plan(call(dtype, seq=seq, group=group, head_size=head_size, prompt=True), *H200)
        assert prompt.path == PROMPT
        assert prompt.splits == 1
        assert library.path_name(prompt) == "KV_CACHE_QUANT_PROMPT"


@pytest.mark.parametrize("rows", [17, 32, 33, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("head_size", [64, 80, 128, 136, 256])
def test_rows_of_a_prefill_unit(library: HostLibrary, head_size: int, rows: int) -> None:
    """128, or 64 where D > 128: what a block's registers hold. One unit of few rows has scratch for those alone."""
    most = 128 if head_size <= 128 else 64
    for dtype in CacheDtype:
        plan = library.make_plan(call(dtype, seq=rows, group=1, head_size=head_size), *H200)
        assert plan.unit_rows == min(-(-rows // 16) * 16, most)
        assert plan.units_per_head == -(-rows // most)


@pytest.mark.parametrize("head_size", range(8, 257, 8))
def test_padded_head_size(library: HostLibrary, head_size: int) -> None:
    """The next of 64, 128 and 256; whole rows only where nothing is padded and all rows are 16-byte aligned."""
    for dtype in CacheDtype:
        plan = library.make_plan(call(dtype, head_size=head_size), *H200)
        assert plan.padded_head_size == next(n for n in (64, 128, 256) if n >= head_size)
        assert plan.whole_rows == (head_size in (64, 128, 256))
        shifted = call(dtype, head_size=head_size)
        shifted.v.codes += 8
        assert not library.make_plan(shifted, *H200).whole_rows


def blocks(p: GqaParams, plan: GqaPlan) -> int:
    """Thread blocks of the attention kernel."""
    return int(p.batch_size * p.kv_num_heads * plan.units_per_head * plan.splits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seq", [1, 2, 4, 16, 64])
def test_scratch_of_a_step_is_small(library: HostLibrary, device: tuple[int, int], seq: int) -> None:
    """Under 16 MB at 131,072 tokens, 8 KV heads, D 128, on every chip; a cache of 16 bits would be 537 MB."""
    for dtype, group in product(CacheDtype, (1, 2, 4, 8, 16)):
        plan = library.make_plan(call(dtype, seq=seq, group=group), *device)
        if seq * group <= 64:
            assert plan.workspace_bytes < 16 * MEGABYTE


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


def test_activation_vectors(library: HostLibrary) -> None:
    """Rows of activations and rotary tables in vectors only where all of them are aligned and rotate by eights."""

    def vectors(**fields: int | bool) -> bool:
        p = call()
        p.query = p.key = p.value = p.cos_cache = p.sin_cache = 1 << 20
        p.query_stride, p.kv_stride, p.rotary_dim = 4096, 1024, 128
        for name, value in fields.items():
            setattr(p, name, value)
        return bool(library.make_plan(p, *H200).activation_vectors)

    assert vectors()
    assert vectors(rotary_dim=24, rotary_interleaved=True)
    assert vectors(rotary_dim=24, cos_cache=0)
    for name in ("query", "key", "value", "cos_cache", "sin_cache"):
        assert not vectors(**{name: (1 << 20) + 8}), name
    assert not vectors(query_stride=4100)
    assert not vectors(kv_stride=1020)
    assert not vectors(rotary_dim=24)


def test_plan_depends_on_shapes_only(library: HostLibrary) -> None:
    """Scratch addresses and the lengths' address change nothing: a captured launch stays right."""
    p, other = call(), call()
    other.seqlens_k, other.partial_out, other.partial_stats, other.prompt_key = 8, 16, 24, 32
    plans = [bytes(library.make_plan(x, *H200)) for x in (p, other)]
    assert plans[0] == plans[1]


def test_workspace_parts_do_not_overlap(library: HostLibrary) -> None:
    """Numerators, statistics and a prompt's rotated keys lie one behind the other at multiples of 256 bytes."""
    p = call(batch=2, seq=3, group=5)
    plan = library.make_plan(p, *H200)
    assert plan.splits > 1
    rows = p.batch_size * p.kv_num_heads * plan.units_per_head * plan.splits * plan.unit_rows
    library.bind_workspace(plan, 1 << 20, p)
    assert p.partial_out % 256 == p.partial_stats % 256 == 0
    assert p.partial_out >= 1 << 20
    assert p.partial_stats >= p.partial_out + rows * plan.padded_head_size * 4
    assert (1 << 20) + plan.workspace_bytes >= p.partial_stats + rows * 8
    prompt = call(batch=2, seq=100, prompt=True)
    assert library.make_plan(prompt, *H200).workspace_bytes == 0
    prompt.cos_cache = prompt.sin_cache = 256
    assert library.make_plan(prompt, *H200).workspace_bytes >= 2 * 100 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("head_size", 264, "head size 264"), ("head_size", 0, "head size 0"), ("head_size", 60, "head size 60"),
        ("head_size", -8, "head size -8"), ("group_size", 65, "65 query heads per KV head"),
        ("group_size", 0, "0 query heads per KV head"), ("format", 3, "cache format 3"),
        ("format", -1, "cache format -1"),
    ],
)  # fmt: skip
def test_value_that_no_kernel_serves(library: HostLibrary, field: str, value: int, text: str) -> None:
    """The error names what was given."""
    p = call()
    setattr(p, field, value)
    with pytest.raises(ValueError, match=text):
        library.make_plan(p, *H200)


def test_scale_mode_without_kernel(library: HostLibrary) -> None:
    """NONE and unknown modes, on either side."""
    for side in ("k", "v"):
        for mode in (0, 4):
            p = call()
            getattr(p, side).mode = mode
            with pytest.raises(ValueError, match=f"scale mode {mode}"):
                library.make_plan(p, *H200)


def test_chip_without_kernel(library: HostLibrary) -> None:
    """Below 7.5 nothing runs, and bfloat16 needs 8.0; fp8 runs everywhere."""
    for capability in (0, 60, 70, 72):
        with pytest.raises(ValueError, match=f"compute capability {capability}"):
            library.make_plan(call(), 80, capability)
    p = call()
    p.activation = 1
    with pytest.raises(ValueError, match="bfloat16 activations on compute capability 75"):
        library.make_plan(p, 40, 75)
    for dtype, capability in product(CacheDtype, (75, 80, 86, 89, 90, 100, 120)):
        library.make_plan(call(dtype), 40, capability)


def test_misaligned_cache(library: HostLibrary) -> None:
    """Rows must be aligned to 8 bytes, those of int4 to 4."""
    for dtype, side, offset in product(CacheDtype, ("k", "v"), (1, 2, 4, 8)):
        p = call(dtype)
        getattr(p, side).codes += offset
        least = 4 if dtype is CacheDtype.INT4 else 8
        if offset % least == 0:
            library.make_plan(p, *H200)
        else:
            with pytest.raises(ValueError, match=f"not aligned to {least} bytes"):
                library.make_plan(p, *H200)


def test_more_blocks_than_a_grid_has(library: HostLibrary) -> None:
    """2^31 - 1 blocks are the limit of a launch; what exceeds it is named."""
    library.make_plan(call(batch=200_000, capacity=64), *H200)
    with pytest.raises(ValueError, match="blocks of query rows"):
        library.make_plan(call(batch=2**31 - 1, capacity=64), *H200)


def test_empty_calls(library: HostLibrary) -> None:
    """No batch, no rows: a plan without work."""
    for p in (call(batch=0), call(seq=0), call(batch=0, prompt=True)):
        plan = library.make_plan(p, *H200)
        assert plan.splits == 1
        assert plan.workspace_bytes == 0
