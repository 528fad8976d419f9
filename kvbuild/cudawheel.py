"""What the CUDA provider in a wheel must be: code for the GPUs that were asked for, libraries that users have."""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbuild import proc, sharedlib
from kvbuild.errors import BuildError

PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
_SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux-[\w-]+)\.so\.\d+")
_CUDA = re.compile(r"lib(cudart|cublas|cublasLt|curand|cufft|cudnn(_\w+)?|nvrtc)\.so\.\d+")
_PACKAGES_OF_CUDA_12 = ("cublas", "cuda_nvrtc", "cuda_runtime", "cudnn", "cufft", "curand")

_GIVEN_BY_HOST = "Provider_GetHost"
"""ONNX Runtime's own library has it and is loaded first."""
_UNRESOLVED = re.compile(r"undefined symbol: (\S+)|(\S+) => not found")


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


@contextmanager
def unpacked(wheel: Path, scratch: Path) -> Iterator[Path]:
    """The provider library of the wheel, as a file for a while. Raises BuildError where there is none."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="provider-") as folder, zipfile.ZipFile(wheel) as archive:
        if PROVIDER not in archive.namelist():
            msg = f"{wheel.name} has no {PROVIDER}"
            raise BuildError(msg, "it was packed before the provider was linked", "run again with --from build")
        yield Path(archive.extract(PROVIDER, folder))


def check(path: Path, target: Target) -> str:
    """Look into the provider library; returns what device code it holds. Raises BuildError."""
    library = sharedlib.inspect(path)
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


def check_symbols(path: Path, target: Target) -> None:
    """No symbol may be missing. The library is not run: loading it needs NVIDIA's driver."""
    env = {"LD_LIBRARY_PATH": str(target.toolkit / "lib64")}
    done = proc.run(["ldd", "-r", path], env=env, capture=True, check=False)
    found = (match[1] or match[2] for match in _UNRESOLVED.finditer(done.stdout.decode("utf-8", "replace")))
    missing = sorted(set(found) - {_GIVEN_BY_HOST})
    if missing or done.returncode != 0:
        msg = f"the CUDA provider does not load, it lacks {', '.join(missing[:5]) or 'something'}"
        why = "a source that defines the symbol was left out, or a library is missing"
        raise BuildError(msg, why, f"see ldd -r {path.name}, with LD_LIBRARY_PATH={env['LD_LIBRARY_PATH']}")


def _listed(code: frozenset[str]) -> str:
    return ", ".join(sorted(code, key=lambda name: (int(name.rpartition("_")[2]), name))) or "no GPU"
