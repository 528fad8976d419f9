"""Each token is counted exactly once and found at its place, whatever tiles, splits, windows and lengths are.

A bound of 16-bit rounding is too wide to see one of a thousand random tokens missing. Here a query of zeros gives all
tokens the same weight and every token its own element, so that a missing one is an eighth of an output; and a query
that is one token's key finds that token's value and no other.
"""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.kernel.call import Call
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, HALVES, MULTIPROCESSORS, TOKENS
from python_tests.kernel.planted import one_hot_values, plant, sign_keys
from python_tests.kernel.verify import verify
from python_tests.kernel.yardstick import place
from python_tests.reference.format import CacheDtype, dequantize, quantize_per_token
from python_tests.reference.half_attention import HalfName

pytestmark = pytest.mark.gpu

SPLIT_EDGES = (191, 192, 193, 255, 256, 257, 319, 320, 321, 511, 512, 513, 639, 640, 641, 895, 896, 897, 1023, 1024)


def count_tokens(case: KernelCase, device: Device) -> None:
    """Outputs are shares of the visible tokens."""
    query = np.zeros((case.batch, case.seq, case.heads, case.head_size), np.float32)
    inputs, past = plant(case, query, sign_keys(case), one_hot_values(case))
    outcome, _, _ = verify(case, device, inputs=inputs, past=past)
    for b, (old, total) in enumerate(zip(case.pasts, case.totals, strict=True)):
        sums = outcome.output[b, : total - old].astype(np.float64).sum(axis=-1)
        assert np.allclose(sums, 1, atol=0.02), b


@pytest.mark.parametrize("window", [-1, 31, 200])
@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_decode_counts_tokens(dtype: CacheDtype, multiprocessors: int, window: int, device: Device) -> None:
    """All lengths around tiles and splits as entries of one batch, for one new token and for four."""
    for seq, head_size in ((1, 128), (4, 64), (1, 256)):
        case = KernelCase(
            id=f"count-decode-{dtype}-{multiprocessors}-{window}-{seq}", dtype=dtype, seq=seq, heads=2, kv_heads=1,
            totals=tuple(t for t in (*TOKENS, *SPLIT_EDGES) if t >= seq), capacity=1024, total=1024,
            multiprocessors=multiprocessors, window=window, head_size=head_size,
        )  # fmt: skip
        count_tokens(case, device)


@pytest.mark.parametrize("window", [-1, 31, 64])
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("dtype", FORMATS)
def test_prefill_counts_tokens(dtype: CacheDtype, multiprocessors: int, window: int, device: Device) -> None:
    """Query blocks of one and of several rows a token, with and without a last block that is not full."""
    for seq, group, head_size in ((17, 1, 64), (64, 1, 128), (70, 3, 64), (33, 1, 256)):
        case = KernelCase(
            id=f"count-prefill-{dtype}-{multiprocessors}-{window}-{seq}", dtype=dtype, seq=seq, heads=group, kv_heads=1,
            totals=tuple(t for t in (*TOKENS, 192, 193, 257, 321, 513) if t >= seq), capacity=1024, total=1024,
            multiprocessors=multiprocessors, window=window, head_size=head_size,
        )  # fmt: skip
        count_tokens(case, device)


@pytest.mark.parametrize("window", [-1, 31, 64])
@pytest.mark.parametrize("half", HALVES)
def test_prompt_counts_tokens(half: HalfName, window: int, device: Device) -> None:
    """Prompts padded to the longest of the batch."""
    for group, head_size in ((1, 64), (3, 128), (1, 256)):
        case = KernelCase(
            id=f"count-prompt-{half}-{window}-{group}", activation=half, seq=257, heads=group, kv_heads=1,
            totals=(*(t for t in TOKENS if t <= 257), 256, 257), capacity=257, window=window, head_size=head_size,
        )  # fmt: skip
        count_tokens(case, device)


def find_tokens(case: KernelCase, device: Device) -> None:
    """Row r of a KV head asks for the r-th token that it can see, counted over all rows of the batch."""
    assert case.dtype is not None
    group, total = case.heads // case.kv_heads, case.totals[0]
    key, value = sign_keys(case), case.rng("values").standard_normal(sign_keys(case).shape).astype(np.float16)
    rows = np.arange(case.batch * case.seq * group).reshape(case.batch, case.seq, group)
    wanted = rows % (case.pasts[0] + np.arange(case.seq)[None, :, None] + 1)
    # The newest tokens are visible to the last rows only.
    assert len(np.unique(wanted)) > total - case.seq, "not every token is asked for"
    # A score of 24 above all others in units of the softmax: their weight is below a 16-bit rounding.
    strength = np.float32(24 / case.head_size**0.5)
    query = strength * key[:, wanted].transpose(1, 2, 0, 3, 4).reshape(case.batch, case.seq, case.heads, -1)
    inputs, past = plant(case, query, key, value)
    with Call(device, case, inputs, past) as call:
        call.launch()
        outcome = call.outcome()
    assert not outcome.stray
    # Tokens of the past and of a step read back from the cache; a prompt reads them as they are.
    read = value.astype(np.float64)
    if not case.prompt:
        codes, scales = quantize_per_token(value.astype(np.float32), case.dtype, np.float32)
        read = dequantize(codes, scales, case.dtype, case.head_size)
    answers = read[:, wanted].transpose(1, 2, 0, 3, 4).reshape(outcome.output.shape)
    error = np.abs(outcome.output - answers).max(axis=-1)
    assert (error < 0.03).all(), f"(b, s, n): {place(error, np.zeros_like(error), ~(error < 0.03))}"


@pytest.mark.parametrize("multiprocessors", [1, 5, 132])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", FORMATS)
def test_decode_finds_each_token(dtype: CacheDtype, head_size: int, multiprocessors: int, device: Device) -> None:
    """Every position of a cache of 300 tokens, in both KV heads."""
    for seq, group, batch in ((1, 8, 40), (2, 4, 40), (1, 1, 300)):
        case = KernelCase(
            id=f"find-decode-{dtype}-{head_size}-{multiprocessors}-{seq}-{group}", dtype=dtype, head_size=head_size,
            seq=seq, heads=2 * group, kv_heads=2, totals=(300,) * batch, capacity=310, total=310,
            multiprocessors=multiprocessors,
        )  # fmt: skip
        find_tokens(case, device)


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", FORMATS)
def test_prefill_finds_each_token(dtype: CacheDtype, head_size: int, multiprocessors: int, device: Device) -> None:
    """Every position of a cache of 300 tokens, asked for by rows at every place of a block."""
    case = KernelCase(
        id=f"find-prefill-{dtype}-{head_size}-{multiprocessors}", dtype=dtype, head_size=head_size, seq=33, heads=6,
        kv_heads=2, totals=(300,) * 4, capacity=310, total=310, multiprocessors=multiprocessors,
    )  # fmt: skip
    find_tokens(case, device)


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("half", HALVES)
def test_prompt_finds_each_token(half: HalfName, head_size: int, device: Device) -> None:
    """Every position of a prompt of 150 tokens."""
    case = KernelCase(
        id=f"find-prompt-{half}-{head_size}", activation=half, head_size=head_size, seq=150, heads=4, kv_heads=2,
        totals=(150, 150), capacity=150,
    )  # fmt: skip
    find_tokens(case, device)
