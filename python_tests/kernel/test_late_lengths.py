"""Lengths that the kernel before writes when the decode kernel may have begun already.

The decode kernel reads them before it waits for that kernel, begins with what it read, and begins again where that was
wrong. Without the second look all tests here are red; with it after the append, the bytes of the cache are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.verify import verify
from python_tests.reference.format import CacheDtype

pytestmark = pytest.mark.gpu

# Each way to merge; blocks of 8 warps where a capacity fits into a cluster of those, else of 16.
PLANS: dict[str, dict[str, Any]] = {
    "one-split": {"multiprocessors": 1, "capacity": 700},
    "cluster": {"multiprocessors": 132, "capacity": 700},
    "last-block": {"multiprocessors": 132, "capacity": 700, "clusters": False},
    "wide-cluster": {"multiprocessors": 132, "capacity": 3000},
    "wide-last-block": {"multiprocessors": 132, "capacity": 3000, "clusters": False},
    "padded-heads": {"multiprocessors": 132, "capacity": 700, "head_size": 72},
    "merge-kernel": {"multiprocessors": 132, "capacity": 9000, "head_size": 72},
}
# seqlens_k before: one off, in another split, in the first one, none, not valid.
BEFORE = (641, 639, 300, 5, 0, -1, -2, 100_000)


@pytest.mark.parametrize("dtype", [CacheDtype.INT8, CacheDtype.INT4], ids=str)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("plan", list(PLANS))
def test_late_length(plan: str, before: int, dtype: CacheDtype, device: Device) -> None:
    """As if the length had been there all along; the second entry keeps its own."""
    case = KernelCase(
        id=f"late-{plan}-{before}-{dtype}", dtype=dtype, totals=(641, 130), heads=4, kv_heads=1, rotary="half",
        **{"head_size": 128, "total": 641} | PLANS[plan],
    )  # fmt: skip
    verify(case, device, lengths_before=np.array([before, 129], np.int32))


@pytest.mark.parametrize("plan", list(PLANS))
def test_late_length_is_shorter(plan: str, device: Device) -> None:
    """Splits that had tokens have none, and the new row is in another one."""
    for total in (1, 2, 17, 129, 300):
        case = KernelCase(
            id=f"late-shorter-{plan}-{total}", dtype=CacheDtype.FP8, totals=(total, 130), heads=4, kv_heads=1,
            **{"head_size": 128, "total": 641} | PLANS[plan],
        )  # fmt: skip
        verify(case, device, lengths_before=np.array([640, 600], np.int32))
