"""Everything that can be found out in seconds, before anything that takes minutes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from kvbuild import configure, debian, deps, log, ninja, proc, stamps, toolchain, toolkit, venv, wheel
from kvbuild.config import Base, Config
from kvbuild.errors import EnvironmentProblem, KvBuildError
from kvbuild.git import MIN_VERSION as MIN_GIT
from kvbuild.source import fetch_digest, sources_reachable

DISK_GIB = {"cpu": 6, "cuda": 20}
"""Work directory at its fullest, with logs and test environments."""
MIN_MEMORY_GIB = 3
"""One compiler job and the link of the native library."""
_EXAMINED = ("work_dir", "source", "mirrors", "cuda_home", "cudnn_home", "cuda_arch", "python", "profile")
"""Options that a check looks at."""
_UNSAFE = set(":;\"'$`\\\n")
"""Characters that CMake lists, search paths or ninja files take for their own."""


def digest(cfg: Config, base: Base) -> str:
    """Changes with the options, the compilers and the sources; then the machine is examined again."""
    return stamps.digest_of(
        {
            "options": [str(getattr(cfg, name)) for name in _EXAMINED],
            "python": stamps.file_id(cfg.python),
            "compilers": configure.compilers(cfg.cuda_home),
            "source": fetch_digest(cfg, base),
            "dependencies": deps.inputs_digest(cfg),
        }
    )


def examine(cfg: Config, base: Base) -> None:
    """Print what was found. All problems are collected; one alone is raised as it is, several as EnvironmentProblem."""
    problems: list[KvBuildError] = []
    for check in (_platform, _git, _python, _compiler, _resources, _cuda, _sources, _second_runtime):
        try:
            for line in check(cfg, base):
                log.info(f"  {line}")
        except KvBuildError as exc:
            problems.append(exc)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1))
        msg = f"this machine cannot build yet: {len(problems)} problems\n{listed}"
        raise EnvironmentProblem(msg)


def _platform(cfg: Config, base: Base) -> Iterator[str]:
    if sys.platform != "linux":
        msg = f"kvbuild runs on Linux, not on {sys.platform}"
        raise EnvironmentProblem(msg, todo="use a Linux machine or container")
    found = sorted(_UNSAFE & set(str(cfg.work_dir)))
    if found:
        msg = f"the work directory's path contains {' '.join(map(repr, found))}"
        raise EnvironmentProblem(msg, "CMake and the compiler cannot be given such a path", "give another --work-dir")
    for mirror in cfg.mirrors:
        yield f"mirror: {mirror} ({sum(1 for _ in mirror.iterdir())} entries)"
    yield f"work directory: {cfg.work_dir}"


def _git(cfg: Config, base: Base) -> Iterator[str]:
    if not shutil.which("git"):
        msg = "git is not installed"
        raise EnvironmentProblem(msg, todo="install it, on Debian or Ubuntu with: apt install git")
    done = proc.run(["git", "--version"], capture=True, timeout=30, error=EnvironmentProblem)
    text = done.stdout.decode().split()[2]
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if version < MIN_GIT:
        msg = f"git {text} is too old"
        raise EnvironmentProblem(msg, todo=f"install git {'.'.join(map(str, MIN_GIT))} or later")
    yield f"git: {text}"


def _python(cfg: Config, base: Base) -> Iterator[str]:
    info = venv.probe(cfg.python)
    apt_name = f"python{'.'.join(info.version.split('.')[:2])}"
    version, lowest, highest = (_minor(text) for text in (info.version, base.python_min, base.python_max))
    if not lowest <= version <= highest or info.implementation != "cpython" or info.bits != 64 or info.free_threaded:
        kind = f"{info.implementation} {info.version}{' free-threaded' if info.free_threaded else ''}, {info.bits} bit"
        msg = f"--python {cfg.python} is {kind}"
        why = f"{base.name} is built for 64-bit CPython {base.python_min} to {base.python_max}"
        raise EnvironmentProblem(msg, why, "choose another interpreter with --python")
    if not info.venv:
        msg = f"{cfg.python} has no venv or ensurepip module"
        raise EnvironmentProblem(msg, "the distribution packs them apart", f"apt install {apt_name}-venv")
    if not Path(info.header).exists():
        msg = f"{cfg.python}: {info.header} is missing"
        raise EnvironmentProblem(msg, "the interpreter's headers are not installed", f"apt install {apt_name}-dev")
    yield f"python: {info.version} at {cfg.python}, headers present"


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _compiler(cfg: Config, base: Base) -> Iterator[str]:
    yield f"compiler: {toolchain.check_cxx(Path(venv.probe(cfg.python).header))}"
    cache = configure.compiler_cache()
    yield f"compiler cache: {cache or 'none (ccache would make later builds quicker)'}"


def _resources(cfg: Config, base: Base) -> Iterator[str]:
    folder = next(path for path in (cfg.work_dir, *cfg.work_dir.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        msg = f"{folder} is not writable"
        raise EnvironmentProblem(msg, todo="give another --work-dir")
    free = shutil.disk_usage(folder).free / ninja.GIB
    used = 0.0
    if cfg.build_dir.exists():  # a build that is there already has its space
        used = sum(path.lstat().st_size for path in cfg.build_dir.rglob("*.o")) / ninja.GIB
    needed = DISK_GIB["cuda" if cfg.cuda_home else "cpu"]
    if free + used < needed:
        msg = f"{free:.1f} GiB are free at {folder}, a build takes up to {needed}"
        raise EnvironmentProblem(msg, todo="free some space, or give --work-dir on a larger disk")
    memory = ninja.available_memory() / ninja.GIB
    if memory < MIN_MEMORY_GIB:
        msg = f"{memory:.1f} GiB of memory are available, one compiler job needs {MIN_MEMORY_GIB}"
        raise EnvironmentProblem(msg, todo="end other programs, or add memory or swap space")
    yield f"disk: {free:.0f} GiB free; memory: {memory:.0f} GiB available; jobs: {ninja.default_jobs(cfg)}"


def _cuda(cfg: Config, base: Base) -> Iterator[str]:
    if not cfg.cuda_home:
        return
    version = toolchain.nvcc_version(cfg.cuda_home)
    if not _minor(base.cuda_min) <= _minor(version) <= _minor(base.cuda_max):
        msg = f"--cuda-home {cfg.cuda_home} is CUDA {version}"
        why = f"{base.name} is known to build with {base.cuda_min} to {base.cuda_max}"
        if not cfg.force:
            raise EnvironmentProblem(msg, why, "give another toolkit, or --force to try this one")
        log.warn(f"{msg}; {why}; going on because of --force")
    toolchain.check_nvcc(cfg.cuda_home)
    yield f"nvcc: {version} at {cfg.cuda_home}"
    if cfg.cudnn_home:
        yield f"cuDNN: {toolkit.cudnn_version(cfg.cudnn_home)} at {cfg.cudnn_home}"
    toolkit.check_available(cfg, cfg.cuda_home, version)
    fetched = [f"{lib.name} {lib.version}" for lib in toolkit.missing_libraries(cfg, cfg.cuda_home)]
    if fetched:
        yield f"added to the CUDA tree: {', '.join(fetched)}"
    yield f"architectures: {toolkit.architectures(cfg, cfg.cuda_home)}"


def _sources(cfg: Config, base: Base) -> Iterator[str]:
    yield f"source: {sources_reachable(cfg, base)}"
    missing = deps.missing_downloads(cfg)
    if missing:
        reason = debian.unavailable()
        yield f"to download: {', '.join(missing)}" + (f" ({reason}: from upstream's addresses)" if reason else "")


def _second_runtime(cfg: Config, base: Base) -> Iterator[str]:
    """The wheel is meant to be installed somewhere: say so where it would meet another."""
    found = wheel.second_runtime(cfg.python)
    if found:
        log.warn(
            f"{cfg.python} already has {', '.join(found)}; packages of ONNX Runtime overwrite each other's files: "
            "uninstall it before installing the new wheel there, or use a fresh environment"
        )
    yield from ()
