"""Arrays whose surroundings are known."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from python_tests.reference.format import Array

GUARD_BYTES = 256
GUARD_VALUE = 0xA5


class GuardedArray:
    """An array inside a larger allocation whose other bytes are known, so that a stray write shows.

    misalign: bytes that the first element is moved away from a 64-byte boundary.
    """

    def __init__(self, array: Array, element_type: int, device: str = "cpu", misalign: int = 0) -> None:
        self.shape, self.dtype, self.element_type, self.device = array.shape, array.dtype, element_type, device
        storage = np.full(array.nbytes + 2 * GUARD_BYTES + 64, GUARD_VALUE, np.uint8)
        base = storage.ctypes.data if device == "cpu" else 0
        self._start = GUARD_BYTES + (-(base + GUARD_BYTES)) % 64 + misalign
        self._stop = self._start + array.nbytes
        storage[self._start : self._stop] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # On the CPU an OrtValue refers to the NumPy memory, elsewhere it holds a copy.
        self._storage = storage
        self._value = ort.OrtValue.ortvalue_from_numpy(storage, device, 0)
        self.pointer = self._value.data_ptr() + self._start

    def _bytes(self) -> Array:
        if self.device == "cpu":
            return self._storage
        copied: Array = self._value.numpy()
        return copied

    def read(self) -> Array:
        """A copy of the array as it is now."""
        return self._bytes()[self._start : self._stop].copy().view(self.dtype).reshape(self.shape)

    def write(self, array: Array) -> None:
        """Replace the contents; shape and type stay."""
        assert (array.shape, array.dtype) == (self.shape, self.dtype), (array.shape, array.dtype)
        storage = self._bytes().copy()
        storage[self._start : self._stop] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if self.device == "cpu":
            self._storage[:] = storage
        else:
            self._value.update_inplace(storage)

    def stray_writes(self) -> list[int]:
        """Byte offsets relative to the array at which a guard was overwritten."""
        storage = self._bytes()
        changed = np.flatnonzero(storage != GUARD_VALUE)
        return [int(i) - self._start for i in changed if not self._start <= i < self._stop]
