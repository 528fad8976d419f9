"""A library without code for the GPU says so when it is asked, before anything is launched."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from python_tests.kernel import toolchain
from python_tests.kernel.device import Device

pytestmark = pytest.mark.gpu

ENTRY = """
#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"
extern "C" int found() { return onnxruntime::contrib::kv_cache_quant::FindDeviceCode(); }
extern "C" int left() { return cudaGetLastError(); }
"""


def found_in_code_for(capability: str, folder: Path) -> tuple[int, int]:
    """What FindDeviceCode returns in a library of machine code for that chip alone, and the error that it leaves."""
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    entry, library = folder / "entry.cu", folder / f"code-{capability}.so"
    entry.write_text(ENTRY, encoding="utf-8")
    target = ["-gencode", f"arch=compute_{capability},code=sm_{capability}", "-shared", "-o", str(library)]
    sources = [str(entry), str(toolchain.KERNELS / "append.cu")]
    subprocess.run([str(nvcc), *toolchain.COMMON, *target, *sources], check=True)
    handle = ctypes.CDLL(str(library))
    return handle.found(), handle.left()


def test_code_for_this_gpu_is_found(device: Device) -> None:
    """The library of the tests."""
    assert device.handle.kvq_find_device_code() == 0


def test_missing_code_is_named(device: Device, tmp_path: Path) -> None:
    """Machine code of another generation does not run here; the error is the runtime's and does not stay behind."""
    own = str(device.info().compute_capability)
    other = "80" if own[:-1] != "8" else "90"
    no_kernel_image = 209
    assert found_in_code_for(other, tmp_path) == (no_kernel_image, 0)
