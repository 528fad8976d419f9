"""Decode: up to 16 query rows of a KV head (8 for heads beyond 128) after a past.

Each list goes along one dimension of the problem.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from python_tests.kernel.call import Call
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, GRANULARITIES, HALVES, HEAD_SIZES, MULTIPROCESSORS, TOKENS, params
from python_tests.kernel.verify import verify
from python_tests.op.gqa_case import make_inputs, make_past
from python_tests.reference.format import CacheDtype, Granularity, dequantize, quantize_per_token

pytestmark = pytest.mark.gpu

LENGTHS = [
    KernelCase(id=f"decode-t{t}-{dtype}-{half}", dtype=dtype, activation=half, totals=(t,), total=1040, capacity=1040)
    for t in TOKENS
    for dtype in FORMATS
    for half in HALVES
]
SPLITS = [
    KernelCase(
        id=f"decode-mp{mp}-clusters{clusters}-t{t}-{dtype}", dtype=dtype, totals=(t, max(1, t - 3)), total=700,
        capacity=700, multiprocessors=mp, clusters=clusters,
    )
    for mp in MULTIPROCESSORS
    for clusters in (True, False)
    for t in (1, 2, 63, 64, 65, 129, 191, 192, 193, 511, 512, 513, 699, 700)
    for dtype in FORMATS
]  # fmt: skip
GROUPS = [
    KernelCase(
        id=f"decode-g{g}-s{s}-{dtype}-d{d}", dtype=dtype, heads=2 * g, kv_heads=2, seq=s, totals=(140, s + 8),
        capacity=200, head_size=d,
    )
    for g, s in (
        (1, 1), (1, 2), (1, 3), (1, 8), (1, 9), (1, 16), (2, 1), (2, 4), (2, 5), (2, 8), (3, 1), (3, 2), (3, 3), (3, 5),
        (4, 1), (4, 2), (4, 3), (4, 4), (5, 1), (5, 2), (5, 3), (6, 2), (7, 1), (7, 2), (8, 1), (8, 2), (9, 1), (12, 1),
        (15, 1), (16, 1),
    )
    for dtype in FORMATS
    for d in (64, 128)
]  # fmt: skip
SIZES = [
    KernelCase(
        id=f"decode-d{d}-{dtype}-{half}-{k}", dtype=dtype, activation=half, head_size=d, totals=(133, 5),
        capacity=140, k_quant=k, v_quant=k,
    )
    for d in HEAD_SIZES
    for dtype in FORMATS
    for half in HALVES
    for k in (Granularity.PER_CHANNEL, Granularity.PER_TOKEN)
]  # fmt: skip
WINDOWS = [
    KernelCase(
        id=f"decode-window{w}-s{s}-mp{mp}",
        window=w,
        seq=s,
        totals=(260, s),
        total=300,
        capacity=300,
        multiprocessors=mp,
    )
    for w in (1, 2, 7, 30, 31, 32, 62, 63, 64, 65, 126, 127, 128, 129, 258, 259, 260, 300, 2**31 - 2, 2**31 - 1)
    for s in (1, 4)
    for mp in (1, 132)
]
SCALES = [
    KernelCase(
        id=f"decode-{k}-{v}-{dtype}-{half}", dtype=dtype, activation=half, k_quant=k, v_quant=v, totals=(77, 40),
        capacity=96,
        total=96, rotary="half",
    )
    for k in GRANULARITIES
    for v in GRANULARITIES
    for dtype in FORMATS
    for half in HALVES
]  # fmt: skip
FEATURES = [
    KernelCase(
        id=f"decode-sink{sink}-smooth{smooth}-cap{cap}-scale{scale}-mp{mp}", sink=sink, smooth=smooth, softcap=cap,
        scale=scale, totals=(150, 3), capacity=200, multiprocessors=mp, seq=2,
    )
    for sink in (False, True)
    for smooth in (False, True)
    for cap in (0.0, 0.5, 30.0)
    for scale in (0.0, 0.02, 1.0, -0.1)
    for mp in (1, 132)
]  # fmt: skip
ONE_SPLIT = [
    KernelCase(
        id=f"decode-one-split-t{t}-{dtype}-s{s}", dtype=dtype, heads=8, kv_heads=4, head_size=64, seq=s,
        totals=(t, max(s, t - 3), s), total=300, capacity=300, multiprocessors=1, sink=True, window=w,
    )
    for t in (16, 63, 64, 65, 129, 300)
    for s, w in ((1, -1), (8, 40))
    for dtype in FORMATS
]  # fmt: skip
RAGGED = [
    KernelCase(
        id=f"decode-ragged-s{s}-{dtype}", dtype=dtype, seq=s, totals=(1, s, s + 1, 17, 300, 64, 129, 0, 301, 63, 255),
        total=300, capacity=300, rotary="half",
    )
    for s in (1, 4)
    for dtype in FORMATS
]  # fmt: skip
CAPACITY = [
    KernelCase(
        id=f"decode-capacity-{dtype}", dtype=dtype, totals=(33, 1), total=70_000, capacity=70_000, heads=4, kv_heads=1,
        head_size=64,
    )
    for dtype in FORMATS
]  # fmt: skip
LONG = [
    KernelCase(
        id=f"decode-long-{t}-mp{mp}-{dtype}", dtype=dtype, totals=(t,), capacity=t + 3, total=t + 3, heads=4,
        kv_heads=1,
        head_size=64, window=w, multiprocessors=mp,
    )
    for t, w, mp in ((8191, -1, 0), (8192, 700, 0), (32769, -1, 0), (32769, -1, 1))
    for dtype in FORMATS
]  # fmt: skip
# Few and many warps, and each way to merge: arguments. Lengths around tiles of 16 and 32 tokens, a block's rounds of
# them, splits of 128 tokens and more, and the capacity; what is beyond it does not fit.
BLOCK_EDGES = (1, 15, 16, 17, 255, 256, 257, 511, 512, 513)
BLOCKS: dict[str, dict[str, Any]] = {
    "one-split": {"multiprocessors": 7, "capacity": 4096},
    "begins-last": {"multiprocessors": 132, "capacity": 4097},
    "cluster": {"multiprocessors": 132, "capacity": 1024},
    "merge-kernel": {"multiprocessors": 528, "capacity": 8200},
}
# Where blocks may be wide, those that are not above, and narrow ones. Many splits are always wide there.
OTHER_BLOCKS: dict[str, dict[str, Any]] = {
    "one-split-wide": {"multiprocessors": 13, "capacity": 4096},
    "begins-last-narrow": {"multiprocessors": 20, "capacity": 4097, "clusters": False},
    "cluster-wide": {"multiprocessors": 66, "capacity": 4096},
}
# (head size, query heads of a KV head). More than 8: 16 rows.
ROWS = [(d, g) for d in (64, 128, 256) for g in (1, 4, 7, 8)] + [(72, 4), (136, 4), (64, 16), (72, 16), (128, 16)]
ALL_GROUPS = ("begins-last", "cluster-wide")
WAYS = [
    KernelCase(
        id=f"decode-{name}-g{g}-d{d}-{dtype}-window{w}", dtype=dtype, heads=g, kv_heads=1, head_size=d,
        totals=(*BLOCK_EDGES, *(arguments["capacity"] + i for i in (-1, 0, 1))), total=arguments["capacity"], window=w,
        sink=w > 0, smooth=w > 0, rotary="half", **arguments,
    )
    for d, g in ROWS
    for name, arguments in (BLOCKS | (OTHER_BLOCKS if d in (64, 128, 256) and g <= 8 else {})).items()
    if g in (4, 16) or name in ALL_GROUPS
    for dtype in FORMATS
    for w in (-1, 300)
]  # fmt: skip
CASES = LENGTHS + SPLITS + GROUPS + SIZES + WINDOWS + SCALES + FEATURES + ONE_SPLIT + RAGGED + CAPACITY + LONG + WAYS


@pytest.mark.parametrize("case", params(CASES))
def test_decode(case: KernelCase, device: Device) -> None:
    """Output within the bound; bytes, scales, guards and untouched rows exact."""
    verify(case, device)


def test_lists_reach_one_few_and_all_splits(device: Device) -> None:
    """One split, which writes the output itself, some, and as many as the capacity has; each way to merge them."""
    splits, ways = set(), set()
    for case in [*SPLITS, *ONE_SPLIT, *GROUPS, *WAYS]:
        if case.dtype is CacheDtype.INT8 and case.window < 0:
            with Call(device, case, make_inputs(case), make_past(case)) as call:
                splits.add(call.plan.splits)
                ways.add((call.plan.merge, call.plan.warps))
    assert 1 in splits
    assert len(splits) >= 4
    assert max(splits) > 32
    merges = {"one-split", "begins-last", "merge-kernel"} | ({"cluster"} if any(device.clusters) else set())
    assert {(merge, warps) for merge in merges for warps in (4, 8, 16)} - {("merge-kernel", 4)} <= ways


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_size", [64, 72, 128, 256])
def test_rows_at_their_least_alignment(head_size: int, dtype: CacheDtype, device: Device) -> None:
    """Caches that start 8 bytes (int4: 4) off a 16-byte boundary."""
    for scale in GRANULARITIES:
        case = KernelCase(
            id=f"decode-unaligned-{head_size}-{dtype}-{scale}", dtype=dtype, head_size=head_size, totals=(133, 5),
            capacity=140, k_quant=scale, v_quant=scale,
        )  # fmt: skip
        _, _, plan = verify(case, device, misalign=4 if dtype is CacheDtype.INT4 else 8)
        assert not plan.whole_rows


def test_separate_buffers(device: Device) -> None:
    """Copy, append and attention in one call; past shorter than present, and empty."""
    for dtype in FORMATS:
        for capacity, totals, total in ((64, (40, 64), 64), (5, (6, 3), 6), (0, (1, 1), 2)):
            case = KernelCase(
                id=f"decode-separate-{dtype}-{capacity}", dtype=dtype, capacity=capacity, totals=totals, total=total,
                in_place=False,
            )  # fmt: skip
            verify(case, device)


@pytest.mark.parametrize(("batch", "kv_heads"), [(70_000, 1), (2, 40_000)])
def test_many_blocks(batch: int, kv_heads: int, device: Device) -> None:
    """More than 65,535 blocks, along batch entries and heads. With one token the output is its value."""
    case = KernelCase(
        id=f"decode-many-{batch}", head_size=8, heads=kv_heads, kv_heads=kv_heads, totals=(1,) * batch, capacity=3,
        total=3,
    )  # fmt: skip
    inputs, past = make_inputs(case), make_past(case)
    with Call(device, case, inputs, past) as call:
        call.launch()
        outcome = call.outcome()
    assert not outcome.stray
    assert inputs.value is not None
    value = inputs.value.astype(np.float32).reshape(batch, kv_heads, 8)
    codes, scales = quantize_per_token(value, CacheDtype.INT8, np.float32)
    assert np.array_equal(outcome.cache.value[:, :, 0], codes.view(np.uint8))
    read = dequantize(codes, scales, CacheDtype.INT8, 8).reshape(outcome.output.shape)
    assert np.allclose(outcome.output, read, rtol=2.0**-10, atol=2.0**-24)
