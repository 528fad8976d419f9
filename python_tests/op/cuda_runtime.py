"""The part of the CUDA runtime that the tests need, through ctypes: memory, streams, events. No other package.

Every call raises CudaError on failure. Addresses are ints. A test machine may lack all of it: import this module
freely, only calls load the library.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.reference.format import U8, Array

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaGetDeviceCount": (ctypes.POINTER(_INT),),
    "cudaGetDevice": (ctypes.POINTER(_INT),),
    "cudaSetDevice": (_INT,),
    "cudaDeviceGetAttribute": (ctypes.POINTER(_INT), _INT, _INT),
    "cudaDeviceSynchronize": (),
    "cudaMemGetInfo": (ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)),
    "cudaMalloc": (ctypes.POINTER(_POINTER), _SIZE),
    "cudaFree": (_POINTER,),
    "cudaMemcpy": (_POINTER, _POINTER, _SIZE, _INT),
    "cudaMemcpyAsync": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
    "cudaMemset": (_POINTER, _INT, _SIZE),
    "cudaStreamCreateWithFlags": (ctypes.POINTER(_POINTER), ctypes.c_uint),
    "cudaStreamDestroy": (_POINTER,),
    "cudaStreamSynchronize": (_POINTER,),
    "cudaStreamWaitEvent": (_POINTER, _POINTER, ctypes.c_uint),
    "cudaLaunchHostFunc": (_POINTER, _POINTER, _POINTER),
    "cudaEventCreate": (ctypes.POINTER(_POINTER),),
    "cudaEventDestroy": (_POINTER,),
    "cudaEventRecord": (_POINTER, _POINTER),
    "cudaEventSynchronize": (_POINTER,),
    "cudaEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _POINTER, _POINTER),
}
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_NON_BLOCKING = 1
_MAJOR, _MINOR = 75, 76  # cudaDevAttrComputeCapability*


class CudaError(RuntimeError):
    """A CUDA call that failed, or no CUDA runtime."""


def _candidates() -> Iterator[str]:
    """Where a runtime may be: the one in this process (onnxruntime's, once its provider is loaded) comes first."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        yield from dict.fromkeys(re.findall(r"\S*/libcudart\S*\.so[.\d]*", maps.read_text()))
    name = "cudart64_{}.dll" if sys.platform == "win32" else "libcudart.so.{}"
    names = [name.format(major) for major in (13, 12)]
    yield from names
    for folder in map(Path, sys.path):
        for pattern in ("nvidia/cuda_runtime/lib", "nvidia/cu13/lib", "nvidia/cu12/lib"):
            yield from (str(folder / pattern / n) for n in names if (folder / pattern / n).exists())
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield from (str(Path(home) / "lib64" / n) for n in names)


def _load_provider() -> None:
    """Have onnxruntime load its CUDA provider, and with it the runtime that the kernels use."""
    try:
        import onnxruntime as ort

        ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.uint8), "cuda", 0)
    except (ImportError, RuntimeError):
        # No CUDA wheel: the helpers work without it.
        return


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    _load_provider()
    tried = []
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            tried.append(name)
            continue
        for function, arguments in _SIGNATURES.items():
            getattr(library, function).argtypes = arguments
            getattr(library, function).restype = _INT
        library.cudaGetErrorString.argtypes = (_INT,)
        library.cudaGetErrorString.restype = ctypes.c_char_p
        return library
    msg = f"no CUDA runtime library; tried {', '.join(tried)}"
    raise CudaError(msg)


def _call(function: str, *arguments: object) -> None:
    library = _library()
    code = getattr(library, function)(*arguments)
    if code != 0:
        library.cudaGetLastError()
        msg = f"{function}: {library.cudaGetErrorString(code).decode()} ({code})"
        raise CudaError(msg)


def _integer(kind: type[ctypes.c_int] | type[ctypes.c_void_p], function: str, *arguments: object) -> int:
    """The number or handle that a call writes through its first argument."""
    value = kind()
    _call(function, ctypes.byref(value), *arguments)
    return int(value.value or 0)


def device_count() -> int:
    """Devices, 0 where there is no runtime or no driver."""
    try:
        return _integer(_INT, "cudaGetDeviceCount")
    except CudaError:
        return 0


def compute_capability(device_id: int = 0) -> int:
    """10 * major + minor."""
    major, minor = (_integer(_INT, "cudaDeviceGetAttribute", which, device_id) for which in (_MAJOR, _MINOR))
    return 10 * major + minor


@contextmanager
def on_device(device_id: int) -> Iterator[None]:
    """Makes a device the calling thread's."""
    before = _integer(_INT, "cudaGetDevice")
    _call("cudaSetDevice", device_id)
    try:
        yield
    finally:
        _call("cudaSetDevice", before)


def synchronize(device_id: int = 0) -> None:
    """Wait for everything on the device; raises what a kernel did wrong."""
    with on_device(device_id):
        _call("cudaDeviceSynchronize")


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Keeps tests that take gigabytes apart where pytest-xdist runs several processes; on POSIX only."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (Path(tempfile.gettempdir()) / "kv-quant-tests-large-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def memory_info(device_id: int = 0) -> tuple[int, int]:
    """(free, total) bytes of the device, whoever uses them."""
    free, total = _SIZE(), _SIZE()
    with on_device(device_id):
        _call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


class DeviceMemory:
    """An allocation of its own. Its bytes are not initialized unless `fill` says with what."""

    def __init__(self, size: int, device_id: int = 0, fill: int | None = None) -> None:
        self.size, self.device_id = size, device_id
        with on_device(device_id):
            self.pointer = _integer(_POINTER, "cudaMalloc", max(size, 1))
        if fill is not None:
            self.fill(fill)

    def _address(self, offset: int, size: int) -> int:
        assert 0 <= offset <= offset + size <= self.size, (offset, size, self.size)
        return self.pointer + offset

    def _settle(self) -> None:
        # A copy from pageable memory may still be on its way when cudaMemcpy returns, and streams that do not wait for
        # the default one, such as onnxruntime's, could overtake it.
        _call("cudaStreamSynchronize", None)

    def write(self, array: Array, offset: int = 0) -> None:
        """Copy an array's bytes to the device; they are there on return."""
        data = np.ascontiguousarray(array)
        with on_device(self.device_id):
            _call("cudaMemcpy", self._address(offset, data.nbytes), data.ctypes.data, data.nbytes, _TO_DEVICE)
            self._settle()

    def read(self, offset: int = 0, size: int | None = None) -> U8:
        """Bytes of the device. Work on other streams must be finished."""
        size = self.size - offset if size is None else size
        data = np.empty(size, np.uint8)
        with on_device(self.device_id):
            _call("cudaMemcpy", data.ctypes.data, self._address(offset, size), size, _TO_HOST)
        return data

    def fill(self, value: int, offset: int = 0, size: int | None = None) -> None:
        """Set bytes."""
        size = self.size - offset if size is None else size
        with on_device(self.device_id):
            _call("cudaMemset", self._address(offset, size), value, size)
            self._settle()

    def free(self) -> None:
        """Give the memory back; waits for the device."""
        if self.pointer:
            _call("cudaFree", self.pointer)
            self.pointer = 0

    def __del__(self) -> None:
        if getattr(self, "pointer", 0) and not sys.is_finalizing():
            self.free()


class Event:
    """A point in a stream of the device."""

    def __init__(self, device_id: int = 0) -> None:
        with on_device(device_id):
            self.handle = _integer(_POINTER, "cudaEventCreate")

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""
        _call("cudaEventSynchronize", self.handle)

    def seconds_since(self, start: Event) -> float:
        """Device time between two events that have passed."""
        milliseconds = ctypes.c_float()
        _call("cudaEventElapsedTime", ctypes.byref(milliseconds), start.handle, self.handle)
        return milliseconds.value / 1e3

    def __del__(self) -> None:
        if getattr(self, "handle", 0) and not sys.is_finalizing():
            _call("cudaEventDestroy", self.handle)


class Stream:
    """A stream that does not wait for the default stream. Not destroyed: sessions may outlive the object."""

    def __init__(self, device_id: int = 0) -> None:
        self.device_id = device_id
        with on_device(device_id):
            self.handle = _integer(_POINTER, "cudaStreamCreateWithFlags", _NON_BLOCKING)

    def synchronize(self) -> None:
        """Wait for what was enqueued."""
        _call("cudaStreamSynchronize", self.handle)

    def pause(self, seconds: float) -> None:
        """Enqueue a wait of less than a second, so that whatever comes after it comes late. POSIX only.

        The host function is the C library's own: one in Python could collect garbage, and free device memory, where
        CUDA forbids calls. Its argument travels as the pointer that host functions get.
        """
        usleep = ctypes.cast(ctypes.CDLL(None).usleep, _POINTER)
        _call("cudaLaunchHostFunc", self.handle, usleep, int(seconds * 1e6))

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy between two addresses of the device."""
        _call("cudaMemcpyAsync", target, source, size, _ON_DEVICE, self.handle)

    def record(self) -> Event:
        """Enqueue an event."""
        event = Event(self.device_id)
        _call("cudaEventRecord", event.handle, self.handle)
        return event

    def wait(self, event: Event) -> None:
        """Enqueue a wait for another stream's event."""
        _call("cudaStreamWaitEvent", self.handle, event.handle, 0)
