"""Every instruction set against the NumPy reference: bytes exactly, sums within fp32 rounding of fp64.

An instruction set that this processor lacks is skipped by name; the wheel would not choose it here either.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from python_tests.mlas.kernels import SETS, Kernels, at_end_of_page, compile_library, processor_flags
from python_tests.reference import format as kv
from python_tests.reference.format import F32, Array, CacheDtype

FORMATS = tuple(CacheDtype)
HEAD_SIZES = (8, 16, 24, 40, 64, 72, 80, 96, 128, 192, 248, 256)
ROWS = (1, 2, 3, 4, 5, 7, 8, 16)
TOKENS = (1, 2, 3, 4, 5, 31, 127, 128)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled kernels."""
    return compile_library(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest, library: Path) -> Kernels:
    """The kernels of one instruction set, and no other's."""
    missing = SETS[request.param][2] - processor_flags()
    if missing:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    kernels = Kernels(library, request.param)
    assert kernels.name == request.param
    return kernels


def rows_of(rng: np.random.Generator, count: int, head_size: int) -> F32:
    return rng.standard_normal((count, head_size)).astype(np.float32)


def cache_of(rng: np.random.Generator, dtype: CacheDtype, tokens: int, head_size: int) -> tuple[Array, Array]:
    """Random cache rows at the end of a page, and the float64 values of their codes. No NaN codes."""
    rows = rng.integers(0, 256, (tokens, kv.row_bytes(dtype, head_size))).astype(np.uint8)
    if dtype is CacheDtype.FP8:
        rows[(rows & 0x7F) == 0x7F] = 0x31
    return at_end_of_page(rows), kv.unpack(rows, dtype, head_size).astype(np.float64)


def within_rounding(actual: F32, exact: Array, magnitude: Array, terms: int) -> bool:
    """|error| at most a rounding of each of `terms` sums, in units of the sum of magnitudes."""
    return bool((np.abs(actual - exact) <= magnitude * (terms + 4) * 2.0**-24).all())


@pytest.mark.parametrize("dtype", FORMATS)
def test_encode(kernels: Kernels, dtype: CacheDtype) -> None:
    """Codes of ordinary rows, ties, saturation, zero rows, values and scales that are not finite."""
    rng = np.random.default_rng(1)
    ties = np.array([127, 0.5, 1.5, -0.5, -1.5, 2.5, -126.5, 6.5] * 2, np.float32)
    odd = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, 3e38, -3e38], np.float32)
    for row in [*rows_of(rng, 20, 128), ties, odd, np.zeros(8, np.float32), *(rows_of(rng, 4, 72) * 1e-30)]:
        for scale_type in (np.float32, np.float16):
            wanted, scales = kv.quantize_per_token(row[None], dtype, scale_type)
            stored = scales.astype(np.float32).reshape(1)
            assert kernels.encode(dtype, row, stored, symmetric=True).tolist() == wanted.view(np.uint8)[0].tolist()
        for scale in (0.0, 0.01, 1.0, 1e-30):
            static = np.array([scale], np.float32)
            wanted = kv.quantize_static(row[None], static, dtype)
            assert kernels.encode(dtype, row, static, symmetric=False).tolist() == wanted.view(np.uint8)[0].tolist()
        channels = rng.uniform(0.001, 2, row.size).astype(np.float32)
        wanted = kv.quantize_static(row[None], channels, dtype)
        assert kernels.encode(dtype, row, channels, symmetric=False).tolist() == wanted.view(np.uint8)[0].tolist()


def test_fp8_codes(kernels: Kernels) -> None:
    """All 256 codes decode, NaN included; every midpoint and its neighbours encode."""
    codes = at_end_of_page(np.arange(256, dtype=np.uint8).reshape(8, 32))
    wanted = kv.decode_e4m3(codes)
    assert np.array_equal(kernels.decode(CacheDtype.FP8, codes, 32, None), wanted, equal_nan=True)
    one = np.ones(1, np.float32)
    finite = np.sort(wanted[np.isfinite(wanted)])
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    values = np.concatenate([middle, np.nextafter(middle, np.float32(-1e9)), np.nextafter(middle, np.float32(1e9))])
    values = np.concatenate([values, np.array([447.9, 448, 464, 1e9, np.inf, -np.inf, np.nan, 0], np.float32)])
    values = values[: values.size // 8 * 8]
    assert kernels.encode(CacheDtype.FP8, values, one, symmetric=False).tolist() == kv.encode_e4m3(values).tolist()


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_decode(kernels: Kernels, dtype: CacheDtype, head_size: int) -> None:
    """Values of a tile, with and without token scales: one rounding, so equal."""
    rng = np.random.default_rng(head_size)
    for tokens in (1, 3, 128):
        cache, values = cache_of(rng, dtype, tokens, head_size)
        scale = rng.uniform(1e-3, 3, tokens).astype(np.float32)
        assert np.array_equal(kernels.decode(dtype, cache, head_size, None), values)
        scaled = values.astype(np.float32) * scale[:, None]
        assert np.array_equal(kernels.decode(dtype, cache, head_size, scale), scaled)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_score_and_mix(kernels: Kernels, dtype: CacheDtype, head_size: int) -> None:
    """Both products for every number of rows and tokens, reading nothing behind the last row."""
    rng = np.random.default_rng(head_size)
    for i, tokens in enumerate(TOKENS):
        cache, values = cache_of(rng, dtype, tokens, head_size)
        scale = rng.uniform(1e-3, 3, tokens).astype(np.float32)
        for count in ROWS[i % 2 :: 2]:
            query = rows_of(rng, count, head_size)
            exact, size = query @ values.T, np.abs(query) @ np.abs(values).T
            assert within_rounding(kernels.score(dtype, query, cache, None), exact, size, head_size)
            assert within_rounding(kernels.score(dtype, query, cache, scale), exact * scale, size * scale, head_size)
            weights = rng.uniform(-1, 1, (count, tokens)).astype(np.float32)
            mixed = kernels.mix(dtype, weights, cache, head_size, passes=2)
            assert within_rounding(mixed, 2 * weights @ values, 2 * np.abs(weights) @ np.abs(values), 2 * tokens)


def test_amax(kernels: Kernels) -> None:
    """The largest magnitude, and NaN wherever it stands."""
    row = np.linspace(-3, 2, 40, dtype=np.float32)
    assert kernels.amax(row) == 3
    assert kernels.amax(np.append(row, np.float32(-np.inf))) == np.inf
    for place in (0, 17, 40):
        assert np.isnan(kernels.amax(np.insert(row, place, np.float32(np.nan))))
    assert kernels.amax(np.zeros(8, np.float32)) == 0


def test_softmax(kernels: Kernels) -> None:
    """Weights, maximum and sum over tiles of all lengths, against fp64 over the whole row."""
    rng = np.random.default_rng(5)
    for sizes in ((1,), (7,), (8,), (16,), (17,), (128, 128, 3), (5, 128, 31), (2, 2, 2)):
        scores = [(rng.standard_normal(n) * 8).astype(np.float32) for n in sizes]
        row = np.concatenate(scores).astype(np.float64)
        maximum, total = np.array([-np.inf], np.float32), np.zeros(1, np.float32)
        weights: Array = np.zeros(0)
        for tile in scores:
            weights = weights * kernels.softmax(tile, maximum, total)
            weights = np.concatenate([weights, tile])
        exact = np.exp(row - row.max())
        assert maximum[0] == np.float32(row.max())
        assert np.allclose(weights, exact, rtol=2e-6, atol=1e-37)
        assert np.isclose(total[0], exact.sum(), rtol=2e-6)


def test_softmax_nan(kernels: Kernels) -> None:
    """A NaN score poisons the sum and its own weight, the maximum of the others stands."""
    scores = np.array([1, np.nan, 3, -2, 0, 1, 2, 0.5, 0.25], np.float32)
    maximum, total = np.array([-np.inf], np.float32), np.zeros(1, np.float32)
    kernels.softmax(scores, maximum, total)
    assert maximum[0] == 3
    assert np.isnan(total[0])
    assert np.isnan(scores).tolist() == [False, True, *[False] * 7]


def test_bound_rejects_a_wrong_token(kernels: Kernels) -> None:
    """Negative control of within_rounding: one code off by one in one token is seen."""
    rng = np.random.default_rng(9)
    cache, values = cache_of(rng, CacheDtype.INT8, 8, 64)
    query = rows_of(rng, 4, 64)
    values[3, 5] += 1
    exact, size = query @ values.T, np.abs(query) @ np.abs(values).T
    assert not within_rounding(kernels.score(CacheDtype.INT8, query, cache, None), exact, size, 64)
