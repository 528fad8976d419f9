"""Arrays whose surroundings are known."""

from __future__ import annotations

import os

import numpy as np
from onnx import TensorProto

from python_tests.op.cuda_runtime import DeviceMemory
from python_tests.op.host_memory import HostMemory, Memory
from python_tests.reference.bfloat16 import pack_bfloat16, unpack_bfloat16
from python_tests.reference.format import Array

GUARD_VALUE = 0xA5
# Under compute-sanitizer an allocation must end where the array ends: what lies behind it is then found by the tool.
EXACT_VARIABLE = "KV_QUANT_EXACT_ALLOCATIONS"


def guard_bytes() -> int:
    """Bytes on either side of an array."""
    return 256 if os.environ.get(EXACT_VARIABLE, "0") in ("", "0") else 0


class GuardedArray:
    """An array inside a larger allocation whose other bytes are known, so that a stray write shows.

    bfloat16 elements are float32 on this side, and every value must be one that bfloat16 has.
    misalign: bytes that the first element is moved away from a 64-byte boundary.
    """

    def __init__(
        self, array: Array, element_type: int, device: str = "cpu", misalign: int = 0, device_id: int = 0
    ) -> None:
        self.shape, self.dtype, self.element_type = array.shape, array.dtype, element_type
        self.device, self.device_id = device, device_id
        stored = self._packed(array)
        self.nbytes = stored.nbytes
        guard = guard_bytes()
        self.start = guard + misalign
        self._size = self.start + self.nbytes + guard
        self.memory: Memory = (
            HostMemory(self._size, GUARD_VALUE) if device == "cpu" else DeviceMemory(self._size, device_id, GUARD_VALUE)
        )
        self.memory.write(stored, self.start)
        self.pointer = self.memory.pointer + self.start

    def _packed(self, array: Array) -> Array:
        if self.element_type != TensorProto.BFLOAT16:
            return array
        bits = pack_bfloat16(array)
        assert np.array_equal(unpack_bfloat16(bits), array, equal_nan=True), "values that bfloat16 does not have"
        return bits

    def read(self) -> Array:
        """A copy of the array as it is now."""
        stored = self.memory.read(self.start, self.nbytes)
        if self.element_type == TensorProto.BFLOAT16:
            return unpack_bfloat16(stored.view(np.uint16)).reshape(self.shape)
        return stored.view(self.dtype).reshape(self.shape)

    def write(self, array: Array) -> None:
        """Replace the contents; shape and type stay."""
        assert (array.shape, array.dtype) == (self.shape, self.dtype), (array.shape, array.dtype)
        self.memory.write(self._packed(array), self.start)

    def stray_writes(self) -> list[int]:
        """Byte offsets relative to the array at which a guard was overwritten."""
        stop = self.start + self.nbytes
        sides = ((-self.start, self.memory.read(0, self.start)), (self.nbytes, self.memory.read(stop)))
        return [first + int(i) for first, side in sides for i in np.flatnonzero(side != GUARD_VALUE)]
