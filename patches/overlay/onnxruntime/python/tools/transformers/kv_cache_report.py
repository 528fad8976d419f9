# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Numbers for reports: latencies, memory of the process and of the device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import numpy as np


def latency_percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """10th, 50th and 90th percentile in milliseconds."""
    low, middle, high = np.percentile(np.asarray(seconds) * 1e3, (10, 50, 90))
    return float(low), float(middle), float(high)


def peak_process_memory() -> int:
    """Largest resident size of this process so far, in bytes; 0 where the system does not tell it (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_memory_used(device_id: int = 0) -> int | None:
    """Bytes of a CUDA device that are in use, by every process; None where the driver does not tell."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    context, free, total, device = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), device_id):
        return None
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        if driver.cuCtxPushCurrent_v2(context):
            return None
        failed = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else total.value - free.value
