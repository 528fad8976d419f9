"""The device code's headers without a GPU: the list of all_headers.cu is complete, and it compiles."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from python_tests.kernel import toolchain

UNIT = Path(__file__).parent / "all_headers.cu"


def is_header(path: Path) -> bool:
    """Headers of the device code; the glue's includes the framework."""
    return path.suffix in (".h", ".cuh") and path.stem != Path(toolchain.GLUE).stem


def test_every_header_is_included() -> None:
    """A new header joins the translation unit that editors and static checks look at."""
    headers = {str(path.relative_to(toolchain.ROOT)) for path in toolchain.KERNELS.rglob("*") if is_header(path)}
    named = toolchain.INCLUDE.findall(UNIT.read_text(encoding="utf-8"))
    assert named == sorted(headers)


@pytest.mark.parametrize("architecture", ["75", "90"])
def test_all_headers_compile_together(architecture: str, tmp_path: Path) -> None:
    """In one translation unit, for the oldest architecture and for one with all instructions, without warnings."""
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    target = ["-ptx", f"-arch=compute_{architecture}", "-o", str(tmp_path / "all.ptx")]
    cmd = [str(nvcc), *toolchain.COMMON, *target, str(UNIT)]
    done = subprocess.run(cmd, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_glue_is_not_compiled_here() -> None:
    """The library has every file of the device code and none that includes the framework."""
    names = {path.name for path in toolchain.library_sources()}
    assert toolchain.GLUE not in names
    assert {"plan.cc", "append.cu", "copy_past.cu", "launch.cu", "merge.cu", "plan_entry.cc", "runtime.cu"} <= names
    for path in toolchain.library_sources():
        for source in toolchain.included(path):
            assert "core/" not in "".join(toolchain.INCLUDE.findall(source.read_text(encoding="utf-8"))), source


def test_digest_follows_included_headers() -> None:
    """An edit of a header two levels down changes the digest of what includes it, and of nothing else."""
    append = toolchain.KERNELS / "append.cu"
    plan = toolchain.KERNELS / "plan.cc"
    assert toolchain.KERNELS / "format.h" in toolchain.included(append)
    assert toolchain.KERNELS / "activation.cuh" in toolchain.included(append)
    assert toolchain.KERNELS / "activation.cuh" not in toolchain.included(plan)
    assert toolchain.digest(append) != toolchain.digest(*toolchain.included(append))
