"""Prefill: more than 16 query rows of a KV head after a past.

Blocks of 128 query rows and tiles of 64 tokens, half of both where D > 128; 32 or 16 rows a warp.
"""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, GRANULARITIES, HALVES, HEAD_SIZES, SINKS, params
from python_tests.kernel.test_values import ZERO_BYTE, rows_of, scales_of
from python_tests.kernel.verify import verify
from python_tests.op.gqa_case import make_past
from python_tests.reference.format import CacheDtype, Granularity

pytestmark = pytest.mark.gpu

LENGTHS = [
    KernelCase(
        id=f"prefill-s{s}-past{p}-{dtype}", dtype=dtype, seq=s, totals=(s + p, s), total=300, capacity=300, heads=4,
        kv_heads=1, head_size=d,
    )
    for s in (5, 8, 15, 16, 17, 31, 32, 33, 64, 65, 129, 200)
    for p, d in ((0, 64), (1, 128), (31, 64), (32, 128), (63, 256), (64, 64), (65, 128), (100, 256))
    for dtype in FORMATS
]  # fmt: skip
TOKENS = [
    KernelCase(
        id=f"prefill-t{t}-{half}", activation=half, seq=20, totals=(t, 20), total=1040, capacity=1040, heads=3,
        kv_heads=1,
        head_size=64,
    )
    for t in (20, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000)
    for half in HALVES
]  # fmt: skip
GROUPS = [
    KernelCase(
        id=f"prefill-g{g}-s{s}-{dtype}", dtype=dtype, heads=2 * g, kv_heads=2, head_size=64, seq=s, totals=(140, s + 8),
        capacity=200,
    )
    for g, s in (
        (1, 17), (1, 64), (1, 65), (2, 9), (3, 6), (3, 43), (5, 4), (5, 16), (7, 3), (7, 64), (8, 3), (12, 2), (16, 2),
        (17, 1), (24, 1), (24, 3), (32, 1), (32, 2), (33, 2), (48, 1), (63, 1), (63, 3), (64, 1), (64, 2), (64, 5),
        (1, 95), (1, 96), (1, 97), (1, 127), (1, 128), (1, 129), (3, 75), (16, 17),
    )
    for dtype in FORMATS
]  # fmt: skip
SIZES = [
    KernelCase(
        id=f"prefill-d{d}-{dtype}-{half}-{k}", dtype=dtype, activation=half, head_size=d, seq=21, totals=(133, 25),
        capacity=140, k_quant=k, v_quant=k,
    )
    for d in HEAD_SIZES
    for dtype in FORMATS
    for half in HALVES
    for k in (Granularity.PER_CHANNEL, Granularity.PER_TOKEN)
]  # fmt: skip
WINDOWS = [
    KernelCase(
        id=f"prefill-window{w}-s{s}-d{d}", window=w, seq=s, totals=(260, s), total=300, capacity=300, head_size=d
    )
    for w in (1, 2, 7, 31, 32, 33, 62, 63, 64, 65, 127, 128, 129, 199, 258, 259, 260, 2**31 - 2, 2**31 - 1)
    for s in (5, 70)
    for d in (64, 256)
]
SCALES = [
    KernelCase(
        id=f"prefill-{k}-{v}-{dtype}-{half}", dtype=dtype, activation=half, k_quant=k, v_quant=v, seq=18, totals=(77,
        40),
        capacity=96, total=96, rotary="half",
    )
    for k in GRANULARITIES
    for v in GRANULARITIES
    for dtype in FORMATS
    for half in HALVES
]  # fmt: skip
FEATURES = [
    KernelCase(
        id=f"prefill-sink{sink}-smooth{smooth}-cap{cap}-scale{scale}-mp{mp}", sink=sink, smooth=smooth, softcap=cap,
        scale=scale, totals=(150, 17), capacity=200, multiprocessors=mp, seq=17,
    )
    for sink in (False, True)
    for smooth in (False, True)
    for cap in (0.0, 0.5, 30.0)
    for scale in (0.0, 0.02, 1.0, -0.1)
    for mp in (1, 132)
]  # fmt: skip
RAGGED = [
    KernelCase(
        id=f"prefill-ragged-s{s}-{dtype}", dtype=dtype, seq=s,
        totals=(s, s + 1, 17 + s, 300, 64 + s, 129, s - 1, 301, 63 + s, 255), total=300, capacity=300, rotary="half",
    )
    for s in (5, 33)
    for dtype in FORMATS
]  # fmt: skip
LONG = [
    KernelCase(
        id=f"prefill-long-{t}-mp{mp}-{dtype}", dtype=dtype, seq=32, totals=(t,), capacity=t + 3, total=t + 3, heads=1,
        kv_heads=1, head_size=64, window=w, multiprocessors=mp,
    )
    for t, w, mp in ((8191, -1, 0), (8192, 700, 0), (8192, -1, 1), (8200, -1, 5))
    for dtype in FORMATS
]  # fmt: skip
# Splits by the capacity, 128 tokens each, and sizes of a head. A thread merges four elements of up to 8 splits; a block
# of 256 threads a row of more, and one of 512 a row of more than 32 of 256 elements.
MERGES = {splits: (64, 72, 128, 136, 256) for splits in (2, 3, 8, 9)} | {33: (256,)}
MERGED = [
    KernelCase(
        id=f"prefill-merged-{splits}-d{d}-{dtype}-{half}-{sink}", dtype=dtype, activation=half, head_size=d, seq=20,
        heads=6, kv_heads=2, capacity=128 * splits, total=128 * splits, multiprocessors=396,
        totals=(128 * splits, 64 * splits + 21, 20, 19, 128 * splits + 1, 150),
        v_quant=Granularity.PER_CHANNEL if sink == "both" else Granularity.PER_TOKEN, **SINKS[sink],
    )
    for splits, sizes in MERGES.items()
    for d in sizes
    for dtype in FORMATS
    for half, sink in zip(HALVES, ("sink", "both"), strict=True)
]  # fmt: skip
CASES = LENGTHS + TOKENS + GROUPS + SIZES + WINDOWS + SCALES + FEATURES + RAGGED + LONG + MERGED


@pytest.mark.parametrize("case", params(CASES))
def test_prefill(case: KernelCase, device: Device) -> None:
    """Output within the bound; bytes, scales, guards and untouched rows exact."""
    verify(case, device)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_size", [64, 72, 128, 256])
def test_rows_at_their_least_alignment(head_size: int, dtype: CacheDtype, device: Device) -> None:
    """Caches that start 8 bytes (int4: 4) off a 16-byte boundary."""
    for scale in GRANULARITIES:
        case = KernelCase(
            id=f"prefill-unaligned-{head_size}-{dtype}-{scale}", dtype=dtype, head_size=head_size, seq=9,
            totals=(133, 9), capacity=140, k_quant=scale, v_quant=scale,
        )  # fmt: skip
        _, _, plan = verify(case, device, misalign=4 if dtype is CacheDtype.INT4 else 8)
        assert not plan.whole_rows


def test_separate_buffers(device: Device) -> None:
    """Copy, append and attention in one call; past shorter than present, and empty."""
    for dtype in FORMATS:
        for capacity, totals, total in ((64, (40, 64), 64), (5, (25, 22), 25), (0, (20, 20), 21)):
            case = KernelCase(
                id=f"prefill-separate-{dtype}-{capacity}", dtype=dtype, capacity=capacity, totals=totals, total=total,
                seq=20, in_place=False,
            )  # fmt: skip
            verify(case, device)


@pytest.mark.parametrize("case", params([c for c in MERGED if c.activation == "float16"]))
def test_rows_that_are_not_in_vectors(case: KernelCase, device: Device) -> None:
    """Activations at two bytes off a boundary: the merged rows are written element by element."""
    _, _, plan = verify(case, device, activation_misalign=2)
    assert not plan.activation_vectors


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("splits", MERGES)
def test_parts_that_are_nan(splits: int, dtype: CacheDtype, device: Device) -> None:
    """NaN in V's scale of one token: in the entry's output, and in no other's. Entries that do not fit are NaN."""
    for case in (c for c in MERGED if c.capacity == 128 * splits and c.dtype is dtype and c.smooth is False):
        past, token = make_past(case), 64 * splits
        scales_of(past, "v")[1, :, token] = np.nan
        rows_of(past, "v")[1, :, token] = ZERO_BYTE[dtype]
        outcome, _, plan = verify(case, device, past=past)
        assert plan.splits == splits
        wrong = ~np.isfinite(outcome.output)
        assert wrong[[1, 3, 4]].all()
        assert not wrong[[0, 2, 5]].any()
