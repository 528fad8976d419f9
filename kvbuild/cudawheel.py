"""What the CUDA provider in a wheel must be: code for the GPUs that were asked for, libraries that users have."""

from __future__ import annotations

import re
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvbuild import proc, sharedlib, venv
from kvbuild.errors import BuildError

PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
_SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux-[\w-]+)\.so\.\d+")
_CUDA = re.compile(r"lib(cudart|cublas|cublasLt|curand|cufft|cudnn(_\w+)?|nvrtc)\.so\.\d+")
_PACKAGES_OF_CUDA_12 = ("cublas", "cuda_nvrtc", "cuda_runtime", "cudnn", "cufft", "curand")

# Whatever asks for a device makes ONNX Runtime load the provider, which itself cannot be loaded without its host.
_LOAD = """
import numpy, onnxruntime, pathlib
try:
    onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros(1, numpy.float32), "cuda", 0)
except Exception:
    pass
print("libonnxruntime_providers_cuda.so" in pathlib.Path("/proc/self/maps").read_text())
"""

_NO_DRIVER = "CUDADriverWrapper::CUDADriverWrapper()"
"""Named when a constructor of the library finds no driver and ends the process: every symbol was found before."""


@dataclass(frozen=True, kw_only=True)
class Target:
    version: str
    """of CUDA, such as 13.0"""
    architectures: str
    """CMAKE_CUDA_ARCHITECTURES"""
    toolkit: Path
    """the CUDA tree with all libraries"""


def runpath(cuda_version: str) -> list[str]:
    """Where the provider looks for CUDA: NVIDIA's Python packages beside it. The loader's usual places come after."""
    major = int(cuda_version.split(".")[0])
    folders = ("cu13", "cudnn") if major >= 13 else _PACKAGES_OF_CUDA_12
    return ["$ORIGIN", *(f"$ORIGIN/../../nvidia/{folder}/lib" for folder in folders)]


def check(wheel: Path, target: Target, scratch: Path) -> str:
    """Look into the provider library; returns what device code it holds. Raises BuildError."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="provider-") as folder, zipfile.ZipFile(wheel) as archive:
        if PROVIDER not in archive.namelist():
            msg = f"{wheel.name} has no {PROVIDER}"
            raise BuildError(msg, "it was packed before the provider was linked", "run again with --from build")
        library = sharedlib.inspect(Path(archive.extract(PROVIDER, folder)))
    wanted = sharedlib.requested_code(target.architectures)
    if library.device_code != wanted:
        msg = f"the CUDA provider holds code for {_listed(library.device_code)} instead of {_listed(wanted)}"
        why = "it was linked from objects of another --cuda-arch, or an option after -- changed the architectures"
        raise BuildError(msg, why, "run build.py clean, then build again")
    foreign = [name for name in library.needed if not (_SYSTEM.fullmatch(name) or _CUDA.fullmatch(name))]
    if foreign:
        msg = f"the CUDA provider needs {', '.join(foreign)}, which users do not have"
        raise BuildError(msg, "a library of this machine was linked, or one without a version in its name")
    runtime = f"libcudart.so.{target.version.split('.')[0]}"
    if runtime not in library.needed:
        msg = f"the CUDA provider does not need {runtime}"
        raise BuildError(msg, f"it was not linked with CUDA {target.version}", "run build.py clean, then build again")
    if list(library.runpath) != runpath(target.version):
        msg = f"the CUDA provider looks for libraries in {':'.join(library.runpath) or 'no folder of its own'}"
        raise BuildError(msg, f"expected is {':'.join(runpath(target.version))}", "an option after -- changed the path")
    return _listed(library.device_code)


def check_loads(python: Path, target: Target, folder: Path) -> None:
    """Load the provider in an environment that has the wheel: no symbol may be missing. No GPU is needed."""
    env = {**venv.ISOLATED, "LD_LIBRARY_PATH": str(target.toolkit / "lib64")}
    said: list[str] = []
    done = proc.run([python, "-c", _LOAD], cwd=folder, env=env, capture=True, check=False, on_line=said.append)
    if done.stdout.strip() != b"True" and not any(_NO_DRIVER in line for line in said):
        msg = f"the CUDA provider does not load (exit code {done.returncode})"
        lines = "\n".join(f"  | {line}" for line in said)
        raise BuildError(msg, f"a source was left out that defines a symbol, or a library is missing\n{lines}".rstrip())


def _listed(code: frozenset[str]) -> str:
    return ", ".join(sorted(code, key=lambda name: (int(name.rpartition("_")[2]), name))) or "no GPU"
