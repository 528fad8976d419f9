"""Device memory, streams and graphs through the tests' library, which brings its own CUDA runtime."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np

from python_tests.kernel import toolchain
from python_tests.kernel.params import GqaParams, GqaPlan, HostLibrary
from python_tests.reference.format import U8, Array

GUARD_VALUE = 0xA5
# Under compute-sanitizer an allocation must end where the array ends.
EXACT_VARIABLE = "KV_QUANT_EXACT_ALLOCATIONS"
Kernel: TypeAlias = Literal["gqa", "copy_past", "append", "decode", "prefill", "merge"]
_SIZE, _PTR = ctypes.c_size_t, ctypes.c_void_p


class _Info(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("multiprocessors", ctypes.c_int32),
        ("compute_capability", ctypes.c_int32),
        ("l2_bytes", ctypes.c_int64),
        ("total_bytes", ctypes.c_int64),
        ("free_bytes", ctypes.c_int64),
        ("name", ctypes.c_char * 256),
    ]


def missing() -> str:
    """Why the kernels cannot run here; empty if they can."""
    if toolchain.gpu_architecture() is None:
        return "needs a GPU: the CUDA driver finds none here"
    if toolchain.LIBRARY_VARIABLE not in os.environ and toolchain.find_nvcc() is None:
        return f"needs nvcc, or {toolchain.LIBRARY_VARIABLE}"
    return ""


class Device(HostLibrary):
    """The library on device 0, with one stream for everything."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self.handle.kvq_error_text.restype = ctypes.c_char_p
        self.handle.kvq_sources.restype = ctypes.c_char_p
        self.stream = self._made(self.handle.kvq_stream_create)
        self.guard_bytes = 0 if os.environ.get(EXACT_VARIABLE, "0") not in ("", "0") else 256
        info = self.info()
        self.multiprocessors: int = info.multiprocessors
        # PTX of an older chip has the kernels of that chip.
        compiled = ctypes.c_int()
        self.check(self.handle.kvq_compiled_for(ctypes.byref(compiled)), "attributes of a kernel")
        self.compute_capability: int = min(info.compute_capability, compiled.value)
        clusters = (ctypes.c_int32 * (self.handle.kvq_max_cluster() + 1))()
        self.check(self.handle.kvq_find_clusters(clusters), "clusters that fit the device")
        self.clusters: list[int] = list(clusters)
        self.name: str = info.name.decode()
        self.l2_bytes: int = info.l2_bytes

    def check(self, error: int, what: str) -> None:
        """Raises RuntimeError with the runtime's text."""
        if error:
            self.handle.kvq_last_error()
            msg = f"{what}: {self.handle.kvq_error_text(error).decode()}"
            raise RuntimeError(msg)

    def _made(self, create: Callable[..., int], *arguments: object) -> int:
        result = _PTR()
        self.check(create(*arguments, ctypes.byref(result)), create.__name__)
        return int(result.value or 0)

    def info(self) -> _Info:
        """Properties of the device and its free memory."""
        info = _Info()
        self.check(self.handle.kvq_device(ctypes.byref(info)), "device properties")
        return info

    def sources(self) -> str:
        """Digest of the sources that the library was built from."""
        return str(self.handle.kvq_sources().decode())

    def allocate(self, size: int) -> int:
        """Address of `size` bytes."""
        return self._made(self.handle.kvq_malloc, _SIZE(max(size, 1)))

    def free(self, address: int) -> None:
        """Waits for the device."""
        self.check(self.handle.kvq_free(_PTR(address)), "free")

    def fill(self, address: int, value: int, size: int) -> None:
        """Sets bytes."""
        self.check(self.handle.kvq_set(_PTR(address), value, _SIZE(size), _PTR(self.stream)), "set")

    def upload(self, address: int, data: Array) -> None:
        """Copies a contiguous array to the device; returns when it is there."""
        source = _PTR(data.ctypes.data)
        self.check(self.handle.kvq_to_device(_PTR(address), source, _SIZE(data.nbytes), _PTR(self.stream)), "upload")
        self.synchronize()

    def download(self, address: int, size: int) -> U8:
        """Bytes of the device, after everything that is enqueued."""
        data = np.empty(size, np.uint8)
        target = _PTR(data.ctypes.data)
        self.check(self.handle.kvq_to_host(target, _PTR(address), _SIZE(size), _PTR(self.stream)), "download")
        self.synchronize()
        return data

    def synchronize(self) -> None:
        """Waits for the stream; raises what a kernel did wrong."""
        self.check(self.handle.kvq_synchronize(_PTR(self.stream)), "synchronize")

    def launch(self, kernel: Kernel, params: GqaParams, plan: GqaPlan) -> None:
        """Enqueues one launcher of launch.h."""
        function = getattr(self.handle, f"kvq_launch_{kernel}")
        self.check(function(ctypes.byref(params), ctypes.byref(plan), _PTR(self.stream)), f"launch of {kernel}")

    @contextmanager
    def capture(self, into: Graph) -> Iterator[None]:
        """What is launched inside becomes the graph `into`, and is not run."""
        self.check(self.handle.kvq_capture_begin(_PTR(self.stream)), "begin of a capture")
        try:
            yield
        finally:
            error = self.handle.kvq_capture_end(
                _PTR(self.stream), ctypes.byref(into.executable), ctypes.byref(into.kernel_count),
                ctypes.byref(into.node_count),
            )  # fmt: skip
        self.check(error, "end of a capture")

    def count_other(self, address: int, size: int, value: int) -> int:
        """16-byte vectors of the device's memory in which some byte is not `value`."""
        count = self.allocate(8)
        self.fill(count, 0, 8)
        error = self.handle.kvq_count_other(_PTR(address), _SIZE(size), value, _PTR(count), _PTR(self.stream))
        self.check(error, "count")
        found = int(self.download(count, 8).view(np.uint64)[0])
        self.free(count)
        return found

    def random_codes(self, address: int, size: int, seed: int) -> None:
        """Random bytes without e4m3's NaN codes."""
        error = self.handle.kvq_random_codes(_PTR(address), _SIZE(size), ctypes.c_uint64(seed), _PTR(self.stream))
        self.check(error, "random codes")

    def uniform(self, address: int, count: int, low: float, high: float, seed: int) -> None:
        """Random floats of [low, high)."""
        ends = (ctypes.c_float(low), ctypes.c_float(high))
        error = self.handle.kvq_uniform(
            _PTR(address), _SIZE(count), 0, *ends, ctypes.c_uint64(seed), _PTR(self.stream)
        )  # fmt: skip
        self.check(error, "uniform")

    def read(self, address: int, size: int, blocks: int, total: int) -> None:
        """Enqueues a kernel that reads the bytes once."""
        error = self.handle.kvq_read(_PTR(address), _SIZE(size), blocks, _PTR(total), _PTR(self.stream))
        self.check(error, "read")

    def store_late(self, to: int, values: int, rows: int, count: int, cycles: int) -> None:
        """Enqueues a kernel that lets the next one begin and stores a row of `count` int32 every so many cycles."""
        late = ctypes.c_int64(cycles)
        error = self.handle.kvq_store_late(_PTR(to), _PTR(values), rows, count, late, _PTR(self.stream))
        self.check(error, "late store")

    def read_twice(self, address: int, seen: int, blocks: int) -> None:
        """Enqueues a kernel whose warps read an int32 before and after they wait for the kernel before."""
        error = self.handle.kvq_read_twice(_PTR(address), _PTR(seen), blocks, _PTR(self.stream))
        self.check(error, "read before and after the wait")

    def event(self) -> int:
        """An event that can be timed."""
        return self._made(self.handle.kvq_event_create)

    def record(self, event: int) -> None:
        """Enqueues an event."""
        self.check(self.handle.kvq_event_record(_PTR(event), _PTR(self.stream)), "event")

    def elapsed(self, start: int, end: int) -> float:
        """Milliseconds between two events that have passed."""
        result = ctypes.c_float()
        self.check(self.handle.kvq_event_elapsed(ctypes.byref(result), _PTR(start), _PTR(end)), "elapsed time")
        return result.value


class Graph:
    """A captured sequence of launches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.executable, self.kernel_count, self.node_count = _PTR(), ctypes.c_int(), ctypes.c_int()

    @property
    def kernels(self) -> int:
        """Kernels in it."""
        return self.kernel_count.value

    @property
    def nodes(self) -> int:
        """All nodes in it: kernels, copies, fills and others."""
        return self.node_count.value

    def launch(self) -> None:
        """Enqueues it."""
        error = self._device.handle.kvq_graph_launch(self.executable, _PTR(self._device.stream))
        self._device.check(error, "launch of a graph")

    def close(self) -> None:
        """Destroys it."""
        self._device.check(self._device.handle.kvq_graph_destroy(self.executable), "end of a graph")


class Buffer:
    """An array on the device between bytes whose value is known, so that a stray write shows.

    misalign: bytes by which the first element is moved away from a 256-byte boundary.
    """

    def __init__(self, device: Device, array: Array, misalign: int = 0) -> None:
        self._device, self.shape, self.dtype = device, array.shape, array.dtype
        self._start, self._size = device.guard_bytes + misalign, array.nbytes
        self._total = self._start + self._size + device.guard_bytes
        self._base = device.allocate(self._total)
        self.address = self._base + self._start
        image = np.full(self._total, GUARD_VALUE, np.uint8)
        image[self._start : self._start + self._size] = _bytes(array)
        device.upload(self._base, image)

    def write(self, array: Array) -> None:
        """Replaces the contents; shape and type stay."""
        assert (array.shape, array.dtype) == (self.shape, self.dtype), (array.shape, array.dtype)
        self._device.upload(self.address, _bytes(array))

    def read(self) -> tuple[Array, list[int]]:
        """A copy of the array, and the offsets relative to it of guard bytes that were overwritten."""
        image = self._device.download(self._base, self._total)
        inside = slice(self._start, self._start + self._size)
        array = image[inside].copy().view(self.dtype).reshape(self.shape)
        image[inside] = GUARD_VALUE
        return array, [int(i) - self._start for i in np.flatnonzero(image != GUARD_VALUE)]

    def close(self) -> None:
        """Frees the memory."""
        self._device.free(self._base)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _bytes(array: Array) -> U8:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@lru_cache(maxsize=1)
def open_device() -> Device:
    """The device with the library named by the environment, or one that is built now."""
    prebuilt = os.environ.get(toolchain.LIBRARY_VARIABLE)
    return Device(Path(prebuilt).resolve() if prebuilt else toolchain.build())
