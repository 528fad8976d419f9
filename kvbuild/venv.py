"""Virtual environments with hash-pinned packages, and the wheels that fill them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbuild import log, proc, stamps
from kvbuild.config import Config
from kvbuild.errors import EnvironmentProblem, KvBuildError, SourceError
from kvbuild.sync import write_atomically

ISOLATED: dict[str, str | None] = {
    "PYTHONPATH": None,
    "PYTHONHOME": None,
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_USER": None,
    "PIP_TARGET": None,
    "PIP_PREFIX": None,
    "PIP_REQUIRE_VIRTUALENV": None,
    "PIP_NO_BINARY": None,
}
"""Keeps the user's own packages and install targets out; index, proxy and certificate settings stay."""

_PROBE = """
import importlib.util as u, json, os, platform, sys, sysconfig
print(json.dumps(dict(
    version=platform.python_version(), implementation=sys.implementation.name, bits=64 if sys.maxsize > 2**32 else 32,
    machine=platform.machine(), prefix=sys.base_prefix,
    header=os.path.join(sysconfig.get_paths()["include"], "Python.h"),
    venv=u.find_spec("venv") is not None and u.find_spec("ensurepip") is not None,
    free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
)))
"""


@dataclass(frozen=True, kw_only=True)
class PythonInfo:
    version: str
    implementation: str
    bits: int
    machine: str
    prefix: str
    header: str
    """where Python.h must lie"""
    venv: bool
    free_threaded: bool

    @property
    def tag(self) -> str:
        major, minor, *_ = self.version.split(".")
        return f"cp{major}{minor}{'t' if self.free_threaded else ''}"


def probe(python: Path) -> PythonInfo:
    """What the interpreter says of itself. Raises EnvironmentProblem where it does not run."""
    try:
        done = proc.run([python, "-c", _PROBE], capture=True, timeout=60, error=EnvironmentProblem, what=str(python))
    except EnvironmentProblem as exc:
        raise EnvironmentProblem(exc.what, exc.why, "give another interpreter with --python") from exc
    return PythonInfo(**json.loads(done.stdout))


def build_requirements(cfg: Config) -> Path:
    return cfg.data / "build-requirements.txt"


def test_requirements(cfg: Config) -> Path:
    return cfg.data / "test-requirements.txt"


def stock_requirements(cfg: Config) -> Path:
    """The unpatched release of the base."""
    return cfg.series_dir / "stock-requirements.txt"


def build_python(cfg: Config) -> Path:
    """The interpreter of the build environment, whether or not that exists yet."""
    return cfg.work_dir / f"venv-build-{cfg.python_tag}" / "bin" / "python"


def ensure_build_venv(cfg: Config, log_path: Path) -> Path:
    """The environment with the pinned tools; returns its interpreter."""
    return ensure(cfg, build_python(cfg).parent.parent, [build_requirements(cfg)], log_path)


def ensure(
    cfg: Config, folder: Path, requirements: Sequence[Path], log_path: Path, *, wheels: Sequence[Path] = ()
) -> Path:
    """An environment with exactly these requirements and local `wheels`; made anew unless it is the recorded one."""
    python = folder / "bin" / "python"
    stamp = folder / "kvbuild.json"
    digest = stamps.digest_of(
        {
            "python": [str(cfg.python), stamps.file_id(cfg.python)],
            "requirements": [path.read_text(encoding="utf-8") for path in requirements],
            "wheels": [[str(path), stamps.file_id(path)] for path in wheels],
        }
    )
    known = stamps.load(stamp)
    if known and known.digest == digest and python.exists():
        return python
    log.info(f"  creating the environment {folder.name}")
    shutil.rmtree(folder, ignore_errors=True)
    # Not prepared aside and moved: the scripts of an environment carry its path.
    cmd: proc.Command = [cfg.python, "-m", "venv", folder]
    proc.run(cmd, env=ISOLATED, log=log_path, error=EnvironmentProblem, what="python -m venv")
    for path in requirements:
        _install(cfg, python, path, log_path)
    if wheels:
        _pip(python, ["install", "--no-index", "--no-deps", *wheels], log_path, EnvironmentProblem)
    stamps.save(stamp, stamps.Stamp(digest=digest, seconds=0))
    return python


def download_wheels(cfg: Config, python: Path, requirements: Path, log_path: Path) -> None:
    """Bring every wheel of a pinned list into WORK/wheels, so that installing needs no network."""
    done = _wheels(cfg) / f".{requirements.name}.{cfg.python_tag}"
    digest = stamps.digest_files(requirements.parent, [requirements])
    if done.exists() and done.read_text(encoding="utf-8") == digest:
        return
    log.info(f"  fetching the packages of {requirements.name}")
    _wheels(cfg).mkdir(parents=True, exist_ok=True)
    args: list[str | Path] = ["download", *_PINNED, *_links(cfg), "--dest", _wheels(cfg), "-r", requirements]
    if not cfg.mirrors or _pip(python, [*args, "--no-index"], log_path, None) != 0:
        _pip(python, args, log_path, SourceError)
    write_atomically(done, digest.encode())


_PINNED = ("--require-hashes", "--no-deps", "--only-binary=:all:")


def _install(cfg: Config, python: Path, requirements: Path, log_path: Path) -> None:
    download_wheels(cfg, python, requirements, log_path)
    args = ["install", "--no-index", *_PINNED, *_links(cfg), "-r", requirements]
    _pip(python, args, log_path, EnvironmentProblem)


def _wheels(cfg: Config) -> Path:
    return cfg.work_dir / "wheels"


def _links(cfg: Config) -> list[str | Path]:
    """Local folders first: what lies there is not downloaded again."""
    return [part for folder in (*cfg.mirrors, _wheels(cfg)) for part in ("--find-links", folder)]


def _pip(python: Path, args: Sequence[str | Path], log_path: Path, error: type[KvBuildError] | None) -> int:
    cmd = [python, "-m", "pip", args[0], "--no-input", "--disable-pip-version-check", *args[1:]]
    what = f"pip {args[0]}"
    done = proc.run(cmd, env=ISOLATED, log=log_path, check=error is not None, error=error or SourceError, what=what)
    return done.returncode
