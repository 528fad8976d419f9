"""MakePlan on the host, compiled by the C++ compiler: paths, splits, scratch and errors. Needs no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

from python_tests.kernel import toolchain
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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    """plan.cc and the tests' entry, without a line of device code."""
    nvcc = toolchain.find_nvcc()
    headers = nvcc.resolve().parents[1] / "include" if nvcc else Path("/usr/local/cuda/include")
    if not (headers / "vector_types.h").exists():
        pytest.skip("needs the headers of a CUDA toolkit")
    compiler = os.environ.get("CXX") or shutil.which("c++") or "c++"
    target = tmp_path_factory.mktemp("plan") / "plan.so"
    sources = [toolchain.NATIVE / "plan_entry.cc", toolchain.KERNELS / "plan.cc"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    include = [f"-I{toolchain.ROOT}", "-isystem", str(headers)]
    subprocess.run([compiler, *flags, *include, *map(str, sources), "-o", str(target)], check=True)
    return HostLibrary(target)


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
        # 16 rows or warps: one block a multiprocessor.
        assert blocks(p, plan) >= multiprocessors or group > 8 or plan.warps == 16
        assert 1 <= plan.splits <= 2048
        for capacity in (0, 1, 63, 64, 65, 1000):
            p.capacity = capacity
            assert 1 <= library.make_plan(p, *device).splits <= max(1, -(-capacity // 128))


def test_who_merges(library: HostLibrary) -> None:
    """Without clusters: the decode kernel up to 32 splits, with a counter for every unit; else the merge kernel."""
    for kv_heads, batch, capacity, counters in (
        (8, 1, 131_072, 8),
        (8, 8, 131_072, 64),
        (1, 1, 131_072, 0),
        (1, 1, 4096, 1),
    ):
        plan = library.make_plan(call(kv_heads=kv_heads, batch=batch, capacity=capacity), *H200)
        assert plan.splits > 1
        assert plan.counters == counters
        assert plan.cluster == 1
        assert (plan.splits <= 32) == (counters > 0)
    assert library.make_plan(call(capacity=128), *H200).counters == 0
    assert library.make_plan(call(seq=64), *H200).counters == 0


@pytest.mark.parametrize(
    ("batch", "capacity", "cluster", "warps"),
    [
        (1, 1024, 8, 8),  # a cluster of small blocks
        (1, 896, 7, 8),
        (1, 1025, 5, 16),  # of large ones
        (1, 2048, 8, 16),
        (1, 4096, 8, 16),  # two tiles a warp
        (1, 4097, 1, 16),
        (1, 8192, 1, 16),
        (1, 128, 1, 16),
        (16, 131_072, 1, 16),  # a split for each
        (9, 131_072, 1, 8),  # large blocks would leave half of the multiprocessors idle
    ],
)
def test_clusters(library: HostLibrary, batch: int, capacity: int, cluster: int, warps: int) -> None:
    """Up to 8 splits are a cluster, without scratch or counters, where all clusters run at once."""
    plan = library.make_plan(call(batch=batch, capacity=capacity), *H200, CLUSTERS)
    assert (plan.cluster, plan.warps) == (cluster, warps)
    if cluster > 1:
        assert plan.splits == cluster
        assert plan.workspace_bytes == plan.counters == 0
        other = library.make_plan(call(batch=batch, capacity=capacity), *H200)
        assert other.cluster == 1
        assert other.counters == (batch * 8 if other.splits > 1 else 0)
    # 16 query rows leave room for one block a multiprocessor.
    assert library.make_plan(call(batch=8, seq=4, capacity=1024), *H200, CLUSTERS).splits == 2
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
