"""Caches beyond 2^31 elements, and contexts of 131,072 tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from python_tests.kernel.call import Call
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS
from python_tests.kernel.verify import judge, verify
from python_tests.kernel.yardstick import expected_of
from python_tests.op.gqa_case import POISON_BYTE, make_inputs, make_past, poisoned_cache
from python_tests.reference.format import Array, CacheDtype
from python_tests.reference.step import Cache

pytestmark = pytest.mark.gpu

CAPACITY = 131_072
LAST = 40
LIMIT = 2**31


class SpreadRows:
    """The rows of a small array (B, Hkv, c, row) as the first c rows of each head of one with a capacity of 131,072.

    All other bytes are poison.
    """

    def __init__(self, device: Device, array: Array, poison: int) -> None:
        self._device, self._array, self._poison = device, array, poison
        self.row = array.itemsize * int(np.prod(array.shape[3:]))
        self.size = int(np.prod(array.shape[:2])) * CAPACITY * self.row
        self.address = device.allocate(self.size)
        device.fill(self.address, poison, self.size)
        for head, rows in enumerate(self._heads(array)):
            device.upload(self._place(head), np.ascontiguousarray(rows))

    def _heads(self, array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    def _place(self, head: int) -> int:
        return self.address + head * CAPACITY * self.row

    def read(self) -> Array:
        """The first c rows of each head, after a check that nothing else has changed."""
        heads = self._heads(self._array)
        size = heads[0].nbytes
        parts = [self._device.download(self._place(head), size) for head in range(len(heads))]
        changed = sum(int((part.reshape(-1, 16) != self._poison).any(axis=1).sum()) for part in parts)
        assert self._device.count_other(self.address, self.size, self._poison) == changed, "bytes behind the rows"
        return np.stack(parts).view(self._array.dtype).reshape(self._array.shape)

    def close(self) -> None:
        """Frees the memory."""
        self._device.free(self.address)


def spread(device: Device, call: Call) -> dict[str, SpreadRows]:
    """Replaces the call's caches and scales by large ones that hold the same rows, and plans again."""
    p, big = call.params, {}
    separate = "k_present" in call.buffers
    for letter, side in (("k", p.k), ("v", p.v)):
        for name, poison in ((f"{letter}_past", POISON_BYTE), (f"{letter}_scale", 0xFF)):
            big[name] = SpreadRows(device, call.buffers[name].read()[0], poison)
        side.codes, side.token_scale = big[f"{letter}_past"].address, big[f"{letter}_scale"].address
        if separate:
            side.past_codes, side.past_token_scale = side.codes, side.token_scale
            for name, poison in ((f"{letter}_present", POISON_BYTE), (f"{letter}_present_scale", 0xFF)):
                big[name] = SpreadRows(device, call.buffers[name].read()[0], poison)
            side.codes = big[f"{letter}_present"].address
            side.token_scale = big[f"{letter}_present_scale"].address
    p.capacity = p.past_capacity = CAPACITY
    call.make_plan(device.multiprocessors)
    return big


def named(found: dict[str, Array], rows: str, scales: str) -> Cache:
    """The cache among the arrays that were read back."""
    return Cache(found[f"k_{rows}"], found[f"v_{rows}"], found[f"k_{scales}"], found[f"v_{scales}"])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("seq", [1, 20])
@pytest.mark.parametrize(
    ("dtype", "batch"),
    [(CacheDtype.INT8, 16), (CacheDtype.INT8, 17), (CacheDtype.FP8, 17), (CacheDtype.INT4, 33)],
    ids=["int8-2^31", "int8", "fp8", "int4"],
)
def test_cache_beyond_two_to_the_31(dtype: CacheDtype, batch: int, seq: int, in_place: bool, device: Device) -> None:
    """The last batch entry lies beyond 2^31 bytes; the first stays as it is but for its own new rows."""
    case = KernelCase(
        id=f"beyond-{dtype}-{batch}-{seq}-{in_place}", dtype=dtype, seq=seq, capacity=64, total=64, heads=8, kv_heads=8,
        totals=(*(seq + b % 3 for b in range(batch - 1)), LAST), in_place=in_place, rotary="half",
    )  # fmt: skip
    inputs, past = make_inputs(case), make_past(case)
    # A poisoned scale is 0xFF bytes here, which is a NaN as well.
    present = None if in_place else poisoned_cache(case, 64)
    for cache in (past, present):
        for scale in (cache.k_scale, cache.v_scale) if cache is not None else ():
            assert scale is not None
            scale.view(np.uint32)[np.isnan(scale)] = 0xFFFFFFFF
    needed = batch * 8 * CAPACITY * (past.key.shape[-1] + 4) * 2 * (1 if in_place else 2)
    if device.info().free_bytes < needed + 2**28:
        pytest.skip(f"needs {needed / 1e9:.1f} GB of GPU memory")
    with Call(device, case, inputs, past, present) as call:
        big = spread(device, call)
        try:
            assert any(rows.size >= LIMIT for rows in big.values())
            call.launch()
            outcome = call.outcome()
            found = {name: rows.read() for name, rows in big.items()}
        finally:
            for rows in big.values():
                rows.close()
    old = named(found, "past", "scale")
    if in_place:
        outcome = replace(outcome, cache=old)
    else:
        outcome = replace(outcome, cache=named(found, "present", "present_scale"), past=old)
    judge(case, outcome, expected_of(case, inputs, past, present), past)


@pytest.mark.parametrize("dtype", FORMATS)
def test_longest_context(dtype: CacheDtype, device: Device) -> None:
    """131,072 tokens of two KV heads: scratch under 16 MB even with eight, output within the bound."""
    case = KernelCase(
        id=f"longest-{dtype}", dtype=dtype, heads=8, kv_heads=2, totals=(CAPACITY,), total=CAPACITY, capacity=CAPACITY,
    )  # fmt: skip
    _, _, plan = verify(case, device)
    assert plan.workspace_bytes < 16_000_000
