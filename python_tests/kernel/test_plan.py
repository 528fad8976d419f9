"""MakePlan on the host, compiled by the C++ compiler: paths, rows, scratch and errors. Needs no GPU."""

from __future__ import annotations

from itertools import product

import pytest

from python_tests.kernel.params import DECODE, PREFILL, PROMPT, HostLibrary, check_layout, mirrored_fields
from python_tests.kernel.plan_calls import DEVICES, H200, call
from python_tests.reference.format import CacheDtype

MEGABYTE = 10**6


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seq", [1, 2, 4, 16, 64])
def test_scratch_of_a_step_is_small(library: HostLibrary, device: tuple[int, int], seq: int) -> None:
    """Under 16 MB at 131,072 tokens, 8 KV heads, D 128, on every chip; a cache of 16 bits would be 537 MB."""
    for dtype, group in product(CacheDtype, (1, 2, 4, 8, 16)):
        plan = library.make_plan(call(dtype, seq=seq, group=group), *device)
        if seq * group <= 64:
            assert plan.workspace_bytes < 16 * MEGABYTE


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
