"""bfloat16 and 16-bit attention against properties that do not depend on how they are written."""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.reference.attention import AttentionOptions, attend
from python_tests.reference.bfloat16 import pack_bfloat16, round_bfloat16, unpack_bfloat16
from python_tests.reference.format import Array
from python_tests.reference.half_attention import HalfName, attend_half, round_half

HALVES: list[HalfName] = ["float16", "bfloat16"]
# Relative distance of a value to its rounding: half of the last kept unit.
HALF_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def test_bfloat16_known_bits() -> None:
    """The upper half of a float32, with ties to even, the carry into the exponent, Inf and the sign of NaN."""
    values = np.array([0, -0.0, 1, -2, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2 - 2.0**-9, 3.4e38, np.inf, -np.inf], np.float32)
    bits = [0x0000, 0x8000, 0x3F80, 0xC000, 0x3F80, 0x3F82, 0x4000, 0x7F80, 0x7F80, 0xFF80]
    assert pack_bfloat16(values).tolist() == bits
    nan = pack_bfloat16(np.array([np.nan, -np.nan], np.float32))
    assert np.isnan(unpack_bfloat16(nan)).all()
    # Lower bits alone say that it is a NaN: truncating them would make an Inf.
    assert np.isnan(round_bfloat16(np.array([0x7F800001], np.uint32).view(np.float32))).all()


def test_bfloat16_round_trip() -> None:
    """All 65,536 bit patterns survive; NaN stays NaN."""
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    values = unpack_bfloat16(bits)
    again = pack_bfloat16(values)
    assert ((again == bits) | np.isnan(values)).all()
    assert np.isnan(unpack_bfloat16(again[np.isnan(values)])).all()


def test_bfloat16_is_the_nearest_value() -> None:
    """A sweep of float32 patterns: neither neighbour is nearer, and of two equally near the even one is taken."""
    sweep = np.arange(0, 0x7F000000, 65521 // 7, dtype=np.uint32).view(np.float32)
    middles = (np.arange(0x100, 0x7F00, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([sweep, middles, -sweep])
    bits = pack_bfloat16(values)
    error = np.abs(unpack_bfloat16(bits).astype(np.float64) - values)
    for step in (-1, 1):
        other = np.abs(unpack_bfloat16((bits.astype(np.int32) + step).astype(np.uint16)).astype(np.float64) - values)
        usable = np.isfinite(other)
        assert (error <= other)[usable].all()
        assert (bits[usable & (error == other)] % 2 == 0).all()


@pytest.mark.parametrize("half", HALVES)
def test_rounding_error(half: HalfName) -> None:
    """Within half a unit, and not always 0."""
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    error = np.abs(round_half(values, half) - values) / np.abs(values)
    assert 0 < error.max() <= HALF_UNIT[half]


def random_call(half: HalfName, tokens: int) -> tuple[Array, Array, Array, Array]:
    """query, key, value whose values the type holds, and positions of the last rows."""
    rng = np.random.default_rng(tokens)
    shapes = ((3, 4, 32), (2, tokens, 32), (2, tokens, 32))
    query, key, value = (round_half(rng.standard_normal(shape), half) for shape in shapes)
    return query, key, value, tokens - 3 + np.arange(3)


@pytest.mark.parametrize("options", [AttentionOptions(), AttentionOptions(softcap=2.0, smooth_softmax=True)])
@pytest.mark.parametrize("half", HALVES)
def test_only_probabilities_lose_precision(half: HalfName, options: AttentionOptions) -> None:
    """With representable operands the error against float64 is that of the rounded numerators."""
    query, key, value, positions = random_call(half, 40)
    wide = attend(query, key, value, positions, options)
    narrow = attend_half(query, key, value, positions, options, half=half)
    error = np.abs(narrow.output - wide.output) / wide.magnitude
    assert HALF_UNIT[half] / 20 < error.max() <= HALF_UNIT[half] * 1.1
    assert np.allclose(narrow.magnitude, wide.magnitude, rtol=1e-5)
    assert np.allclose(narrow.terms, wide.terms, rtol=1e-6)


@pytest.mark.parametrize("half", HALVES)
def test_operands_are_rounded(half: HalfName) -> None:
    """Values between two numbers of the type give what the rounded values give, but for bits of the smallest."""
    query, key, value, positions = random_call(half, 20)
    nudge = 1 + HALF_UNIT[half] / 4
    exact = attend_half(query, key, value, positions, AttentionOptions(), half=half)
    moved = attend_half(query * nudge, key * nudge, value * nudge, positions, AttentionOptions(), half=half)
    assert np.allclose(exact.output, moved.output, rtol=0, atol=2.0**-22)
    assert not np.allclose(attend(query * nudge, key, value, positions, AttentionOptions()).output, exact.output,
                           rtol=0, atol=2.0**-22)  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
def test_one_token_is_its_value(half: HalfName) -> None:
    """Numerator and denominator are 1."""
    query, key, value, _ = random_call(half, 3)
    result = attend_half(query[:1], key[:, :1], value[:, :1], np.array([0]), AttentionOptions(), half=half)
    assert np.array_equal(result.output[0], value[:, 0].repeat(2, axis=0))


@pytest.mark.parametrize("half", HALVES)
def test_unseen_poison_does_not_matter(half: HalfName) -> None:
    """A NaN value behind the last position, or before the window, changes nothing; a seen one does."""
    query, key, value, _ = random_call(half, 12)
    options, positions = AttentionOptions(local_window_size=4), np.array([7, 8, 9])
    clean = attend_half(query, key, value, positions, options, half=half).output
    for token, touched in ((11, False), (2, False), (8, True)):
        poisoned = value.copy()
        poisoned[1, token] = np.nan
        output = attend_half(query, key, poisoned, positions, options, half=half).output
        assert np.array_equal(output[0], clean[0])
        assert np.isnan(output[1:, 2:]).all() == touched
        assert touched or np.array_equal(output, clean)


@pytest.mark.parametrize("half", HALVES)
def test_head_sink(half: HalfName) -> None:
    """A large sink takes all weight but is not part of the output."""
    query, key, value, positions = random_call(half, 10)
    sink = np.array([-np.inf, 0.0, 30.0, 60.0], np.float32)
    wide = attend(query, key, value, positions, AttentionOptions(), sink)
    narrow = attend_half(query, key, value, positions, AttentionOptions(), sink, half)
    assert (np.abs(narrow.output - wide.output) <= HALF_UNIT[half] * 1.1 * wide.magnitude + 2.0**-26).all()
    assert np.abs(narrow.output[:, 3]).max() < 1e-6 * np.abs(narrow.output[:, 0]).max()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("exponent", [-30, -12, 12, 40])
def test_range_of_the_cache_does_not_matter(exponent: int, half: HalfName) -> None:
    """Values and keys times a power of two, queries by its inverse: the same result times that power of two."""
    query, key, value, positions = random_call(half, 9)
    factor = np.float32(2.0**exponent)
    plain = attend_half(query, key, value, positions, AttentionOptions(), half=half)
    scaled = attend_half(query / factor, key * factor, value * factor, positions, AttentionOptions(), half=half)
    assert np.array_equal(scaled.output, plain.output * factor)
