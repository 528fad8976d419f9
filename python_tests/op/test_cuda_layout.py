"""Where buffers may begin on the device, and how many rows a launch may have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from python_tests.op.checks import check_cache, check_output, verify
from python_tests.op.cuda_case import cuda_case
from python_tests.op.gqa_case import Case, make_inputs, make_past
from python_tests.op.gqa_model import build_model, cached_session, input_buffers, output_buffers, run
from python_tests.op.providers import Provider
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.step import Cache, run_step

pytestmark = pytest.mark.gpu
FORMATS = list(CacheDtype)
CODES = ("past_key", "past_value", "present_key", "present_value")
SHAPES = {"step": (1, (40, 17)), "burst": (3, (40, 17)), "chunk": (20, (60, 20))}


def row_alignment(dtype: CacheDtype) -> int:
    """Bytes that cache rows must be aligned to."""
    return 4 if dtype is CacheDtype.INT4 else 8


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("granularity", [Granularity.PER_TOKEN, Granularity.PER_CHANNEL])
@pytest.mark.parametrize("dtype", FORMATS)
def test_least_alignment(dtype: CacheDtype, granularity: Granularity, shape: str, cuda: Provider) -> None:
    """Activations and scales one element behind a 64-byte boundary, cache rows 8 bytes behind (int4: 4)."""
    seq, totals = SHAPES[shape]
    case = cuda_case(
        f"layout-{dtype}-{granularity}-{shape}", dtype=dtype, k_quant=granularity, v_quant=granularity, seq=seq,
        rotary="half", totals=totals, sink=True, total=64,
    )  # fmt: skip

    def shift(name: str, element_size: int) -> int:
        return row_alignment(dtype) if name in CODES else element_size

    for variant in (case, replace(case, in_place=False), replace(case, packed=True)):
        verify(variant, cuda, misalign=shift)
    prompt = replace(case, seq=20, totals=(20, 7), total=20)
    verify(prompt, cuda, misalign=shift)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_off_their_alignment(dtype: CacheDtype, name: str, cuda: Provider) -> None:
    """Half of what rows need is an error that names the tensor, not a fault on the device."""
    case = cuda_case(f"layout-off-{dtype}-{name}", dtype=dtype, totals=(40, 17), total=64, in_place=False)

    def shift(other: str, element_size: int) -> int:
        return row_alignment(dtype) // 2 if other == name else 0

    with pytest.raises(RuntimeError, match=rf"{name}.* {row_alignment(dtype)} bytes"):
        verify(case, cuda, misalign=shift)
    verify(case, cuda)


def broadcast(array: Array | None, batch: int) -> Array | None:
    """One entry's tensor for every entry."""
    return None if array is None else np.ascontiguousarray(np.broadcast_to(array, (batch, *array.shape[1:])))


BLOCKS = {
    "step": cuda_case("blocks-step", head_size=8, heads=1, kv_heads=1, capacity=4, totals=(4,), total=4),
    "burst": cuda_case("blocks-burst", head_size=8, heads=5, kv_heads=1, capacity=4, seq=2, totals=(4,), total=4),
    "chunk": cuda_case("blocks-chunk", head_size=8, heads=20, kv_heads=1, capacity=4, seq=2, totals=(4,), total=4),
    "prompt": cuda_case("blocks-prompt", head_size=8, heads=2, kv_heads=1, capacity=4, seq=3, totals=(3,), total=3),
}


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "separate"])
@pytest.mark.parametrize("shape", list(BLOCKS))
def test_more_than_65535_entries(shape: str, in_place: bool, cuda: Provider) -> None:
    """70,000 entries with the same tokens: every one has the bits of the first, and that one is right."""
    batch, one = 70_000, replace(BLOCKS[shape], in_place=in_place)
    inputs, past = make_inputs(one), make_past(one)
    many = replace(one, totals=one.totals * batch)
    tensors = {name: broadcast(getattr(inputs, name), batch) for name in ("query", "key", "value", "seqlens_k")}
    wide = replace(inputs, **tensors)  # type: ignore[arg-type]
    caches = Cache(*(broadcast(array, batch) for array in vars(past).values()))  # type: ignore[arg-type]
    ins = input_buffers(many, wide, caches, cuda)
    outs = output_buffers(many, ins, None if in_place else caches, cuda)
    run(cached_session(build_model(many), cuda, "ORT_ENABLE_ALL", 2), ins, outs)
    results = {name: buffer.read() for name, buffer in outs.items()}
    for name, array in results.items():
        bits = array.view(f"u{array.itemsize}")
        assert (bits == bits[:1]).all(), name
    expected = run_step(one.operator, inputs, past, None if in_place else past)
    names = ("present_key", "present_value", "present_k_scale", "present_v_scale")
    check_cache(one, Cache(*(results[name][:1] for name in names)), expected)
    check_output(results["output"][:1].reshape(expected.output.shape), expected)


@pytest.mark.parametrize("seq", [1, 4])
@pytest.mark.parametrize("heads", [(1024, 1024), (2048, 64), (4096, 64), (192, 3)], ids=lambda h: f"{h[0]}-{h[1]}")
def test_many_heads(heads: tuple[int, int], seq: int, cuda: Provider) -> None:
    """Heads by the thousand, and groups of 1, 32 and 64."""
    for dtype in FORMATS:
        verify(many_heads(heads, seq, dtype), cuda)


def many_heads(heads: tuple[int, int], seq: int, dtype: CacheDtype) -> Case:
    """A small cache under many heads."""
    return cuda_case(
        f"heads-{heads}-{seq}-{dtype}", dtype=dtype, heads=heads[0], kv_heads=heads[1], head_size=16, seq=seq,
        totals=(9, seq), capacity=130, total=130,
    )  # fmt: skip


def test_more_than_65535_heads_of_entries(cuda: Provider) -> None:
    """1,100 entries of 64 KV heads, all different."""
    case = cuda_case("blocks-heads", head_size=8, heads=64, kv_heads=64, capacity=3, totals=(3, 2, 1, 0) * 275, total=3)
    verify(case, cuda)
