"""What a call of the kernels must give, and what 16-bit attention over the same cache gives: the measure of errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from python_tests.kernel.case import KernelCase
from python_tests.reference.format import F64, Array
from python_tests.reference.half_attention import HalfName, round_half
from python_tests.reference.step import Cache, Expected, Inputs, run_step


@dataclass(frozen=True)
class Rounding:
    """A 16-bit type: the floor of relative errors, that of scores, half its smallest step, and where it rounds to Inf.

    The floor is one unit of a float16, and a quarter of one of a bfloat16, whose rounding the bound has twice already.
    """

    floor: float
    score: float
    tiny: float
    overflow: float


ROUNDINGS: dict[HalfName, Rounding] = {
    "float16": Rounding(2.0**-10, 2.0**-11, 2.0**-25, 65520.0),
    "bfloat16": Rounding(2.0**-9, 2.0**-9, 2.0**-134, (2 - 2.0**-8) * 2.0**127),
}


def expected_of(case: KernelCase, inputs: Inputs, past: Cache, present: Cache | None = None) -> Expected:
    """The reference's result; same_precision is that of 16-bit attention, as values of the activation type."""
    return run_step(case.operator, inputs, past, present)


def output_bound(expected: Expected, half: HalfName) -> F64:
    """Largest allowed error (B, S, N, 1): twice what 16-bit attention loses anywhere in the call, plus a floor.

    Errors are proportional to a row's magnitude, so a row of small values has a small bound. The floor grows with the
    terms of the row's scores: rounding D operands to 16 bits moves a score by a random walk of D steps, and in a call
    of few rows that of the yardstick may by chance be short.
    """
    magnitude = np.maximum(expected.magnitude, np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(expected.same_precision.astype(np.float64) - expected.output) / magnitude
    relative = float(np.max(error[np.isfinite(error)], initial=0.0))
    walk = expected.terms / np.sqrt(expected.output.shape[-1])
    floor = ROUNDINGS[half].floor + walk * ROUNDINGS[half].score
    bound: F64 = expected.magnitude * (2 * relative + floor) + 2 * ROUNDINGS[half].tiny
    return bound


def check_output(actual: Array, expected: Expected, half: HalfName) -> float:
    """Compare output (B, S, N, D), values of the activation type, with float64; returns the used part of the bound.

    Where the reference is NaN or Inf the output must not be finite; where it overflows the type the output is Inf.
    """
    wide = expected.output
    assert actual.shape == wide.shape, (actual.shape, wide.shape)
    got = actual.astype(np.float64)
    bound = np.broadcast_to(output_bound(expected, half), wide.shape)
    overflow = ROUNDINGS[half].overflow
    with np.errstate(invalid="ignore"):
        may_be_finite = np.isfinite(wide) & (np.abs(wide) - bound < overflow)
        must_be_finite = np.isfinite(wide) & (np.abs(wide) + bound < overflow)
    finite = np.isfinite(got)
    wrong = (finite & ~may_be_finite) | (~finite & must_be_finite)
    assert not wrong.any(), f"output, finite where it must not be or not where it must: {place(got, wide, wrong)}"
    assert not (np.isnan(got) & np.isfinite(wide)).any(), f"output, NaN: {place(got, wide, np.isnan(got))}"
    error = np.abs(np.where(finite, got - np.where(finite, wide, 0), 0))
    over = error > bound
    if over.any():
        worst = np.unravel_index(int(np.argmax(np.where(over, error - bound, 0))), error.shape)
        where = tuple(int(i) for i in worst)
        msg = (
            f"output: {int(over.sum())} of {over.size} values beyond the bound, worst at (b, s, n, d) = {where}: "
            f"got {got[where]}, expected {wide[where]}, error {error[where]:.3e}, bound {bound[where]:.3e}"
        )
        raise AssertionError(msg)
    return float(np.max(error / np.maximum(bound, np.finfo(np.float64).tiny), initial=0.0))


def place(actual: Array, wanted: Array, wrong: Array) -> str:
    """Where two arrays differ first, with both values."""
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} wrong, first at {first}: got {actual[first]}, expected {wanted[first]}"


def check_rows(actual: Array, wanted: Array, name: str) -> None:
    """Cache rows (B, Hkv, C, row) must be equal byte for byte."""
    left, right = actual.view(np.uint8), wanted.view(np.uint8)
    assert left.shape == right.shape, f"{name}: {left.shape}, not {right.shape}"
    wrong = left != right
    assert not wrong.any(), f"{name} at (b, head, token, byte): {place(left, right, wrong)}"


def check_scales(actual: Array | None, wanted: Array | None, name: str) -> None:
    """Stored scales must have the same bits; any NaN equals any NaN."""
    assert actual is not None
    assert wanted is not None
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), f"{name}: {actual.dtype} {actual.shape}"
    bits = f"u{actual.dtype.itemsize}"
    wrong = (actual.view(bits) != wanted.view(bits)) & ~(np.isnan(actual) & np.isnan(wanted))
    assert not wrong.any(), f"{name} at (b, head, token, 0): {place(actual, wanted, wrong)}"


def check_cache(actual: Cache, wanted: Cache, name: str = "present") -> None:
    """Every byte and every scale, those that the call must not touch included."""
    check_rows(actual.key, wanted.key, f"{name} key")
    check_rows(actual.value, wanted.value, f"{name} value")
    check_scales(actual.k_scale, wanted.k_scale, f"{name} k_scale")
    check_scales(actual.v_scale, wanted.v_scale, f"{name} v_scale")


def check_prompt_key(actual: Array, expected: Expected, case: KernelCase) -> None:
    """K after rotary (B, Hkv, S, D), rounded once to the activation type, in the rows that count."""
    wanted = round_half(expected.k_rows, case.half).swapaxes(1, 2)
    for b in map(int, np.flatnonzero(expected.valid)):
        rows = int(expected.total_lengths[b])
        got, right = actual[b, :, :rows].astype(np.float32), wanted[b, :, :rows]
        wrong = (got.view(np.uint32) != right.view(np.uint32)) & ~(np.isnan(got) & np.isnan(right))
        assert not wrong.any(), f"prompt_key of entry {b} at (head, token, d): {place(got, right, wrong)}"
