"""The CMake command of a build, and what it depends on."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbuild import cudawheel, log, operators, proc, stamps, venv
from kvbuild.config import Base, Config
from kvbuild.errors import BuildError
from kvbuild.toolchain import find_compiler

_FLAG_VARIABLES = ("CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "CC", "CXX", "CUDAHOSTCXX", "CMAKE_PREFIX_PATH")
"""Variables of the user's that CMake reads."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What earlier stages hand over."""

    dependencies: Mapping[str, str]
    """CMake variable -> folder"""
    patchset: str
    """first 12 hex digits of the patch set's digest; goes into the wheel's build info"""
    cuda: cudawheel.Target | None = None


def command(cfg: Config, base: Base, inputs: Inputs) -> list[str | Path]:
    """cmake with every option. The user's own, after `--`, come last and win."""
    tools = venv.build_python(cfg).parent
    options: dict[str, str | Path] = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        # Every dependency is on disk and named below: nothing is searched on the machine, nothing fetched.
        "FETCHCONTENT_FULLY_DISCONNECTED": "ON",
        "FETCHCONTENT_TRY_FIND_PACKAGE_MODE": "NEVER",
        **inputs.dependencies,
        "CMAKE_PROJECT_onnxruntime_INCLUDE": cfg.data / "precompile.cmake",
        "CMAKE_PCH_WARN_INVALID": "OFF",
        "KVQ_PYBIND11_DIR": _pybind11(cfg),
        "KVQ_PATCHSET": inputs.patchset,
        "KVQ_REVISION": str(base.revision),
        "KVQ_PROFILE": cfg.profile,
        "Python_EXECUTABLE": venv.build_python(cfg),
        "PYTHON_EXECUTABLE": venv.build_python(cfg),
        "onnxruntime_ENABLE_PYTHON": "ON",
        "onnxruntime_ENABLE_CPUINFO": "ON",
        "onnxruntime_BUILD_UNIT_TESTS": "OFF",
        "onnxruntime_BUILD_SHARED_LIB": "OFF",
        "onnxruntime_USE_FULL_PROTOBUF": "OFF",
        # The commit would go into a header that nearly every file includes: each change of a patch, a full rebuild.
        "CMAKE_DISABLE_FIND_PACKAGE_Git": "ON",
        # The schema compiler is for changing ORT's file format; its generated headers are part of the source.
        "FLATBUFFERS_BUILD_FLATC": "OFF",
        # Some of MLAS's assembly files lack the note that says so; glibc 2.41 refuses what asks for such a stack.
        "CMAKE_MODULE_LINKER_FLAGS": "-Wl,-z,noexecstack",
        "CMAKE_SHARED_LINKER_FLAGS": "-Wl,-z,noexecstack",
        # A decoder-only model has no classical machine-learning operators.
        "onnxruntime_DISABLE_ML_OPS": "ON" if cfg.profile == "decoder" else "OFF",
        "onnxruntime_REDUCED_OPS_BUILD": "ON" if cfg.profile == "decoder" else "OFF",
    }
    launcher = compiler_cache()
    if launcher:
        options |= {"CMAKE_C_COMPILER_LAUNCHER": launcher, "CMAKE_CXX_COMPILER_LAUNCHER": launcher}
    if inputs.cuda:
        options |= _cuda_options(inputs.cuda, launcher)
        if cfg.profile == "decoder":
            options |= _decoder_cuda_options(inputs.cuda.architectures)
    flags = [f"-D{name}={value}" for name, value in options.items()]
    return [tools / "cmake", "-S", cfg.src / "cmake", "-B", cfg.build_dir, "-G", "Ninja", *flags, *cfg.cmake_args]


def environment(cfg: Config) -> dict[str, str | None]:
    """For cmake and ninja: the pinned tools first on the path, and compiler cache keys that another clone shares."""
    path = f"{venv.build_python(cfg).parent}:{os.environ.get('PATH', os.defpath)}"
    # Paths below the base directory are hashed relative to the build directory, which is at the same depth everywhere.
    # The sloppiness is what ccache asks for before it accepts a precompiled header.
    sloppy = "pch_defines,time_macros"
    cache = {"CCACHE_BASEDIR": str(cfg.work_dir), "CCACHE_NOHASHDIR": "1", "CCACHE_SLOPPINESS": sloppy}
    return {**venv.ISOLATED, **cache, "PATH": path}


def run(cfg: Config, base: Base, inputs: Inputs, log_path: Path) -> None:
    """Configure from scratch while keeping objects: ninja rebuilds what another command line or header asks for."""
    if cfg.profile == "decoder":
        operators.reduce(cfg, venv.build_python(cfg), environment(cfg), log_path)
    # Options of an earlier run must not survive in the cache. (cmake --fresh would delete the objects as well.)
    (cfg.build_dir / "CMakeCache.txt").unlink(missing_ok=True)
    for detected in cfg.build_dir.glob("CMakeFiles/[0-9]*"):
        shutil.rmtree(detected)
    cmd = command(cfg, base, inputs)
    try:
        proc.run(cmd, env=environment(cfg), log=log_path, on_line=_show, what="cmake")
    except BuildError as exc:
        raise BuildError(exc.what, _first_error(log_path) or exc.why, exc.todo) from exc


def digest(cfg: Config, base: Base, inputs: Inputs, source_names: str) -> str:
    """Changes with the command, the compilers, and the set of source files, which upstream's CMake files glob."""
    return stamps.digest_of(
        {
            "command": [str(part) for part in command(cfg, base, inputs)],
            "tools": venv.build_requirements(cfg).read_text(encoding="utf-8"),
            "compilers": compilers(inputs.cuda.toolkit if inputs.cuda else None),
            "variables": {name: os.environ.get(name) for name in _FLAG_VARIABLES},
            "names": source_names,
            "precompiled": (cfg.data / "precompile.cmake").read_text(encoding="utf-8"),
            "operators": operators.configuration(cfg).read_text(encoding="utf-8") if cfg.profile == "decoder" else "",
        }
    )


def compiler_cache() -> str | None:
    """ccache or sccache, by name: its path may differ between machines that share a build directory."""
    return next((name for name in ("ccache", "sccache") if shutil.which(name)), None)


def compilers(toolkit: Path | None) -> dict[str, list[object]]:
    """The compilers that CMake will find, with what tells an update of one apart."""
    found = [find_compiler("CC"), find_compiler("CXX"), toolkit and toolkit / "bin" / "nvcc"]
    return {str(path): [str(path.resolve()), *stamps.file_id(path)] for path in found if path}


def _cuda_options(cuda: cudawheel.Target, launcher: str | None) -> dict[str, str | Path]:
    options: dict[str, str | Path] = {
        "onnxruntime_USE_CUDA": "ON",
        "onnxruntime_CUDA_HOME": cuda.toolkit,
        "onnxruntime_CUDNN_HOME": cuda.toolkit,
        "CUDAToolkit_ROOT": cuda.toolkit,
        "CMAKE_CUDA_COMPILER": cuda.toolkit / "bin" / "nvcc",
        "CMAKE_CUDA_ARCHITECTURES": cuda.architectures,
        # The libraries go from the build directory into the wheel as they are.
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": ";".join(cudawheel.runpath(cuda.version)),
        # 0 would mean one thread per processor in each of ninja's jobs, each with gigabytes of its own.
        "onnxruntime_NVCC_THREADS": "1",
    }
    return options | ({"CMAKE_CUDA_COMPILER_LAUNCHER": launcher} if launcher else {})


def _decoder_cuda_options(architectures: str) -> dict[str, str | Path]:
    """Kernels that a language model does not need: convolutions in NHWC, and other ways to compute attention."""
    # Flash attention asks for compute capability 8.0 to 9.0; elsewhere GroupQueryAttention needs the other kernel.
    flash_everywhere = all(re.fullmatch(r"(8\d|90)a?-real", arch) for arch in architectures.split(";"))
    return {
        "onnxruntime_USE_CUDA_NHWC_OPS": "OFF",
        "onnxruntime_USE_LEAN_ATTENTION": "OFF",
        "onnxruntime_USE_MEMORY_EFFICIENT_ATTENTION": "OFF" if flash_everywhere else "ON",
    }


def _pybind11(cfg: Config) -> Path:
    root = venv.build_python(cfg).parent.parent
    major, minor = cfg.python_tag[2:3], cfg.python_tag[3:].rstrip("t")
    return root / "lib" / f"python{major}.{minor}" / "site-packages" / "pybind11"


def _show(line: str) -> None:
    if line.startswith(("CMake Error", "CMake Warning at")):
        log.debug(f"  {line}")


def _first_error(log_path: Path) -> str:
    """CMake goes on after an error, so the first one says more than the last lines."""
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("CMake Error")]
    if not starts:
        return ""
    return "cmake says\n" + "\n".join(f"  | {line}" for line in lines[starts[0] : starts[0] + 12])
