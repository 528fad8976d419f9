"""One CUDA tree for CMake: nvcc's own toolkit, plus the libraries that it lacks, as symbolic links."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvbuild import archive, log, stamps, toolchain
from kvbuild.config import Config, read_toml
from kvbuild.download import Pin, obtain, pip_route
from kvbuild.errors import EnvironmentProblem, UsageError

MIN_CUDNN = 9
DEFAULT_ARCH = "80-real;90"
"""Compiled for when no GPU is in the machine and none is named: later GPUs translate the PTX of the last."""
_ARCH = re.compile(r"(\d{2,3}[af]?)(-real|-virtual)?")
_LIB_FOLDERS = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_VERSIONED = re.compile(r"(lib[^.]+\.so)\.[\d.]+")


@dataclass(frozen=True, kw_only=True)
class Library:
    """A table of cuda-libraries.toml, which explains the fields."""

    name: str
    cuda: int
    header: str
    library: str
    package: str
    version: str
    file: str
    sha256: str


def missing_libraries(cfg: Config, cuda_home: Path) -> list[Library]:
    """Components that neither the toolkit nor --cudnn-home has."""
    homes = [cuda_home, *([cfg.cudnn_home] if cfg.cudnn_home else [])]
    tables = read_toml(cfg.data / "cuda-libraries.toml")
    known = [Library(name=name, **table) for name, table in tables.items()]
    return [lib for lib in known if not any(_has(home, lib) for home in homes)]


def check_available(cfg: Config, cuda_home: Path, version: str) -> None:
    """Raises EnvironmentProblem where a missing component is not pinned for this CUDA release and processor."""
    unserved = [
        lib.name
        for lib in missing_libraries(cfg, cuda_home)
        if lib.cuda != int(version.split(".")[0]) or platform.machine() != "x86_64"
    ]
    if unserved:
        msg = f"--cuda-home {cuda_home} (CUDA {version}) lacks {', '.join(unserved)}"
        why = "the pinned packages are for CUDA 13 on x86_64"
        raise EnvironmentProblem(msg, why, "install the full toolkit, and cuDNN (--cudnn-home), from NVIDIA")


def cudnn_version(home: Path) -> str:
    """Such as 9.13. Raises EnvironmentProblem where there is no cuDNN, or one that is too old."""
    header = home / "include" / "cudnn_version.h"
    text = header.read_text(encoding="utf-8", errors="replace") if header.is_file() else ""
    numbers = re.findall(r"#define CUDNN_(?:MAJOR|MINOR) (\d+)", text)
    if len(numbers) < 2 or not any((home / folder / "libcudnn.so.9").exists() for folder in _LIB_FOLDERS):
        if len(numbers) >= 2 and int(numbers[0]) < MIN_CUDNN:
            msg = f"{home}: cuDNN {numbers[0]}.{numbers[1]}, needed is {MIN_CUDNN} or later"
            raise EnvironmentProblem(msg, todo="install cuDNN 9, or leave --cudnn-home out to get the pinned one")
        msg = f"{home}: no include/cudnn_version.h with lib/libcudnn.so.9"
        raise EnvironmentProblem(msg, "it is not the root of a cuDNN installation", "leave --cudnn-home out")
    return f"{numbers[0]}.{numbers[1]}"


def architectures(cfg: Config, cuda_home: Path) -> str:
    """CMAKE_CUDA_ARCHITECTURES: --cuda-arch, else the GPUs of this machine, else DEFAULT_ARCH.

    Only real code for GPUs that are here: code for every architecture is slow to build and over a gigabyte large.
    """
    if not cfg.cuda_arch:
        present = toolchain.gpu_architectures()
        return ";".join(f"{arch}-real" for arch in present) or DEFAULT_ARCH
    wanted = re.split("[;,]", cfg.cuda_arch)
    supported = toolchain.nvcc_architectures(cuda_home)
    for arch in wanted:
        match = _ARCH.fullmatch(arch)
        if not match:
            msg = f"--cuda-arch {cfg.cuda_arch}: {arch!r} is not an architecture"
            raise UsageError(msg, todo="write it as 90, 90-real or 80;90-real")
        if match[1].rstrip("af") not in {known.rstrip("af") for known in supported}:
            msg = f"--cuda-arch {arch}: this nvcc does not compile for it"
            raise UsageError(msg, f"it knows {', '.join(supported)}", "choose one of these, or another toolkit")
    return ";".join(wanted)


def prepare(cfg: Config, cuda_home: Path, pip_python: Path) -> Path:
    """Build the tree, fetching what is missing; returns its root. A finished tree is taken as it is."""
    missing = missing_libraries(cfg, cuda_home)
    digest = stamps.digest_of(
        {
            "nvcc": [str(cuda_home), stamps.file_id(cuda_home / "bin" / "nvcc")],
            "cudnn": str(cfg.cudnn_home),
            "wheels": [lib.sha256 for lib in missing],
        }
    )
    target = cfg.work_dir / f"cuda-{digest[:12]}"
    if target.is_dir():
        return target
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    roots = [cuda_home, *([cfg.cudnn_home] if cfg.cudnn_home else [])]
    for lib in missing:
        log.info(f"  adding {lib.name} {lib.version} to the CUDA tree")
        pin = Pin(file=lib.file, digest=lib.sha256)
        wheel = obtain(cfg, pin, [pip_route(cfg, pip_python, f"{lib.package}=={lib.version}", pin, [])])
        archive.unpack(wheel, part / "wheels" / lib.name, strip=2)
        roots.append(Path("wheels") / lib.name)
    link_tree(part, roots)
    part.rename(target)
    return target


def link_tree(tree: Path, roots: Iterable[Path]) -> None:
    """Fill `tree` with links to the files of `roots`: the first to have a name wins. Relative roots lie in `tree`."""
    first, *others = roots
    for entry in sorted(first.iterdir()):
        if entry.name not in ("bin", "include", "lib", "lib64", "targets"):
            (tree / entry.name).symlink_to(entry)
    # nvcc takes the folder that it was called from as its home, so its own links must lie in the tree.
    _link_files(first / "bin", tree / "bin")
    for root in (first, *others):
        _link_files(tree / root / "include", tree / "include")
        for folder in _LIB_FOLDERS:
            _link_files(tree / root / folder, tree / "lib64")
    for library in list((tree / "lib64").iterdir()):
        match = _VERSIONED.fullmatch(library.name)  # the linker looks for names without a version
        if match and not (tree / "lib64" / match[1]).exists():
            (tree / "lib64" / match[1]).symlink_to(library.name)
    (tree / "lib").symlink_to("lib64")
    for platform_folder in (first / "targets").glob("*"):
        own = tree / "targets" / platform_folder.name
        own.mkdir(parents=True)
        (own / "include").symlink_to("../../include")
        (own / "lib").symlink_to("../../lib64")


def _link_files(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    if not source.is_dir():
        return
    for entry in sorted(source.iterdir()):
        link = target / entry.name
        if not link.is_symlink():
            inside = source.is_relative_to(target.parent)
            link.symlink_to(Path("..") / entry.relative_to(target.parent) if inside else entry.resolve())


def _has(home: Path, lib: Library) -> bool:
    found = any((home / folder / lib.library).exists() for folder in _LIB_FOLDERS)
    versioned = found or any(any((home / folder).glob(f"{lib.library}.*")) for folder in _LIB_FOLDERS)
    return versioned and (home / "include" / lib.header).exists()
