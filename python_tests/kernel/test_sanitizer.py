"""Small calls that visit every kernel and every instance: what runs under compute-sanitizer.

KV_QUANT_EXACT_ALLOCATIONS=1 compute-sanitizer --tool memcheck python -m pytest python_tests/kernel -m sanitizer

With exact allocations each array ends where its memory ends, so that an over-read shows as well. test_late_lengths.py
has more of them, in which decode begins again.
"""

from __future__ import annotations

from typing import Any

import pytest

from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, HALVES, params
from python_tests.kernel.verify import verify
from python_tests.reference.format import CacheDtype, Granularity

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]

# Padded heads of each size with and without padding, 8 and 16 decode rows. One split; few, which the block that begins
# last merges, or a cluster; and many, for the merge kernel. Two parts at least have tokens where some are merged.
MERGES: dict[str, dict[str, Any]] = {
    "one-split": {"multiprocessors": 1},
    "begins-last": {"multiprocessors": 132, "clusters": False},
    "cluster": {"multiprocessors": 132, "window": 140},
    "merge-kernel": {"multiprocessors": 132, "capacity": 8300, "total": 8300, "totals": (300, 9), "window": 266},
}
# Where blocks may be wide, those that are not above, and narrow ones. Many splits are always wide there.
OTHER_WARPS: dict[str, dict[str, Any]] = {
    "one-split-wide": {"multiprocessors": 2, "clusters": False},
    "begins-last-narrow": {"multiprocessors": 3, "clusters": False},
    "cluster-wide": {
        "multiprocessors": 12, "capacity": 1300, "total": 1300, "totals": (300, 9), "window": 266
    },
}  # fmt: skip
SMALL: dict[str, Any] = {"capacity": 300, "total": 300, "totals": (270, 9)}
DECODE = [
    KernelCase(
        id=f"sanitizer-decode-{dtype}-d{d}-s{s}-{name}", dtype=dtype, head_size=d, seq=s, heads=4, kv_heads=1,
        rotary="half", **SMALL | merge,
    )
    for dtype in FORMATS
    for d in (24, 64, 72, 128, 136, 256)
    for s in (1, 4)
    for name, merge in (MERGES | (OTHER_WARPS if d in (64, 128, 256) and s == 1 else {})).items()
]  # fmt: skip
# Each merge kernel: a thread for four elements, of up to 8 splits; a block of 256 threads for a row, and one of 512.
PREFILL_SPLITS = (3, 9, 129)
PREFILL = [
    KernelCase(
        id=f"sanitizer-prefill-{dtype}-d{d}-mp{mp}-c{capacity}", dtype=dtype, head_size=d, seq=18, totals=(270, 19),
        capacity=capacity, total=capacity, heads=4, kv_heads=1, multiprocessors=mp, rotary="interleaved",
        window=-1 if mp == 1 else 40, sink=True,
    )
    for dtype in FORMATS
    for d in (24, 64, 72, 128, 136, 256)
    for mp, capacity in ((1, 300), *((132, 128 * splits - 1) for splits in PREFILL_SPLITS))
]  # fmt: skip
PROMPT = [
    KernelCase(
        id=f"sanitizer-prompt-{half}-d{d}-packed{packed}", activation=half, head_size=d, seq=70, totals=(70, 9),
        capacity=80, heads=2, kv_heads=1, packed=packed, rotary="half" if packed else "none",
    )
    for half in HALVES
    for d in (24, 64, 72, 128, 136, 256)
    for packed in (False, True)
]  # fmt: skip
COPY = [
    KernelCase(
        id=f"sanitizer-copy-{dtype}-{half}-{k}", dtype=dtype, activation=half, k_quant=k, in_place=False, seq=2,
        head_size=72, totals=(40, 3), capacity=39, total=40, heads=3, kv_heads=3,
    )
    for dtype in FORMATS
    for half in HALVES
    for k in (Granularity.PER_TOKEN, Granularity.PER_CHANNEL, Granularity.PER_TENSOR)
]  # fmt: skip


@pytest.mark.parametrize("case", params(DECODE + PREFILL + PROMPT + COPY))
def test_visit(case: KernelCase, device: Device) -> None:
    """Right results, and nothing for the sanitizer to report."""
    verify(case, device)


@pytest.mark.parametrize("dtype", FORMATS)
def test_nothing_fits(dtype: CacheDtype, device: Device) -> None:
    """Lengths beyond the capacity and below zero reach no memory."""
    for seq in (1, 20):
        totals = (81, -3, 2**31, seq - 1)
        case = KernelCase(
            id=f"sanitizer-invalid-{dtype}-{seq}", dtype=dtype, seq=seq, totals=totals, total=80, capacity=80
        )
        verify(case, device)
