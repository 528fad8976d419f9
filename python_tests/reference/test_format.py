"""The format against values computed by hand and against an independent e4m3 implementation."""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.reference import format as kv
from python_tests.reference.format import Array, CacheDtype, ScaleType

DTYPES = list(CacheDtype)
SCALE_TYPES = [np.float32, np.float16]


def row(*values: float) -> Array:
    """One float32 row."""
    return np.array([values], np.float32)


def test_e4m3_decode_known_values() -> None:
    """Codes whose values follow from the bit fields: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    known = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x3C: 1.5, 0x7E: 448.0, 0xB8: -1.0}
    assert {c: float(kv.decode_e4m3(np.array([c], np.uint8))[0]) for c in known} == known
    assert np.isnan(kv.decode_e4m3(np.array([0x7F, 0xFF], np.uint8))).all()
    assert np.signbit(kv.decode_e4m3(np.array([0x80], np.uint8)))[0]


def test_e4m3_encode_rounds_to_even() -> None:
    """Midpoints go to the even code, subnormals and the saturating end included."""
    values = np.array([1.0625, 1.1875, -1.0625, 2.0**-10, 3 * 2.0**-10, 447.9, 448, 464, 465, 1e30, -np.inf, np.nan])
    codes = [0x38, 0x3A, 0xB8, 0x00, 0x02, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F]
    assert kv.encode_e4m3(values.astype(np.float32)).tolist() == codes


def test_e4m3_round_trip() -> None:
    """Every code but the second NaN is its own encoding."""
    codes = np.arange(255, dtype=np.uint8)
    assert np.array_equal(kv.encode_e4m3(kv.decode_e4m3(codes)), codes)


def test_e4m3_is_the_nearest_value() -> None:
    """Every finite float16 value: no other code is nearer, and of two equally near ones the even one is taken."""
    values = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    values = np.abs(values[np.isfinite(values)].astype(np.float64))
    codes = kv.encode_e4m3(values)
    grid = kv.decode_e4m3(np.arange(kv.E4M3_NAN, dtype=np.uint8)).astype(np.float64)
    error = np.abs(grid[codes] - values)
    for code, value in enumerate(grid):
        other = np.abs(value - values)
        tie = (other == error) & (codes != code)
        assert (error <= other).all()
        assert (codes[tie] % 2 == 0).all()


def test_e4m3_against_ml_dtypes() -> None:
    """Every float16 value, every neighbourhood of a midpoint, and a sweep of float32 bit patterns."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    sweep = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32).view(np.float32)
    halves = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16).astype(np.float32)
    values = kv.decode_e4m3(np.arange(0x7F, dtype=np.uint8))
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    tested = np.concatenate([sweep, halves, near, -near])
    tested = tested[np.abs(tested) <= kv.E4M3_MAX]
    theirs = tested.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert len(tested) > 80_000
    assert np.array_equal(kv.encode_e4m3(tested), theirs)
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(kv.decode_e4m3(codes), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32), equal_nan=True)


def test_int4_nibble_order() -> None:
    """Element 2j is the low nibble of byte j, both offset by 8; an odd row is padded with code 0."""
    codes = np.array([[-8, 7, 0, -1]], np.int8)
    assert kv.pack(codes, CacheDtype.INT4).tolist() == [[0xF0, 0x78]]
    assert kv.unpack(np.array([[0xF0, 0x78]], np.uint8), CacheDtype.INT4, 4).tolist() == [[-8, 7, 0, -1]]
    assert kv.pack(np.array([[1]], np.int8), CacheDtype.INT4).tolist() == [[0x89]]
    assert kv.unpack(np.array([[0x89]], np.uint8), CacheDtype.INT4, 1).tolist() == [[1]]


def test_int8_ties_to_even() -> None:
    """With scale 1 the codes are the rounded values."""
    codes, scales = kv.quantize_per_token(row(127, 0.5, 1.5, -0.5, -1.5, 2.5, -126.5), CacheDtype.INT8, np.float32)
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[127, 0, 2, 0, -2, 2, -126]]


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_row(dtype: CacheDtype, scale_type: ScaleType) -> None:
    """A zero row has scale 0, zero codes, and reads back 0; also when it holds negative zeros."""
    codes, scales = kv.quantize_per_token(row(0, -0.0, 0, 0), dtype, scale_type)
    assert scales.tolist() == [[0]]
    assert (codes == kv.zero_code_byte(dtype)).all()
    assert kv.dequantize(codes, scales, dtype, 4).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_row(dtype: CacheDtype, scale_type: ScaleType, bad: float) -> None:
    """One non-finite element makes the row's scale NaN or Inf and its codes 0: the row reads back as NaN."""
    values = np.array([[1, bad, 2, 3], [4, 3, 2, 1]], np.float32)
    codes, scales = kv.quantize_per_token(values, dtype, scale_type)
    clean, clean_scales = kv.quantize_per_token(values[1:], dtype, scale_type)
    assert np.isnan(scales[0]) if np.isnan(bad) else scales[0] == np.inf
    assert (codes[0] == kv.zero_code_byte(dtype)).all()
    assert np.isnan(kv.dequantize(codes, scales, dtype, 4)[0]).all()
    assert np.array_equal(codes[1:], clean)
    assert np.array_equal(scales[1:], clean_scales)


@pytest.mark.parametrize("position", [0, 1, 6, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amax", [0.01, 0.3, 1.0, 3e4])
def test_largest_element_takes_the_largest_code(dtype: CacheDtype, amax: float, position: int) -> None:
    """Wherever it stands and however small it is; never the code below -qmax."""
    values = np.full((1, 8), amax / 9, np.float32)
    values[0, position] = -amax
    codes, scales = kv.quantize_per_token(values, dtype, np.float32)
    assert kv.unpack(codes, dtype, 8)[0, position] == -kv.QMAX[dtype]
    assert scales[0, 0] == np.float32(amax) / np.float32(kv.QMAX[dtype])


@pytest.mark.parametrize(
    ("amax", "stored"),
    [
        (1e-9, 2.0**-24),
        (127 * 2.0**-24, 2.0**-24),
        (127.0, 1.0),
        (127 * (1 + 2.0**-11), 1.0),
        (127 * (1 + 3 * 2.0**-11), 1 + 2.0**-9),
        (127 * 65519.0, 65504.0),
        (127 * 70000.0, 65504.0),
    ],
)
def test_float16_scale(amax: float, stored: float) -> None:
    """Clamped to [2^-24, 65504], then rounded to nearest even; codes use the stored value and stay in range."""
    codes, scales = kv.quantize_per_token(row(amax, -amax / 2), CacheDtype.INT8, np.float16)
    assert scales.dtype == np.float16
    assert scales.tolist() == [[stored]]
    quotient = np.float32(amax) / np.float32(stored)
    assert codes[0, 0] == min(127, np.rint(quotient))


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_range(dtype: CacheDtype) -> None:
    """Static codes use the two's complement range and saturate; scale 0 gives code 0."""
    values = row(1e9, -1e9, np.inf, -np.inf, 1.0, np.nan)[:, None]
    codes = kv.unpack(kv.quantize_static(values, np.array([1], np.float32), dtype), dtype, 6)[0, 0]
    low, high = {CacheDtype.INT8: (-128, 127), CacheDtype.INT4: (-8, 7), CacheDtype.FP8: (-448, 448)}[dtype]
    assert codes[:5].tolist() == [high, low, high, low, 1]
    assert np.isnan(codes[5]) if dtype is CacheDtype.FP8 else codes[5] == 0
    assert (kv.quantize_static(values, np.array([0], np.float32), dtype) == kv.zero_code_byte(dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_per_channel(dtype: CacheDtype) -> None:
    """Each channel of each head has its scale: head h, element d of a row of ones times s reads back near s."""
    scales = np.arange(1, 9, dtype=np.float32).reshape(1, 2, 1, 4)
    values = np.broadcast_to(3 * scales, (1, 2, 5, 4)).astype(np.float32)
    codes = kv.quantize_static(values, scales, dtype)
    assert (kv.unpack(codes, dtype, 4) == 3).all()
    assert np.array_equal(kv.dequantize(codes, scales, dtype, 4), values)


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("dtype", [CacheDtype.INT8, CacheDtype.INT4])
def test_error_is_half_a_step(dtype: CacheDtype, scale_type: ScaleType) -> None:
    """|x - code * scale| <= scale / 2, but for the largest element under a scale that float16 rounded down."""
    values = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    codes, scales = kv.quantize_per_token(values, dtype, scale_type)
    error = np.abs(kv.dequantize(codes, scales, dtype, 64) - values) / scales
    slack = kv.QMAX[dtype] * 2.0**-11 if scale_type is np.float16 else 1e-5
    assert error.max() <= 0.5 + slack


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_near_differ_only_at_boundaries(dtype: CacheDtype) -> None:
    """The tolerance interval holds the exact code, and more than it only where the quotient is a tie."""
    values = np.random.default_rng(2).uniform(-6, 6, (1, 4000)).astype(np.float32)
    values[0, :3] = [2.5, 1.5, 6.0]
    one = np.array([[1]], np.float32)
    low, high = kv.codes_near(values, one, dtype, per_token=True)
    exact = kv.unpack(kv.quantize_static(values[None], np.array([1], np.float32), dtype), dtype, 4000)[0]
    ends = [kv.decode_e4m3(x) if dtype is CacheDtype.FP8 else x.astype(np.float32) for x in (low, high)]
    assert (np.minimum(*ends) <= exact).all()
    assert (exact <= np.maximum(*ends)).all()
    assert (low != high).sum() < 5
    if dtype is not CacheDtype.FP8:
        assert (low[0, 0], high[0, 0]) == (2, 3)
