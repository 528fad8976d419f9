"""The compilers of this machine: which ones CMake will take, and whether they can do what the source needs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from kvbuild import proc
from kvbuild.errors import EnvironmentProblem

_CANDIDATES = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
MIN_GCC = 9
USUAL_CUDA_FOLDER = Path("/usr/local")

_CXX17 = """
#include <filesystem>
#include <optional>
#include <string_view>
#include <Python.h>
template <typename... T> constexpr int Count(T...) { return sizeof...(T); }
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < MIN_GCC
#error GCC is older than upstream supports
#endif
int main() {
  if constexpr (Count(1, 2) == 2) return std::optional<std::string_view>("x")->size() == 1 ? 0 : 1;
}
"""


def find_compiler(variable: str) -> Path | None:
    """The compiler that CMake will use for `variable` (CC or CXX): the variable's, else the usual names."""
    named = shlex.split(os.environ.get(variable, ""))[:1]
    found = (shutil.which(name) for name in (named or _CANDIDATES[variable]))
    return next((Path(path) for path in found if path), None)


def check_cxx(python_header: Path) -> str:
    """Compile a C++17 program that includes Python.h; returns the compiler's version line.

    Raises EnvironmentProblem where there is no compiler, or it fails.
    """
    install = "install it, on Debian or Ubuntu with: apt install build-essential"
    for variable in ("CC", "CXX"):
        if not find_compiler(variable):
            given = os.environ.get(variable)
            msg = f"no compiler found ({variable}={given})" if given else f"no compiler found: {_CANDIDATES[variable]}"
            raise EnvironmentProblem(msg, todo=install)
    compiler = find_compiler("CXX")
    assert compiler is not None
    version = proc.run([compiler, "--version"], capture=True, error=EnvironmentProblem, timeout=60)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cc"
        source.write_text(_CXX17.replace("MIN_GCC", str(MIN_GCC)), encoding="utf-8")
        cmd: proc.Command = [
            compiler,
            "-std=c++17",
            f"-I{python_header.parent}",
            "-c",
            source,
            "-o",
            source.with_suffix(".o"),
        ]
        done = proc.run(cmd, check=False, error=EnvironmentProblem, timeout=120)
    if done.returncode != 0:
        msg = f"{compiler} cannot compile a C++17 program with Python.h"
        lines = "\n".join(f"  | {line}" for line in done.stdout.decode("utf-8", "replace").splitlines()[:8])
        raise EnvironmentProblem(
            msg, f"the compiler says\n{lines}", f"use GCC >= {MIN_GCC} or clang through CXX and CC"
        )
    return version.stdout.decode("utf-8", "replace").splitlines()[0]


def nvcc_version(cuda_home: Path) -> str:
    """Such as 13.0. Raises EnvironmentProblem where there is no working nvcc, naming one that was seen elsewhere."""
    nvcc = cuda_home / "bin" / "nvcc"
    if not nvcc.is_file():
        msg = f"--cuda-home {cuda_home}: no bin/nvcc there"
        raise EnvironmentProblem(msg, "the path is not that of a CUDA toolkit", _elsewhere())
    done = proc.run([nvcc, "--version"], capture=True, error=EnvironmentProblem, timeout=60, what=str(nvcc))
    found = re.search(rb"release (\d+\.\d+)", done.stdout)
    if not found:
        msg = f"{nvcc} --version does not tell a release"
        raise EnvironmentProblem(msg, "it is not NVIDIA's compiler", _elsewhere())
    return found[1].decode()


def nvcc_architectures(cuda_home: Path) -> list[str]:
    """Compute capabilities that this nvcc compiles for, such as 80 or 90a."""
    cmd: proc.Command = [cuda_home / "bin" / "nvcc", "--list-gpu-arch"]
    done = proc.run(cmd, capture=True, error=EnvironmentProblem, timeout=60, what="nvcc --list-gpu-arch")
    return re.findall(r"compute_(\d+[a-z]?)", done.stdout.decode("ascii", "replace"))


def check_nvcc(cuda_home: Path) -> None:
    """Compile an empty kernel: nvcc refuses host compilers that are newer than it knows."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <cmath>\n__global__ void Probe() {}\n", encoding="utf-8")
        cmd: proc.Command = [cuda_home / "bin" / "nvcc", "-std=c++17", "-c", source, "-o", source.with_suffix(".o")]
        done = proc.run(cmd, check=False, error=EnvironmentProblem, timeout=120, what="nvcc")
    if done.returncode != 0:
        msg = f"{cuda_home}/bin/nvcc cannot compile an empty kernel"
        lines = "\n".join(f"  | {line}" for line in done.stdout.decode("utf-8", "replace").splitlines()[:8])
        todo = "name a host compiler that this CUDA release supports: -- -DCMAKE_CUDA_HOST_COMPILER=/usr/bin/g++-12"
        raise EnvironmentProblem(msg, f"nvcc says\n{lines}", todo)


def gpu_architectures() -> list[str]:
    """Compute capabilities of the GPUs in this machine, such as 90; empty without a driver."""
    if not shutil.which("nvidia-smi"):
        return []
    cmd = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = proc.run(cmd, capture=True, check=False, timeout=60)
    found = re.findall(r"^(\d+)\.(\d+)\s*$", done.stdout.decode("ascii", "replace"), re.MULTILINE)
    return sorted({major + minor for major, minor in found}, key=int)


def _elsewhere() -> str:
    """The advice that names a toolkit which is there."""
    on_path = shutil.which("nvcc")
    homes = [
        *sorted(USUAL_CUDA_FOLDER.glob("cuda*"), reverse=True),
        *([Path(on_path).parent.parent] if on_path else []),
    ]
    for home in homes:
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return f"try --cuda-home {home}"
    return "install the CUDA toolkit, or give its path"
