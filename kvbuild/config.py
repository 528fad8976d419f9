"""What one run does: the options with every default filled, and the tables that pin each ORT base."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from kvbuild.errors import EnvironmentProblem, SourceError, UsageError

Profile = Literal["full", "decoder"]
STAGES = ("doctor", "fetch", "apply", "configure", "build", "wheel", "test")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Paths are absolute. Nothing behind the command line reads the options again."""

    repo: Path
    base: str
    work_dir: Path
    cache_dir: Path
    source: str = "auto"
    """auto, git, debian, or the path of an unpacked tree or archive"""
    mirrors: tuple[Path, ...] = ()
    cuda_home: Path | None = None
    cudnn_home: Path | None = None
    cuda_arch: str | None = None
    python: Path = Path(sys.executable)
    """the interpreter that the wheel is for"""
    python_tag: str = f"cp{sys.version_info.major}{sys.version_info.minor}"
    jobs: int | None = None
    """None: from cores and memory"""
    profile: Profile = "full"
    first: str = STAGES[0]
    last: str = STAGES[-1]
    force: bool = False
    dry_run: bool = False
    verbosity: int = 0
    cmake_args: tuple[str, ...] = ()
    require_gpu: bool = False
    all_tests: bool = False
    mbox: Path | None = None
    onto: str | None = None
    clean_all: bool = False
    no_source: bool = False
    update_trees: bool = False

    @property
    def base_dir(self) -> Path:
        return self.work_dir / self.base

    @property
    def src(self) -> Path:
        """The git work tree with the patched source."""
        return self.base_dir / "src"

    @property
    def repo_store(self) -> Path:
        """The repository that upstream's source is imported into."""
        return self.base_dir / "git"

    @property
    def variant(self) -> str:
        """What tells two builds of one base apart: profile, device, interpreter."""
        device = "cuda" if self.cuda_home else "cpu"
        return f"{self.profile}-{device}-{self.python_tag}"

    @property
    def build_dir(self) -> Path:
        return self.base_dir / f"build-{self.variant}"

    @property
    def dist_dir(self) -> Path:
        """Where the finished wheel lies."""
        return self.base_dir / f"dist-{self.variant}"

    @property
    def logs(self) -> Path:
        return self.base_dir / "logs"

    @property
    def stamps(self) -> Path:
        return self.base_dir / "stamps"

    @property
    def deps_dir(self) -> Path:
        """Unpacked dependencies, shared by all bases: each folder's name carries its digest."""
        return self.work_dir / "deps"

    @property
    def patches(self) -> Path:
        return self.repo / "patches"

    @property
    def series_dir(self) -> Path:
        return self.patches / self.base

    @property
    def overlay(self) -> Path:
        return self.patches / "overlay"

    @property
    def data(self) -> Path:
        return self.repo / "kvbuild" / "data"


@dataclass(frozen=True, kw_only=True)
class GitSource:
    url: str
    tag: str
    commit: str
    upstream_tree: str
    """empty: not recorded"""
    patched_tree: str


@dataclass(frozen=True, kw_only=True)
class DebianSource:
    package: str
    version: str
    suite: str
    archive: str
    sha256: str
    upstream_tree: str
    patched_tree: str


@dataclass(frozen=True, kw_only=True)
class Base:
    """One supported ORT release: a table of patches/bases.toml."""

    name: str
    version: str
    revision: int
    """the <n> of the wheel's local version +kvq.<n>"""
    git: GitSource
    debian: DebianSource
    cuda_min: str
    cuda_max: str
    python_min: str
    python_max: str


def load_base(cfg: Config) -> Base:
    """The table of `cfg.base`. UsageError names the known ones, SourceError what a table lacks."""
    bases = load_bases(cfg.patches / "bases.toml")
    if cfg.base not in bases:
        msg = f"--base {cfg.base}: no such base"
        raise UsageError(msg, todo=f"choose one of {', '.join(bases)} (the tables of patches/bases.toml)")
    return bases[cfg.base]


def load_bases(path: Path) -> dict[str, Base]:
    """All bases by name, in the order of the file."""
    return {name: _parse_base(path, name, table) for name, table in read_toml(path).items()}


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        msg = f"{path}: {exc.strerror}"
        raise EnvironmentProblem(msg, "the checkout of this repository is not complete") from exc
    except ValueError as exc:
        msg = f"{path}: {exc}"
        raise SourceError(msg, "the file was edited and is no longer TOML in UTF-8") from exc


def _parse_base(path: Path, name: str, table: dict[str, Any]) -> Base:
    sources = table.get("sources", {})
    try:
        plain = {field.name for field in fields(Base)} - {"name", "git", "debian"}
        return Base(
            name=name,
            git=GitSource(url=table["git_url"], tag=table["tag"], commit=table["commit"], **sources["git"]),
            debian=DebianSource(**sources["debian"]),
            **{key: table[key] for key in plain},
        )
    except (KeyError, TypeError) as exc:
        msg = f"{path}: table [{name}]: {exc}"
        raise SourceError(msg, "a field is missing or has an unknown name") from exc
