"""Device time of replayed CUDA graphs, and read bandwidth."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.op.cuda_runtime import DeviceMemory, Event, Stream

# A replay as long as this hides what the host adds to it.
LONG_SECONDS = 0.02
_PAUSE_MARGIN, _RECORD_MARGIN = 0.004, 0.002
READ_BYTES = 2**32
_GRIDS = (264, 528, 1056, 2112, 4224, 8448)


class ReplayTimer:
    """Time between two events around a replay on one stream.

    onnxruntime waits for a replay before it returns, so an event that the caller records afterwards is late by what the
    host needs, and an event before it is early. So the stream is paused first: the first event, the replay and the last
    event, which another thread records while the caller still waits, are all in the queue before the first one passes.
    A sample whose last event came too late is measured plainly, and counted in `late`.
    """

    def __init__(self, stream: Stream, replay: Callable[[], None]) -> None:
        self._stream, self._replay = stream, replay
        self._pool = ThreadPoolExecutor(1)
        self.samples = self.late = 0
        for _ in range(2):
            replay()
        stream.synchronize()
        begin = time.perf_counter()
        replay()
        stream.synchronize()
        self.seconds = time.perf_counter() - begin

    def milliseconds(self) -> float:
        """One replay."""
        self.samples += 1
        if self.seconds < LONG_SECONDS:
            found = self._queued()
            if found is not None:
                return found
            self.late += 1
        start = self._stream.record()
        self._replay()
        end = self._stream.record()
        end.synchronize()
        return 1e3 * end.seconds_since(start)

    def _queued(self) -> float | None:
        """The replay alone, None if its events were not in the queue in time."""
        # The replay is enqueued well within the time that a whole one takes.
        delay = 2 * self.seconds + _RECORD_MARGIN
        pause = delay + _PAUSE_MARGIN
        begin = time.perf_counter()
        self._stream.pause(pause)
        start = self._stream.record()
        later = self._pool.submit(self._record_after, delay)
        called = time.perf_counter()
        self._replay()
        tail = self._stream.record()
        end, before, after = later.result()
        for event in (tail, end):
            event.synchronize()
        found = end.seconds_since(start)
        # Were the last event before the replay, the replay would lie between it and the caller's own.
        if before - called < self.seconds or after - begin > pause or found < tail.seconds_since(start) / 2:
            return None
        return 1e3 * found

    def _record_after(self, delay: float) -> tuple[Event, float, float]:
        """An event recorded `delay` seconds from now, and the host's time just before and after."""
        time.sleep(delay)
        before = time.perf_counter()
        event = self._stream.record()
        return event, before, time.perf_counter()

    def close(self) -> None:
        """End the other thread."""
        self._pool.shutdown()


def _median_rate(stream: Stream, enqueue: Callable[[], None], size: int, count: int = 10) -> float:
    """GB/s at the median of some runs."""
    times = []
    for turn in range(count + 2):
        start = stream.record()
        enqueue()
        end = stream.record()
        end.synchronize()
        if turn >= 2:
            times.append(end.seconds_since(start))
    return size / float(np.median(times)) / 1e9


def device_read_bandwidth(
    stream: Stream, fill: Callable[[DeviceMemory, int], None], library: Path | None, size: int = READ_BYTES
) -> tuple[float, str]:
    """GB/s and the method: a kernel that reads `size` bytes at the best of some grid sizes, else a copy's two ways.

    fill: enqueues random contents.
    """
    memory, other = DeviceMemory(size), DeviceMemory(256 if library else size, fill=0)
    fill(memory, size)
    try:
        if library is None:
            rate = _median_rate(stream, lambda: stream.copy(other.pointer, memory.pointer, size), 2 * size)
            return rate, "copy"
        read = _reader(library)
        rates = []
        for blocks in _GRIDS:

            def enqueue(grid: int = blocks) -> None:
                error = read(memory.pointer, size, grid, other.pointer, stream.handle)
                if error:
                    msg = f"read kernel: CUDA error {error}"
                    raise RuntimeError(msg)

            rates.append(_median_rate(stream, enqueue, size))
        return max(rates), "kernel"
    finally:
        memory.free()
        other.free()


def _reader(library: Path) -> Any:  # noqa: ANN401 - ctypes has no type for it
    read = ctypes.CDLL(str(library)).kvq_read
    pointer = ctypes.c_void_p
    read.argtypes = (pointer, ctypes.c_size_t, ctypes.c_int, pointer, pointer)
    read.restype = ctypes.c_int
    return read


def host_read_bandwidth(threads: int, size: int = 2**27) -> tuple[float, str]:
    """GB/s of `threads` threads that each look for the largest number in their part of `size` bytes."""
    data = np.ones(size // 8, np.int64)
    parts = np.array_split(data, threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - begin)
    return size / min(times) / 1e9, "host threads"


def device_name() -> str:
    """Name of device 0, from the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return "unknown GPU"
    driver.cuDeviceGetName(name, 256, device)
    return name.value.decode()
