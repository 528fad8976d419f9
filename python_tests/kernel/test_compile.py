"""The device code compiles for every architecture that it is for: a warning or a spilled register is an error.

No GPU is needed. Objects are for the test alone; the library of the other tests has debug information and one
architecture.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from python_tests.kernel import toolchain

ARCHITECTURES = ("75", "80", "90", "120")
STRICT = ("-Xptxas", "-warn-spills", "-Xptxas", "-Werror")
LIMIT = 25_000_000
"""Bytes that the kernels may add to the provider, for one architecture."""


def compile_strictly(nvcc: Path, architecture: str, source: Path, target: Path) -> str:
    """Compile one file; the compiler's text where it fails."""
    arch = [f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    flags = [flag for flag in toolchain.COMMON if flag != "-lineinfo"]
    cmd = [str(nvcc), *flags, *STRICT, *arch, "-c", str(source), "-o", str(target)]
    done = subprocess.run(cmd, check=False, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{source.name} for sm_{architecture}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_warnings_or_spills(
    architecture: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """All files of the device code, and their size."""
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    sources = sorted(toolchain.kernel_sources(), key=lambda path: path.parent.name, reverse=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [pool.submit(compile_strictly, nvcc, architecture, s, tmp_path / f"{s.stem}.o") for s in sources]
    faults = [text for text in (job.result() for job in jobs) if text]
    assert not faults, "\n".join(faults)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.o"))
    record_property("bytes", size)
    assert size <= LIMIT


def test_a_spill_is_an_error(tmp_path: Path) -> None:
    """The check can fail: a kernel that cannot keep its values in registers does not compile."""
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    sums = "".join(f"float x{i} = in[{i} + threadIdx.x];\n" for i in range(64))
    loop = "for (int i = 0; i < n; ++i) {" + "".join(f"x{i} = x{i} * x{(i + 1) % 64} + 1.0f;" for i in range(64)) + "}"
    total = " + ".join(f"x{i}" for i in range(64))
    source = tmp_path / "spill.cu"
    head = "__global__ void __launch_bounds__(1024, 2) Spill(const float* in, float* out, int n) {\n"
    source.write_text(f"{head}{sums}{loop}\nout[threadIdx.x] = {total};\n}}\n", encoding="utf-8")
    assert "spill" in compile_strictly(nvcc, "90", source, tmp_path / "spill.o")
