"""LaunchCopyPast alone: rows [0, P) of codes and scales become present's, as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.kernel.call import Call
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, GRANULARITIES, params
from python_tests.kernel.yardstick import check_cache, expected_of
from python_tests.op.gqa_case import make_inputs, make_past, poisoned_cache
from python_tests.reference.format import CacheDtype, Granularity
from python_tests.reference.step import Cache

pytestmark = pytest.mark.gpu

LAYOUTS = [
    KernelCase(
        id=f"copy-{dtype}-{k}-{v}-{scale_type}-d{d}-c{capacity}", dtype=dtype, k_quant=k, v_quant=v,
        scale_type="float16" if scale_type == "float16" else "float32", head_size=d, capacity=capacity,
        total=capacity + 7, totals=(capacity + 1, 1, 2, capacity // 2 + 1), in_place=False,
    )
    for dtype in FORMATS
    for k in GRANULARITIES
    for v in GRANULARITIES
    for scale_type in ("float32", "float16")
    if scale_type == "float32" or (k is v and k is Granularity.PER_TOKEN)
    for d, capacity in ((8, 5), (24, 33), (72, 41), (128, 64), (256, 129))
]  # fmt: skip
INVALID = [
    KernelCase(
        id=f"copy-invalid-{dtype}", dtype=dtype, seq=3, capacity=20, total=23, totals=(23, 2, 24, 0, 3, 2**31),
        in_place=False,
    )
    for dtype in FORMATS
]  # fmt: skip
# More than one chunk of a head, and past much shorter than present.
LONG = [
    KernelCase(
        id=f"copy-long-{dtype}-{capacity}", dtype=dtype, heads=2, kv_heads=2, capacity=capacity, total=3000,
        totals=(capacity + 1, 17), in_place=False, scale_type="float16",
    )
    for dtype in FORMATS
    for capacity in (1, 700, 2999)
]  # fmt: skip


def copied(case: KernelCase, past: Cache) -> Cache:
    """Present after the copy: poison but for the old rows of entries that fit."""
    present = poisoned_cache(case, case.present_capacity)
    for b, old in enumerate(case.pasts):
        if 0 <= old <= past.capacity and case.totals[b] <= present.capacity:
            for name in ("key", "value", "k_scale", "v_scale"):
                before, after = getattr(past, name), getattr(present, name)
                if after.shape[2:3] == present.key.shape[2:3]:
                    after[b, :, :old] = before[b, :, :old]
    return present


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("case", params(LAYOUTS + INVALID + LONG))
def test_copy(case: KernelCase, aligned: bool, device: Device) -> None:
    """At the best and the least alignment, for lengths 0 to the capacity; entries that do not fit stay as they are."""
    misalign = 0 if aligned else 4 if case.dtype is CacheDtype.INT4 else 8
    past, before = make_past(case), poisoned_cache(case, case.present_capacity)
    with Call(device, case, make_inputs(case), past, before, misalign=misalign) as call:
        call.launch("copy_past")
        outcome = call.outcome()
    assert not outcome.stray
    assert outcome.past is not None
    check_cache(outcome.past, past, "past")
    check_cache(outcome.cache, copied(case, past))


def test_one_buffer_is_left_alone(device: Device) -> None:
    """Where past is present there is nothing to copy."""
    case = KernelCase(id="copy-in-place", totals=(20, 40), total=64)
    past = make_past(case)
    with Call(device, case, make_inputs(case), past) as call:
        call.launch("copy_past")
        outcome = call.outcome()
    assert not outcome.stray
    check_cache(outcome.cache, past)


def test_expectation_agrees_with_the_reference() -> None:
    """What this file expects and the reference's step differ in the appended rows only."""
    case = LAYOUTS[0]
    past = make_past(case)
    stepped = expected_of(case, make_inputs(case), past, poisoned_cache(case, case.present_capacity)).cache
    mine = copied(case, past)
    for b, old in enumerate(case.pasts):
        assert np.array_equal(stepped.key[b, :, :old], mine.key[b, :, :old])
        assert not np.array_equal(stepped.key[b, :, old : old + 1], mine.key[b, :, old : old + 1])
