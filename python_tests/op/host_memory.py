"""Memory of the host behind the interface of DeviceMemory; needs NumPy alone."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from python_tests.reference.format import U8, Array


class Memory(Protocol):
    """Bytes at an address."""

    pointer: int

    def write(self, array: Array, offset: int = 0) -> None:
        """Copy an array's bytes to an offset."""

    def read(self, offset: int = 0, size: int | None = None) -> U8:
        """A copy of bytes."""


class HostMemory:
    """NumPy's memory, aligned to 64 bytes. fill: what every byte is at first."""

    def __init__(self, size: int, fill: int = 0) -> None:
        storage = np.full(size + 64, fill, np.uint8)
        start = -storage.ctypes.data % 64
        self.bytes = storage[start : start + size]
        self.pointer = int(storage.ctypes.data) + start

    def write(self, array: Array, offset: int = 0) -> None:
        """Copy an array's bytes to an offset."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes[offset : offset + data.size] = data

    def read(self, offset: int = 0, size: int | None = None) -> U8:
        """A copy of bytes."""
        return self.bytes[offset : None if size is None else offset + size].copy()
