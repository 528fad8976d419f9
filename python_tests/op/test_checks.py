"""Negative controls: what a wrong kernel would leave must fail the same checkers that the other tests use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from python_tests.op.checks import check_cache, check_guards, check_output, check_past_kept, check_scales
from python_tests.op.gqa_case import Case, make_inputs, make_past, poisoned_cache
from python_tests.op.gqa_model import Outcome
from python_tests.op.guarded import GuardedArray
from python_tests.op.pairwise import pairwise
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.step import Cache, Expected, run_step

FORMATS = [pytest.param(dtype, id=str(dtype)) for dtype in CacheDtype]
# Activation type and whether matrix products have 16-bit operands: both of the CPU's, then both of CUDA's.
ARITHMETIC: dict[str, dict[str, Any]] = {
    "float32": {"activation": "float32", "half_products": False},
    "float16": {"activation": "float16", "half_products": False},
    "float16-products": {"activation": "float16", "half_products": True},
    "bfloat16-products": {"activation": "bfloat16", "half_products": True},
}
ACTIVATIONS = list(ARITHMETIC)


def case_of(dtype: CacheDtype, activation: str = "float32") -> Case:
    """A ragged step in the middle of a tile."""
    return Case(id=f"control-{dtype}", dtype=dtype, totals=(21, 40), total=64, **ARITHMETIC[activation])


def expected_of(case: Case) -> Expected:
    """The reference's result for the unchanged case."""
    return run_step(case.operator, make_inputs(case), make_past(case))


def wrong_output(case: Case, past: Cache) -> Array:
    """What a kernel computes that sees another cache, rounded as a kernel's output is."""
    return run_step(case.operator, make_inputs(case), past).same_precision


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_right_results_pass(dtype: CacheDtype, activation: str) -> None:
    """The reference in the kernel's precision stays within its own bound, and uses it."""
    case = case_of(dtype, activation)
    expected = expected_of(case)
    assert 0 < check_output(expected.same_precision, expected) <= 0.5
    check_cache(case, expected.cache.copy(), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_zero_output_fails(dtype: CacheDtype, activation: str) -> None:
    """All zeros, and one head of zeros."""
    expected = expected_of(case_of(dtype, activation))
    output = expected.same_precision.copy()
    output[1, 0, 5] = 0
    for wrong in (np.zeros_like(output), output):
        with pytest.raises(AssertionError, match="beyond the bound"):
            check_output(wrong, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_one_scale_off_by_two_fails(dtype: CacheDtype, side: str, activation: str) -> None:
    """One token's scale doubled: the output check sees it, and so does the scale check."""
    case = case_of(dtype, activation)
    expected, past = expected_of(case), make_past(case)
    scales = past.k_scale if side == "k_scale" else past.v_scale
    assert scales is not None
    scales[0, 1, 7] *= 2
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong_output(case, past), expected)
    wrong = run_step(case.operator, make_inputs(case), past).cache
    with pytest.raises(AssertionError, match=rf"{side} at .*\(0, 1, 7, 0\)"):
        check_cache(case, wrong, expected)


def test_swapped_nibbles_fail() -> None:
    """int4 with odd and even exchanged: in the bytes, and in what is read."""
    case = case_of(CacheDtype.INT4)
    expected, past = expected_of(case), make_past(case)
    swapped = Cache((past.key << 4) | (past.key >> 4), past.value, past.k_scale, past.v_scale)
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong_output(case, swapped), expected)
    wrong = expected.cache.copy()
    row = wrong.key[1, 0, 39]
    row[...] = (row << 4) | (row >> 4)
    with pytest.raises(AssertionError, match=r"present_key at .*\(1, 0, 39, "):
        check_cache(case, wrong, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_missing_token_fails(dtype: CacheDtype, activation: str) -> None:
    """A kernel that leaves out one token of one batch entry: the first, one in the middle, the last old one."""
    case = case_of(dtype, activation)
    expected, inputs = expected_of(case), make_inputs(case)
    # bfloat16 outputs say little about tokens of little weight.
    for token in (0, 12, 38) if case.activation != "bfloat16" else (0, 38):
        past = make_past(case)
        for array in (past.key, past.value, past.k_scale, past.v_scale):
            assert array is not None
            array[1, :, token:-1] = array[1, :, token + 1 :].copy()
        shorter = replace(inputs, seqlens_k=inputs.seqlens_k - np.array([0, 1], np.int32))
        wrong = run_step(case.operator, shorter, past).same_precision
        assert np.array_equal(wrong[0], expected.same_precision[0])
        with pytest.raises(AssertionError, match=r"beyond the bound, worst at .* = \(1, "):
            check_output(wrong, expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_one_length_too_short_fails(dtype: CacheDtype) -> None:
    """seqlens_k one too small: the last old token is overwritten."""
    case = case_of(dtype)
    expected, inputs = expected_of(case), make_inputs(case)
    wrong = run_step(case.operator, replace(inputs, seqlens_k=inputs.seqlens_k - 1), make_past(case))
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong.same_precision, expected)
    with pytest.raises(AssertionError, match="present_key at"):
        check_cache(case, wrong.cache, expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_exchanged_key_and_value_fail(dtype: CacheDtype) -> None:
    """K read as V and V as K, and the same in what is stored."""
    case = case_of(dtype)
    expected, past = expected_of(case), make_past(case)
    exchanged = Cache(past.value, past.key, past.v_scale, past.k_scale)
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong_output(case, exchanged), expected)
    kept = expected.cache
    with pytest.raises(AssertionError, match="present_key at"):
        check_cache(case, Cache(kept.value, kept.key, kept.k_scale, kept.v_scale), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_exchanged_kv_heads_fail(activation: str) -> None:
    """Query heads that read the other KV head."""
    case = case_of(CacheDtype.INT8, activation)
    expected = expected_of(case)
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(np.roll(expected.same_precision, 4, axis=2), expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_one_flipped_bit_fails(dtype: CacheDtype) -> None:
    """In a row that was written, in an old row, and in the poison behind them."""
    case = case_of(dtype)
    expected = expected_of(case)
    for token in (39, 3, 63):
        wrong = expected.cache.copy()
        wrong.value.view(np.uint8)[1, 1, token, 17] ^= 1
        with pytest.raises(AssertionError, match=rf"present_value at .*\(1, 1, {token}, 17\)"):
            check_cache(case, wrong, expected)


def test_moved_nan_fails() -> None:
    """A NaN where there should be a number, a number where there should be NaN, and both."""
    case = replace(case_of(CacheDtype.INT8), totals=(0, 40))
    expected = expected_of(case)
    right = expected.same_precision
    check_output(right, expected)
    extra, missing = right.copy(), right.copy()
    extra[1, 0, 0, 3], missing[0, 0, 7, 127] = np.nan, 0
    for wrong in (extra, missing, right[::-1]):
        with pytest.raises(AssertionError, match="NaN positions"):
            check_output(wrong, expected)
    extra[1, 0, 0, 3] = np.inf
    with pytest.raises(AssertionError, match="Inf positions"):
        check_output(extra, expected)


def test_scale_bits_count() -> None:
    """One unit in the last place, the sign of zero, and NaN against a number; NaN payloads do not count."""
    right = np.array([1.0, 0.0, np.nan], np.float32)
    check_scales(np.array([1.0, 0.0, -np.nan], np.float32), right, "k_scale")
    for index, wrong in ((0, np.nextafter(np.float32(1), np.float32(2))), (1, np.float32(-0.0)), (2, np.float32(1))):
        changed = right.copy()
        changed[index] = wrong
        with pytest.raises(AssertionError, match="k_scale"):
            check_scales(changed, right, "k_scale")


def test_small_rows_are_not_hidden_by_large_ones() -> None:
    """A batch entry a million times smaller than the other must still be right."""
    case = case_of(CacheDtype.INT8)
    past, inputs = make_past(case), make_inputs(case)
    assert inputs.value is not None
    assert past.v_scale is not None
    inputs.value[1] *= np.float32(1e-6)
    past.v_scale[1] *= np.float32(1e-6)
    expected = run_step(case.operator, inputs, past)
    wrong = expected.same_precision.copy()
    wrong[1] *= np.float32(1.01)
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_output(wrong, expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_tie_tolerance_is_one_code_at_ties(dtype: CacheDtype) -> None:
    """Without exact ties, a code one off at a rounding boundary passes and the same change elsewhere fails."""
    case = replace(case_of(dtype), k_quant=Granularity.PER_TENSOR, v_quant=Granularity.PER_TENSOR)
    inputs, past = make_inputs(case), make_past(case)
    assert inputs.value is not None
    assert past.v_scale is not None
    past.v_scale[...] = 1
    inputs.value[0, 0, :8] = [2.5, 2.0, 1.0625, 1.0, 0.5, 3.0, 3.5, 1.0]
    expected = run_step(case.operator, inputs, past)
    at_tie, elsewhere = {CacheDtype.INT8: (0, 1), CacheDtype.FP8: (2, 3), CacheDtype.INT4: (0, 1)}[dtype]
    for position, passes in ((at_tie, True), (elsewhere, False)):
        wrong = expected.cache.copy()
        row = wrong.value.view(np.uint8)[0, 0, 20]
        if dtype is CacheDtype.INT4:
            row[position // 2] += 16 if position % 2 else 1
        else:
            row[position] += 1
        with pytest.raises(AssertionError, match="present_value"):
            check_cache(case, wrong, expected)
        if passes:
            check_cache(case, wrong, expected, exact_ties=False)
        else:
            with pytest.raises(AssertionError, match="present_value"):
                check_cache(case, wrong, expected, exact_ties=False)


def test_guards_and_past() -> None:
    """A byte before or behind a buffer, and a past buffer that a separate call wrote to."""
    case = case_of(CacheDtype.INT8)
    past = make_past(case)
    buffer = GuardedArray(past.key, 3)
    outcome = Outcome(np.zeros(1), past, past, {"past_key": buffer})
    check_guards(outcome)
    for index in (buffer.start - 1, buffer.start + buffer.nbytes):
        byte = buffer.memory.read(index, 1)
        buffer.memory.write(byte ^ 1, index)
        with pytest.raises(AssertionError, match="past_key: 1 guard bytes"):
            check_guards(outcome)
        buffer.memory.write(byte, index)
    changed = past.copy()
    changed.key[0, 0, 63, 0] = 1
    with pytest.raises(AssertionError, match="past_key at"):
        check_past_kept(changed, past)


def test_poison_would_show() -> None:
    """Reading one row of poison makes a NaN: the cases' tails are able to reveal an over-read."""
    case = replace(case_of(CacheDtype.FP8), k_quant=Granularity.PER_TENSOR, v_quant=Granularity.PER_TENSOR)
    for poisoned in (case, case_of(CacheDtype.INT8)):
        cache = poisoned_cache(poisoned, 64)
        assert np.isnan(run_step(poisoned.operator, make_inputs(poisoned), cache).output).all()


def test_pairwise_table_can_miss() -> None:
    """The generator itself: dropping a row loses a pair."""
    rows = pairwise({"a": [1, 2], "b": [1, 2], "c": [1, 2]}, lambda x, y: False)
    pairs = {(k, r[k], q, r[q]) for r in rows[1:] for k in r for q in r if k < q}
    assert len(pairs) < 12
