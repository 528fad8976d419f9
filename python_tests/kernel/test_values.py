"""Values at the ends of the number range, tokens that are not finite, and rows that nobody may read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, HALVES, SINKS
from python_tests.kernel.verify import verify
from python_tests.op.gqa_case import make_inputs, make_past
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.half_attention import HalfName, round_half
from python_tests.reference.step import Cache, Inputs

pytestmark = pytest.mark.gpu

# One new token (decode), a burst within the decode rows, and a chunk (prefill).
CALLS: dict[str, dict[str, Any]] = {
    "decode": {"seq": 1, "totals": (150, 40)},
    "burst": {"seq": 4, "totals": (150, 40)},
    "prefill": {"seq": 33, "totals": (150, 40)},
    "one-split": {"seq": 1, "totals": (150, 40), "multiprocessors": 1, "heads": 8, "kv_heads": 8},
    "begins-last": {"seq": 1, "totals": (150, 40), "multiprocessors": 6, "clusters": False},
}


ZERO_BYTE = {CacheDtype.INT8: 0, CacheDtype.FP8: 0, CacheDtype.INT4: 0x88}


def case_of(name: str, call: str, **options: object) -> KernelCase:
    """A step of two entries with room behind them."""
    arguments: dict[str, Any] = CALLS[call] | options
    return KernelCase(id=f"{name}-{call}", capacity=200, total=200, **arguments)


def scales_of(past: Cache, side: str) -> Array:
    """The scale cache of K or V."""
    scales = past.k_scale if side == "k" else past.v_scale
    assert scales is not None
    return scales


def rows_of(past: Cache, side: str) -> Array:
    """The codes of K or V as bytes."""
    rows = past.key if side == "k" else past.value
    return rows.view(np.uint8)


def attended(case: KernelCase, token: int) -> Array:
    """(S,): whether row s of entry 0 sees the token."""
    positions = case.pasts[0] + np.arange(case.seq)
    inside = case.window < 0 or positions <= token + case.window
    return np.asarray((positions >= token) & inside)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_scale_that_is_not_finite(dtype: CacheDtype, side: str, call: str, device: Device) -> None:
    """NaN or Inf of one old token: NaN where it is attended, nothing where the window has passed it."""
    for window, token in ((-1, 0), (-1, 77), (60, 30), (60, 100), (20, 100)):
        for bad in (np.nan, np.inf):
            case = case_of(f"scale-{dtype}-{side}-{window}-{token}", call, dtype=dtype, window=window)
            past = make_past(case)
            scales_of(past, side)[0, :, token] = bad
            # As the writer leaves such a row.
            rows_of(past, side)[0, :, token] = ZERO_BYTE[dtype]
            outcome, _, _ = verify(case, device, past=past)
            wrong = ~np.isfinite(outcome.output[0]).all(axis=(1, 2))
            assert np.array_equal(wrong, attended(case, token)), (window, token, bad)
            assert np.isfinite(outcome.output[1]).all()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_TOKEN])
def test_fp8_code_that_is_nan(granularity: Granularity, side: str, call: str, device: Device) -> None:
    """Code 0x7F or 0xFF in one element of an old token, in tiles that need a mask and in others."""
    for window, token in ((-1, 0), (-1, 100), (60, 30), (60, 100), (20, 100)):
        case = case_of(
            f"fp8-{granularity}-{side}-{window}-{token}", call, dtype=CacheDtype.FP8, window=window,
            k_quant=granularity, v_quant=granularity,
        )  # fmt: skip
        past = make_past(case)
        rows_of(past, side)[0, :, token, 9] = 0x7F if token % 4 else 0xFF
        outcome, _, _ = verify(case, device, past=past)
        wrong = np.isnan(outcome.output[0])
        # NaN of V stays in its element, NaN of K takes the row.
        elements = wrong[..., 9] if side == "v" else wrong.all(axis=-1)
        assert np.array_equal(elements.all(axis=-1), attended(case, token))
        assert side == "k" or wrong.sum() == elements.sum()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_new_token_that_is_not_finite(dtype: CacheDtype, side: str, bad: float, device: Device) -> None:
    """Row s of a burst or chunk is bad: rows before it are masked from it and stay finite."""
    for call, token in (
        ("decode", 0), ("begins-last", 0), ("burst", 0), ("burst", 2), ("burst", 3), ("prefill", 0), ("prefill", 20),
    ):  # fmt: skip
        for granularity in (Granularity.PER_TOKEN, Granularity.PER_CHANNEL):
            case = case_of(
                f"new-{dtype}-{side}-{token}-{granularity}", call, dtype=dtype, k_quant=granularity, v_quant=granularity
            )
            inputs = make_inputs(case)
            tensor = inputs.key if side == "k" else inputs.value
            assert tensor is not None
            tensor[0, token, 5] = bad
            outcome, _, _ = verify(case, device, inputs=inputs)
            assert np.isfinite(outcome.output[0, :token]).all()
            assert np.isfinite(outcome.output[1]).all()
            # A static scale saturates, and an int code of NaN is 0: only fp8 keeps it.
            poisons = granularity is Granularity.PER_TOKEN or (dtype is CacheDtype.FP8 and np.isnan(bad))
            assert np.isfinite(outcome.output[0, token:]).all() != poisons


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("half", HALVES)
def test_query_that_is_not_finite(half: HalfName, call: str, device: Device) -> None:
    """One head of one row: it alone is NaN."""
    for bad in (np.nan, np.inf):
        case = case_of(f"query-{half}-{bad}", call, activation=half)
        inputs = make_inputs(case)
        inputs.query[0, -1, 128 + 3] = bad
        outcome, _, _ = verify(case, device, inputs=inputs)
        wrong = np.asarray(~np.isfinite(outcome.output).all(axis=-1))
        assert wrong[0, -1, 1]
        assert wrong.sum() == 1


def ladder(case: KernelCase, past: Cache, side: str, low: float, high: float, *, rising: bool) -> None:
    """Scales of one side from low to high along the tokens: the largest comes last, or first."""
    scales = scales_of(past, side)
    for b, old in enumerate(case.pasts):
        steps = np.geomspace(low, high, max(old, 1))
        scales[b, :, :old, 0] = (steps if rising else steps[::-1])[:old]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize(("low", "high"), [(1e-6, 1e-5), (1e-5, 10.0), (1e-12, 1e-7), (1.0, 300.0), (1e-30, 1e-3)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_value_scales_of_every_size(
    dtype: CacheDtype, low: float, high: float, rising: bool, call: str, device: Device
) -> None:
    """V scales far below and above float16's normal range, growing and falling: products must not underflow."""
    for half in HALVES:
        # Weights of one size: a weight that is itself tiny would be lost in 16 bits, here and in the yardstick.
        case = case_of(f"v-scales-{dtype}-{low}-{high}-{rising}-{half}", call, dtype=dtype, activation=half, scale=0.02)
        past, inputs = make_past(case), make_inputs(case)
        ladder(case, past, "v", low, high, rising=rising)
        assert inputs.value is not None
        recent = inputs.value.astype(np.float32) * np.float32(low if rising else high)
        inputs = replace(inputs, value=round_half(recent, half).astype(inputs.value.dtype))
        verify(case, device, inputs=inputs, past=past)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_small_bfloat16_values_survive(dtype: CacheDtype, call: str, device: Device) -> None:
    """All values near 1e-12: an output of 16-bit floats that have that range must show them."""
    case = case_of(f"small-{dtype}", call, dtype=dtype, activation="bfloat16")
    past, inputs = make_past(case), make_inputs(case)
    assert inputs.value is not None
    inputs = replace(inputs, value=round_half(inputs.value * np.float32(2.0**-40), "bfloat16"))
    scales_of(past, "v")[...] *= np.float32(2.0**-40)
    outcome, _, _ = verify(case, device, inputs=inputs, past=past)
    assert np.abs(outcome.output).max() > 1e-13


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_zero_and_masked_scales(dtype: CacheDtype, call: str, device: Device) -> None:
    """Zero rows first, and the largest scale outside the window: it must not set the range of the others."""
    case = case_of(f"zero-scales-{dtype}", call, dtype=dtype)
    past = make_past(case)
    for side in ("k", "v"):
        scales_of(past, side)[0, :, :70] = 0
        rows_of(past, side)[0, :, :70] = ZERO_BYTE[dtype]
    verify(case, device, past=past)
    case = case_of(f"masked-scale-{dtype}", call, dtype=dtype, window=20)
    past = make_past(case)
    scales_of(past, "v")[0, :, :90] = 1e30
    scales_of(past, "k")[0, :, :90] = 1e30
    verify(case, device, past=past)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_all_tokens_zero(dtype: CacheDtype, half: HalfName, call: str, device: Device) -> None:
    """Zero K: equal weights. Zero V: output 0."""
    case = case_of(f"zeros-{dtype}-{half}", call, dtype=dtype, activation=half)
    for side in ("k", "v"):
        past, inputs = make_past(case), make_inputs(case)
        for b, old in enumerate(case.pasts):
            scales_of(past, side)[b, :, :old] = 0
            rows_of(past, side)[b, :, :old] = ZERO_BYTE[dtype]
        tensor = inputs.key if side == "k" else inputs.value
        assert tensor is not None
        tensor[...] = 0
        outcome, _, _ = verify(case, device, inputs=inputs, past=past)
        assert side == "k" or (outcome.output == 0).all()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_negative_scale(dtype: CacheDtype, call: str, device: Device) -> None:
    """Writers never store one, but a reader that finds one keeps its sign."""
    case = case_of(f"negative-{dtype}", call, dtype=dtype)
    past = make_past(case)
    for side in ("k", "v"):
        scales_of(past, side)[:, :, 3] *= -1
    verify(case, device, past=past)


def large_query(case: KernelCase, size: float) -> Inputs:
    """Query rows whose largest element is near `size`, in the activation type."""
    inputs = make_inputs(case)
    query = inputs.query.astype(np.float32)
    peak = np.abs(query).max()
    grown = round_half(query * np.float32(size / peak), case.half)
    return replace(inputs, query=grown.astype(inputs.query.dtype))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_CHANNEL, Granularity.PER_TOKEN])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_large_query_and_scale(
    dtype: CacheDtype, half: HalfName, granularity: Granularity, call: str, device: Device
) -> None:
    """Q near float16's largest, K scales beyond 1: no product of them fits float16, the score does."""
    for size, factor in ((60000.0, 1.0), (60000.0, 100.0), (1e-4, 1e4)):
        case = case_of(
            f"large-{dtype}-{half}-{granularity}-{size}-{factor}", call, dtype=dtype, activation=half,
            k_quant=granularity, scale=0.5 / (size * factor),
        )  # fmt: skip
        past, inputs = make_past(case), large_query(case, size)
        scales_of(past, "k")[...] *= np.float32(factor)
        verify(case, device, inputs=inputs, past=past)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_bfloat16_beyond_float16(dtype: CacheDtype, call: str, device: Device) -> None:
    """Q and V of 1e10: values that float16 cannot hold."""
    case = case_of(f"bf16-wide-{dtype}", call, dtype=dtype, activation="bfloat16", scale=1e-11)
    past, inputs = make_past(case), large_query(case, 1e10)
    assert inputs.value is not None
    inputs = replace(inputs, value=round_half(inputs.value * np.float32(1e10), "bfloat16"))
    scales_of(past, "v")[...] *= np.float32(1e10)
    outcome, _, _ = verify(case, device, inputs=inputs, past=past)
    assert np.abs(outcome.output).max() > 1e9


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_values_near_the_largest_float16(dtype: CacheDtype, call: str, device: Device) -> None:
    """K and V rows with an amax of 60,000, old and new."""
    case = case_of(f"near-max-{dtype}", call, dtype=dtype, scale=1e-6)
    past, inputs = make_past(case), make_inputs(case)
    assert inputs.key is not None
    assert inputs.value is not None
    for tensor in (inputs.key, inputs.value):
        tensor[...] = np.clip(tensor.astype(np.float32) * 20000, -60000, 60000)
    for side in ("k", "v"):
        top = {CacheDtype.INT8: 127.0, CacheDtype.FP8: 448.0, CacheDtype.INT4: 7.0}[dtype]
        for b, old in enumerate(case.pasts):
            scales_of(past, side)[b, :, :old] = 60000 / top
    outcome, _, _ = verify(case, device, inputs=inputs, past=past)
    assert np.isfinite(outcome.output).all()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sharpness", [30.0, 3000.0, -3000.0])
@pytest.mark.parametrize("half", HALVES)
def test_sharp_softmax(half: HalfName, sharpness: float, call: str, device: Device) -> None:
    """Scores of hundreds and of tens of thousands: one token takes all, whichever split it is in."""
    case = case_of(f"sharp-{half}-{sharpness}", call, activation=half, scale=sharpness / 128**0.5)
    inputs, past = make_inputs(case), make_past(case)
    # Whole numbers: equal scores stay equal, and no rounding of a score decides between two tokens.
    for tensor in (inputs.query, inputs.key):
        assert tensor is not None
        tensor[...] = np.rint(np.clip(tensor.astype(np.float32), -3, 3))
    for b, old in enumerate(case.pasts):
        past.key[b, :, :old] = np.clip(past.key[b, :, :old].astype(np.int32) // 40, -3, 3)
        scales_of(past, "k")[b, :, :old] = 1
    assert inputs.key is not None
    # The new keys quantize to 127ths of their largest element: make that exact as well.
    inputs.key[..., ::128] = 127.0
    verify(case, device, inputs=inputs, past=past)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sink", list(SINKS)[1:])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_sinks(sink: str, softcap: float, call: str, device: Device) -> None:
    """Sinks of -Inf, 0, 5 and 50: counted once, whatever the splits are; not scaled, not capped."""
    case = case_of(f"sink-{sink}-{softcap}", call, softcap=softcap, **SINKS[sink])
    inputs = make_inputs(case)
    if inputs.head_sink is not None:
        inputs.head_sink[:4] = [-np.inf, 0, 5, 50]
    verify(case, device, inputs=inputs)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap_of_large_scores(softcap: float, call: str, device: Device) -> None:
    """cap * tanh(score / cap) on scores of +-50, with K scales of 3: scaled before it is capped."""
    case = case_of(f"softcap-{softcap}", call, softcap=softcap, scale=1.0)
    past = make_past(case)
    scales_of(past, "k")[...] *= 3
    verify(case, device, past=past)
