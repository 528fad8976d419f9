"""Negative controls: what a wrong kernel would leave must fail the checks that the other files rely on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from python_tests.kernel.case import KernelCase
from python_tests.kernel.edges import FORMATS, HALVES
from python_tests.kernel.planted import one_hot_values, plant, sign_keys
from python_tests.kernel.yardstick import check_cache, check_output, check_prompt_key, expected_of
from python_tests.op.gqa_case import make_inputs, make_past
from python_tests.reference.format import Array, CacheDtype
from python_tests.reference.half_attention import HalfName, round_half
from python_tests.reference.step import Cache, Expected

BOTH = [pytest.param(half, dtype, id=f"{half}-{dtype}") for half in HALVES for dtype in FORMATS]


def case_of(half: HalfName, dtype: CacheDtype = CacheDtype.INT8) -> KernelCase:
    """A ragged step in the middle of a tile."""
    return KernelCase(id=f"control-{half}-{dtype}", activation=half, dtype=dtype, totals=(21, 40), total=64)


def expectation(case: KernelCase, past: Cache | None = None) -> Expected:
    """The reference's result for the unchanged case."""
    return expected_of(case, make_inputs(case), make_past(case) if past is None else past)


def wrong_output(case: KernelCase, past: Cache) -> Array:
    """What 16-bit attention gives that sees another cache."""
    return expectation(case, past).same_precision


@pytest.mark.parametrize(("half", "dtype"), BOTH)
def test_right_results_pass(half: HalfName, dtype: CacheDtype) -> None:
    """16-bit attention stays within its own bound, and uses it."""
    case = case_of(half, dtype)
    expected = expectation(case)
    assert 0 < check_output(expected.same_precision, expected, half) <= 0.5
    check_cache(expected.cache.copy(), expected.cache)


@pytest.mark.parametrize(("half", "dtype"), BOTH)
def test_zero_output_fails(half: HalfName, dtype: CacheDtype) -> None:
    """All zeros, and one head of zeros."""
    expected = expectation(case_of(half, dtype))
    output = expected.same_precision.copy()
    output[1, 0, 5] = 0
    for wrong in (np.zeros_like(output), output):
        with pytest.raises(AssertionError, match="beyond the bound"):
            check_output(wrong, expected, half)


@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("half", "dtype"), BOTH)
def test_one_scale_off_by_two_fails(half: HalfName, dtype: CacheDtype, side: str) -> None:
    """A token's scale doubled: the largest of the output's, and any in the cache."""
    case = case_of(half, dtype)
    expected, past = expectation(case), make_past(case)
    scales = getattr(past, side)
    scales[0, 1, 7] *= 2
    with pytest.raises(AssertionError, match=rf"present {side} at .*\(0, 1, 7, 0\)"):
        check_cache(expectation(case, past).cache, expected.cache)
    scales[0, 1] *= 2
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong_output(case, past), expected, half)


@pytest.mark.parametrize("half", HALVES)
def test_swapped_nibbles_fail(half: HalfName) -> None:
    """int4 with odd and even exchanged: in the bytes, and in what is read."""
    case = case_of(half, CacheDtype.INT4)
    expected, past = expectation(case), make_past(case)
    swapped = replace(past, key=(past.key << 4) | (past.key >> 4))
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong_output(case, swapped), expected, half)
    with pytest.raises(AssertionError, match=r"present key at .*\(0, 0, 0, "):
        check_cache(expectation(case, swapped).cache, expected.cache)


@pytest.mark.parametrize(("half", "dtype"), BOTH)
def test_missing_token_fails(half: HalfName, dtype: CacheDtype) -> None:
    """A kernel that leaves out one token of one batch entry: the first, one in the middle, the last old one."""
    case = replace(case_of(half, dtype), totals=(9, 12))
    expected, inputs = expectation(case), make_inputs(case)
    for token in (0, 5, 10):
        past = make_past(case)
        for array in (past.key, past.value, past.k_scale, past.v_scale):
            assert array is not None
            array[1, :, token:-1] = array[1, :, token + 1 :].copy()
        shorter = replace(inputs, seqlens_k=inputs.seqlens_k - np.array([0, 1], np.int32))
        wrong = expected_of(case, shorter, past).same_precision
        with pytest.raises(AssertionError, match=r"beyond the bound, worst at .* = \(1, "):
            check_output(wrong, expected, half)


@pytest.mark.parametrize("token", [0, 500, 998])
@pytest.mark.parametrize(("half", "dtype"), BOTH)
def test_missing_token_of_many_fails_the_count(half: HalfName, dtype: CacheDtype, token: int) -> None:
    """One token of 1,000: too little for random tokens, enough for those that test_coverage.py counts."""
    case = KernelCase(
        id=f"control-count-{half}-{dtype}", activation=half, dtype=dtype, heads=2, kv_heads=1, totals=(1000,),
        capacity=1024, total=1024,
    )  # fmt: skip
    query = np.zeros((1, 1, 2, 128), np.float32)
    inputs, past = plant(case, query, sign_keys(case), one_hot_values(case))
    expected = expected_of(case, inputs, past)
    check_output(expected.same_precision, expected, half)
    past.value[0, 0, token] = 0x88 if dtype is CacheDtype.INT4 else 0
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(expected_of(case, inputs, past).same_precision, expected, half)


@pytest.mark.parametrize(("half", "dtype"), BOTH)
def test_exchanged_key_and_value_fail(half: HalfName, dtype: CacheDtype) -> None:
    """K read as V and V as K, and the same in what is stored."""
    case = case_of(half, dtype)
    expected, past = expectation(case), make_past(case)
    exchanged = Cache(past.value, past.key, past.v_scale, past.k_scale)
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong_output(case, exchanged), expected, half)
    kept = expected.cache
    with pytest.raises(AssertionError, match="present key at"):
        check_cache(Cache(kept.value, kept.key, kept.k_scale, kept.v_scale), kept)


@pytest.mark.parametrize("half", HALVES)
def test_exchanged_heads_and_rows_fail(half: HalfName) -> None:
    """Query heads that read the other KV head, and new tokens in the wrong order."""
    case = replace(case_of(half), seq=3)
    expected = expectation(case)
    for wrong in (np.roll(expected.same_precision, 4, axis=2), expected.same_precision[:, ::-1]):
        with pytest.raises(AssertionError, match="beyond the bound"):
            check_output(wrong, expected, half)


@pytest.mark.parametrize("dtype", FORMATS)
def test_one_flipped_bit_fails(dtype: CacheDtype) -> None:
    """In a row that was written, in an old row, and in the poison behind them."""
    expected = expectation(case_of("float16", dtype))
    for token in (39, 3, 63):
        wrong = expected.cache.copy()
        wrong.value.view(np.uint8)[1, 1, token, 17] ^= 1
        with pytest.raises(AssertionError, match=rf"present value at .*\(1, 1, {token}, 17\)"):
            check_cache(wrong, expected.cache)


@pytest.mark.parametrize("half", HALVES)
def test_moved_nan_fails(half: HalfName) -> None:
    """A NaN where there should be a number, a number where there should be NaN, and Inf for a number."""
    case = replace(case_of(half), totals=(0, 40))
    expected = expectation(case)
    right = expected.same_precision
    check_output(right, expected, half)
    for place, value in (((1, 0, 0, 3), np.nan), ((0, 0, 7, 127), 0), ((1, 0, 0, 3), np.inf)):
        wrong = right.copy()
        wrong[place] = value
        with pytest.raises(AssertionError, match="finite where it must not be"):
            check_output(wrong, expected, half)


@pytest.mark.parametrize("half", HALVES)
def test_small_rows_are_not_hidden_by_large_ones(half: HalfName) -> None:
    """A batch entry ten thousand times smaller than the other must still be right."""
    case = case_of(half)
    past, inputs = make_past(case), make_inputs(case)
    assert inputs.value is not None
    assert past.v_scale is not None
    inputs.value[1] = round_half(inputs.value[1] * np.float32(2.0**-10), half)
    past.v_scale[1] *= np.float32(2.0**-10)
    expected = expected_of(case, inputs, past)
    wrong = expected.same_precision.copy()
    wrong[1] *= 1.125
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong, expected, half)


def test_prompt_key_of_another_position_fails() -> None:
    """Rotary by one position too many."""
    case = KernelCase(id="control-prompt-key", seq=9, totals=(9, 4), rotary="half")
    expected = expectation(case)
    right = expected.k_rows.astype(np.float16).swapaxes(1, 2)
    check_prompt_key(right, expected, case)
    with pytest.raises(AssertionError, match="prompt_key of entry 0"):
        check_prompt_key(np.roll(right, 1, axis=2), expected, case)
