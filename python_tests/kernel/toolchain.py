"""Compiles the device code and the tests' entry points into one shared library, one nvcc process per file and core.

An object is kept under the digest of its source, every header it includes, the flags and the compiler: an edit costs
the files that see it, and a run without an edit only a link. KV_QUANT_KERNEL_LIBRARY names a library that was built
elsewhere, KV_QUANT_CUDA_ARCH the architectures (90, 80-virtual, "80;90"; default: the GPU's).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ROOT = REPO / "patches" / "overlay" / "onnxruntime"
KERNELS = ROOT / "contrib_ops" / "cuda" / "bert" / "kv_cache_quant"
NATIVE = Path(__file__).parent / "native"
LIBRARY_VARIABLE = "KV_QUANT_KERNEL_LIBRARY"
ARCH_VARIABLE = "KV_QUANT_CUDA_ARCH"
# Includes the framework's headers.
GLUE = "gqa_cuda.cc"
WARNINGS = ("-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra")
COMMON = ("-std=c++17", "-O3", "-lineinfo", "-Xcompiler", "-fPIC", f"-I{ROOT}", *WARNINGS)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Compiler:
    """nvcc and the architectures it compiles for, as CMake names them."""

    nvcc: Path
    architectures: tuple[str, ...]

    @property
    def targets(self) -> list[str]:
        """-gencode options. A plain number is machine code, NN-virtual PTX that the driver compiles."""
        options = []
        for name in self.architectures:
            number, _, kind = name.partition("-")
            code = f"compute_{number}" if kind == "virtual" else f"sm_{number}"
            options += ["-gencode", f"arch=compute_{number},code={code}"]
        return options


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, of /usr/local/cuda, or of PATH."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    candidates = [home / "bin" / "nvcc" for home in homes if (home / "bin" / "nvcc").is_file()]
    on_path = shutil.which("nvcc")
    return candidates[0] if candidates else Path(on_path) if on_path else None


@lru_cache(maxsize=1)
def gpu_architecture() -> str | None:
    """Compute capability of device 0 from the driver, such as 90; None without a driver or a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    major, minor, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for number, attribute in ((major, 75), (minor, 76)):
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
    return f"{major.value}{minor.value}"


def architectures() -> tuple[str, ...]:
    """What to compile for: the environment's choice, else the GPU of this machine. Raises RuntimeError for neither."""
    chosen = os.environ.get(ARCH_VARIABLE, "").replace(",", ";").split(";")
    named = tuple(name.strip() for name in chosen if name.strip())
    present = gpu_architecture()
    if not named and present is None:
        msg = f"no GPU here; name the architecture to compile for: {ARCH_VARIABLE}=90"
        raise RuntimeError(msg)
    return named or (str(present),)


def kernel_sources() -> list[Path]:
    """The files of the device code, without the glue."""
    found = [path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cc") and path.name != GLUE]
    return sorted(found)


def library_sources() -> list[Path]:
    """Everything the library is made of."""
    return [*kernel_sources(), *sorted(NATIVE.glob("*.c[cu]"))]


def included(source: Path) -> list[Path]:
    """The source and all headers of this repository that it includes, directly or not."""
    seen: dict[Path, None] = {source: None}
    queue = [source]
    while queue:
        for name in INCLUDE.findall(queue.pop().read_text(encoding="utf-8")):
            header = ROOT / name
            if header.is_file() and header not in seen:
                seen[header] = None
                queue.append(header)
    return sorted(seen)


def digest(*parts: str | Path) -> str:
    """Of texts and of files' contents with their names."""
    state = hashlib.sha256()
    for part in parts:
        data = f"{part.name}\0".encode() + part.read_bytes() if isinstance(part, Path) else part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:20]


def sources_digest() -> str:
    """Of all sources and headers of the library."""
    return digest(*dict.fromkeys(path for source in library_sources() for path in included(source)))


@lru_cache(maxsize=4)
def _version(nvcc: Path) -> str:
    return subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout


def _compile(compiler: Compiler, source: Path, folder: Path) -> tuple[Path, bool]:
    """The object of one source and whether it had to be compiled. Raises RuntimeError with the compiler's text."""
    flags = [*COMMON, *compiler.targets]
    name = digest(_version(compiler.nvcc), " ".join(flags), *included(source))
    target = folder / f"{source.stem}-{name}.o"
    if target.exists():
        return target, False
    partial = target.with_suffix(f".{os.getpid()}.partial.o")
    cmd = [str(compiler.nvcc), *flags, "-c", str(source), "-o", str(partial)]
    done = subprocess.run(cmd, check=False, capture_output=True, text=True)
    if done.returncode:
        partial.unlink(missing_ok=True)
        msg = f"{source.relative_to(REPO)} does not compile:\n{done.stdout}{done.stderr}"
        raise RuntimeError(msg)
    partial.replace(target)
    return target, True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One build at a time: test processes that run side by side wait for the first."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(folder: Path | None = None, compiler: Compiler | None = None) -> Path:
    """The library, compiled as far as needed. Raises RuntimeError where nvcc is missing or a file does not compile."""
    folder = folder or REPO / ".work" / "kernel-tests"
    if compiler is None:
        nvcc = find_nvcc()
        if nvcc is None:
            msg = "no nvcc: set CUDA_HOME, or KV_QUANT_KERNEL_LIBRARY to a library built elsewhere"
            raise RuntimeError(msg)
        compiler = Compiler(nvcc, architectures())
    with _locked(folder):
        begin = time.monotonic()
        sources = library_sources()
        # The largest files first, so that none of them is left for the end.
        order = sorted(sources, key=lambda path: -sum(p.stat().st_size for p in included(path)))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            results = list(pool.map(lambda source: _compile(compiler, source, folder), order))
        objects = [str(path) for path, _ in results]
        library = folder / f"kernels-{digest(*sorted(objects), sources_digest())}.so"
        if not library.exists():
            _link(compiler, objects, library)
        compiled = sum(fresh for _, fresh in results)
        print(f"{library}: {compiled} of {len(sources)} files compiled, {time.monotonic() - begin:.1f} s")
    return library


def _link(compiler: Compiler, objects: list[str], library: Path) -> None:
    """The C++ and CUDA runtimes go into the library, so that it runs on a machine with the driver alone."""
    stamp = library.with_suffix(".stamp.cc")
    stamp.write_text(f'extern "C" const char* kvq_sources() {{ return "{sources_digest()}"; }}\n', encoding="utf-8")
    partial = library.with_suffix(f".{os.getpid()}.partial")
    static = ["-cudart", "static", "-Xlinker", "--no-undefined", "-Xcompiler", "-static-libstdc++,-static-libgcc"]
    cmd = [compiler.nvcc, *compiler.targets, "-shared", "-Xcompiler", "-fPIC", *static, *objects, stamp]
    done = subprocess.run([*map(str, cmd), "-o", str(partial)], check=False, capture_output=True, text=True)
    if done.returncode:
        msg = f"the library does not link:\n{done.stdout}{done.stderr}"
        raise RuntimeError(msg)
    partial.replace(library)


def main() -> int:
    """python -m python_tests.kernel.toolchain [--copy-to FILE]: build the library, say where it is."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--copy-to", type=Path, help=f"copy it there, to carry it along as {LIBRARY_VARIABLE}")
    arguments = parser.parse_args()
    try:
        library = build()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.copy_to:
        arguments.copy_to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, arguments.copy_to)
        print(arguments.copy_to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
