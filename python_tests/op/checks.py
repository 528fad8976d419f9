"""Comparisons of a call with the reference. Each raises AssertionError that names the first wrong coordinate."""

from __future__ import annotations

import numpy as np

from python_tests.op.gqa_case import Case, make_inputs, make_past, poisoned_cache
from python_tests.op.gqa_model import Misalign, Outcome, aligned, call
from python_tests.op.providers import CPU, Provider
from python_tests.reference import format as kv
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.step import Cache, Expected, Inputs, run_step

# Rounding floors in units of the row's magnitude: a few float32 units, one unit of a float16 output, and a quarter of
# one of a bfloat16 output, whose rounding the other part of the bound has twice.
FLOORS = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-9}

# How far rounding a query to the kernels' float16 moves a term of a score. The errors add up as a random walk does.
WALK = 2.0**-11

# The part of the output bound that each verified case used; the test report ends with the largest.
USED_FRACTIONS: dict[str, float] = {}


def first_difference(actual: Array, expected: Array, same: Array | None = None) -> str:
    """Where two arrays differ first (or where `same` is first False), with both values."""
    same = np.asarray(actual == expected) if same is None else same
    where = tuple(int(i) for i in np.argwhere(~same)[0])
    count = f"{int((~same).sum())} of {same.size} differ"
    return f"{count}, first at {where}: got {actual[where]}, expected {expected[where]}"


def output_bound(expected: Expected) -> Array:
    """Largest allowed error (B, S, N, 1): twice what the same precision loses anywhere, plus a floor.

    Errors are proportional to a row's magnitude, so a row of small values has a small bound. The floor grows with the
    terms of the row's scores by one float32 rounding of their sum; with 16-bit operands by a random walk of their D
    roundings, which in a call of few rows may by chance be short in the same precision's result.
    """
    magnitude = np.maximum(expected.magnitude, np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):
        error = np.abs(expected.same_precision.astype(np.float64) - expected.output) / magnitude
    relative = float(np.max(error[np.isfinite(error)], initial=0.0))
    floor = FLOORS[expected.half or expected.same_precision.dtype.name] + expected.terms * 2.0**-24
    if expected.half:
        floor = floor + expected.terms / np.sqrt(expected.output.shape[-1]) * WALK
    bound: Array = expected.magnitude * (2 * relative + floor)
    if expected.same_precision.dtype == np.float16:
        bound = bound + 2.0**-24
    return bound


def check_output(actual: Array, expected: Expected) -> float:
    """Compare output (B, S, N, D) with the reference; returns the used fraction of the bound."""
    wide = expected.output
    assert actual.shape == wide.shape, (actual.shape, wide.shape)
    nan = np.isnan(wide)
    assert np.array_equal(np.isnan(actual), nan), "output, NaN positions: " + first_difference(np.isnan(actual), nan)
    infinite = np.isinf(expected.same_precision)
    assert np.array_equal(np.isinf(actual), infinite), "output, Inf positions: " + first_difference(
        np.isinf(actual), infinite
    )
    usable = ~nan & ~infinite
    error = np.abs(np.where(usable, actual.astype(np.float64) - np.where(usable, wide, 0), 0))
    bound = np.broadcast_to(output_bound(expected), error.shape)
    over = error > bound
    if over.any():
        worst = np.unravel_index(int(np.argmax(error - bound)), error.shape)
        where = tuple(int(i) for i in worst)
        msg = (
            f"output: {int(over.sum())} of {over.size} values beyond the bound, worst at (b, s, n, d) = {where}: "
            f"got {actual[where]}, expected {wide[where]}, error {error[where]:.3e}, bound {bound[where]:.3e}"
        )
        raise AssertionError(msg)
    filled = bound > 0
    return float(np.max(error[filled] / bound[filled], initial=0.0))


def check_scales(actual: Array, expected: Array, name: str) -> None:
    """Stored scales (B, Hkv, C, 1) must have the same bits; any NaN equals any NaN."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), f"{name}: {actual.dtype} {actual.shape}"
    bits = f"u{actual.dtype.itemsize}"
    equal = (actual.view(bits) == expected.view(bits)) | (np.isnan(actual) & np.isnan(expected))
    assert equal.all(), f"{name} at (b, head, token, 0): {first_difference(actual, expected, equal)}"


def check_rows(actual: Array, expected: Array, name: str) -> None:
    """Cache rows (B, Hkv, C, row) must be equal byte for byte."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), f"{name}: {actual.dtype} {actual.shape}"
    left, right = (x.view(f"u{x.dtype.itemsize}") for x in (actual, expected))
    assert np.array_equal(left, right), f"{name} at (b, head, token, byte): {first_difference(left, right)}"


def settle_ties(case: Case, actual: Cache, expected: Expected) -> Cache:
    """`actual` with every code that lies one rounding boundary off replaced by the reference's code.

    For providers whose division may be one unit off; what remains must be equal.
    """
    dtype = case.dtype
    assert dtype is not None
    assert expected.cache.k_scale is not None
    assert expected.cache.v_scale is not None
    settled = actual.copy()
    sides = (
        (settled.key, expected.cache.key, expected.cache.k_scale, case.k_quant, expected.k_rows),
        (settled.value, expected.cache.value, expected.cache.v_scale, case.v_quant, expected.v_rows),
    )
    for rows, exact, scale, granularity, values in sides:
        for b in np.flatnonzero(expected.valid):
            start = int(expected.past_lengths[b])
            new = slice(start, min(int(expected.total_lengths[b]), start + case.seq))
            source = values[b, : new.stop - new.start].swapaxes(0, 1)
            per_token = granularity is Granularity.PER_TOKEN
            used = scale[b, :, new] if per_token else scale.reshape(scale.shape[-3:])
            low, high = kv.codes_near(source, used, dtype, per_token)
            got = kv.unpack(rows[b, :, new], dtype, case.head_size)
            ends = [kv.decode_e4m3(x) if dtype is CacheDtype.FP8 else x.astype(np.float32) for x in (low, high)]
            near = (got >= np.minimum(*ends)) & (got <= np.maximum(*ends))
            byte_near = near if dtype is not CacheDtype.INT4 else near.reshape(*near.shape[:-1], -1, 2).all(axis=-1)
            rows[b, :, new] = np.where(byte_near, exact[b, :, new], rows[b, :, new])
    return settled


def check_cache(case: Case, actual: Cache, expected: Expected, *, exact_ties: bool = True) -> None:
    """Every byte and every scale of the cache, those that the call must not touch included."""
    if case.dtype is not None and not exact_ties:
        actual = settle_ties(case, actual, expected)
    check_rows(actual.key, expected.cache.key, "present_key")
    check_rows(actual.value, expected.cache.value, "present_value")
    pairs = ((actual.k_scale, expected.cache.k_scale, "k_scale"), (actual.v_scale, expected.cache.v_scale, "v_scale"))
    for got, wanted, name in pairs:
        if got is not None and wanted is not None:
            check_scales(got, wanted, name)


def check_guards(outcome: Outcome) -> None:
    """No byte around any buffer was written."""
    for name, buffer in outcome.buffers.items():
        stray = buffer.stray_writes()
        assert not stray, f"{name}: {len(stray)} guard bytes written, first at offset {stray[0]} of {buffer.shape}"


def check_past_kept(actual: Cache, before: Cache) -> None:
    """With separate buffers the past ones keep their contents."""
    check_rows(actual.key, before.key, "past_key")
    check_rows(actual.value, before.value, "past_value")
    for got, wanted, name in ((actual.k_scale, before.k_scale, "k_scale"), (actual.v_scale, before.v_scale, "v_scale")):
        if got is not None and wanted is not None:
            check_scales(got, wanted, f"past {name}")


def verify(
    case: Case,
    provider: Provider = CPU,
    *,
    inputs: Inputs | None = None,
    past: Cache | None = None,
    threads: int = 2,
    misalign: Misalign = aligned,
) -> tuple[Outcome, Expected]:
    """Run a case, with its own tensors or given ones, and compare everything.

    The kernel runs before the reference: memory that is used again cannot hold the right answer.
    """
    inputs = make_inputs(case) if inputs is None else inputs
    past = make_past(case) if past is None else past
    present = None if case.in_place else poisoned_cache(case, case.present_capacity)
    outcome = call(case, inputs, past, present, provider, threads=threads, misalign=misalign)
    expected = run_step(case.operator, inputs, past, present)
    check_guards(outcome)
    check_cache(case, outcome.cache, expected, exact_ties=provider.exact_ties)
    if not case.in_place:
        check_past_kept(outcome.past, past)
    USED_FRACTIONS[case.id] = check_output(outcome.output, expected)
    return outcome, expected
