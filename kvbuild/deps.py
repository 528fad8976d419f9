"""The third-party sources that ONNX Runtime compiles: fetched, unpacked aside, edited as upstream edits them."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from kvbuild import archive, log, proc
from kvbuild.config import Config, read_toml
from kvbuild.download import Pin, Route, at_hand, debian_route, obtain, pip_route, url_route
from kvbuild.errors import DigestMismatch, SourceError

ReadUpstream = Callable[[str], bytes]
"""Gives the bytes of a file of the unpatched ONNX Runtime source, by its path there."""


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """Where cmake/deps.txt of ONNX Runtime fetches a dependency."""

    url: str
    sha1: str

    @property
    def pin(self) -> Pin:
        """Named by its address, as upstream's own mirror folder is laid out: base names such as v1.0.zip repeat."""
        parts = urlsplit(self.url)
        return Pin(file=f"{parts.netloc}{parts.path}", digest=self.sha1, algorithm="sha1")


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """A table of deps.toml, which explains the fields."""

    name: str
    variable: str
    kind: Literal["debian", "pypi", "shim"]
    package: str = ""
    version: str = ""
    file: str = ""
    sha256: str = ""
    pip_args: list[str] = field(default_factory=list)
    strip: int = 0
    keep: list[str] = field(default_factory=list)
    ort_patch: str = ""
    shim: str = ""
    program: str = ""
    machine: str = ""
    upstream: Upstream | None = None
    cuda: bool = False

    @property
    def pin(self) -> Pin:
        return Pin(file=self.file, digest=self.sha256)


def needed(cfg: Config) -> list[Dependency]:
    """The dependencies of this build, in the order of the file."""
    path = cfg.series_dir / "deps.toml"
    found = [_parse(path, name, table) for name, table in read_toml(path).items()]
    here = platform.machine()
    return [dep for dep in found if (cfg.cuda_home or not dep.cuda) and dep.machine in ("", here)]


def inputs_digest(cfg: Config) -> str:
    """Changes with every pin, shim and way of unpacking."""
    known = hashlib.sha256((cfg.series_dir / "deps.toml").read_bytes())
    for dep in needed(cfg):
        known.update(f"{dep.name}\n".encode() + _shim(cfg, dep))
    return known.hexdigest()


def missing_downloads(cfg: Config) -> list[str]:
    """Names of the dependencies that need the network."""
    return [
        dep.name
        for dep in needed(cfg)
        if dep.kind != "shim" and not any(cfg.deps_dir.glob(f"{dep.name}-*")) and not at_hand(cfg, dep.pin)
    ]


def fetch_all(cfg: Config, read_upstream: ReadUpstream, pip_python: Path) -> dict[str, str]:
    """Make every dependency available; returns CMake variable -> folder or program. A killed run leaves nothing half
    unpacked."""
    cfg.deps_dir.mkdir(parents=True, exist_ok=True)
    for leftover in cfg.deps_dir.glob("*.part"):
        shutil.rmtree(leftover)
    found = {}
    for dep in needed(cfg):
        patch = read_upstream(dep.ort_patch) if dep.ort_patch else b""
        found[dep.variable] = str(_fetch(cfg, dep, patch, pip_python) / dep.program)
    return found


def _fetch(cfg: Config, dep: Dependency, patch: bytes, pip_python: Path) -> Path:
    shim = _shim(cfg, dep)
    own = _folder(cfg, dep, dep.sha256, patch, shim)
    if own.is_dir():
        return own
    if dep.kind == "shim":
        return _unpack(dep, None, own, patch, shim)
    as_upstream = _folder(cfg, dep, dep.upstream.sha1, patch, b"") if dep.upstream else None
    if as_upstream and as_upstream.is_dir():
        return as_upstream
    try:
        file = obtain(cfg, dep.pin, [_route(cfg, dep, pip_python)])
    except DigestMismatch:
        raise
    except SourceError as exc:
        if not dep.upstream or not as_upstream:
            raise
        return _unpack_upstream(cfg, dep, dep.upstream, as_upstream, patch, exc)
    return _unpack(dep, file, own, patch, shim)


def _unpack_upstream(
    cfg: Config, dep: Dependency, upstream: Upstream, target: Path, patch: bytes, first: SourceError
) -> Path:
    """The way out when no registry served the pinned file, because of `first`."""
    log.info(f"  {dep.name}: falling back to upstream's address, {upstream.url}")
    try:
        file = obtain(cfg, upstream.pin, [url_route(upstream.url)])
    except DigestMismatch:
        raise
    except SourceError as exc:
        msg = f"the dependency {dep.name} ({dep.version}) could not be fetched\n{first.what}\n{exc.what}"
        raise SourceError(msg, f"{first.why}; {exc.why}", exc.todo) from exc
    whole = Dependency(name=dep.name, variable=dep.variable, kind=dep.kind, strip=1)
    return _unpack(whole, file, target, patch, b"")


def _route(cfg: Config, dep: Dependency, pip_python: Path) -> Route:
    if dep.kind == "debian":
        return debian_route(cfg, dep.package, dep.pin)
    return pip_route(cfg, pip_python, f"{dep.package}=={dep.version}", dep.pin, dep.pip_args)


def _folder(cfg: Config, dep: Dependency, archive_digest: str, patch: bytes, shim: bytes) -> Path:
    known = hashlib.sha256(repr((archive_digest, dep.strip, dep.keep)).encode())
    for part in (patch, shim):
        known.update(hashlib.sha256(part).digest())
    return cfg.deps_dir / f"{dep.name}-{known.hexdigest()[:12]}"


def _unpack(dep: Dependency, file: Path | None, target: Path, patch: bytes, shim: bytes) -> Path:
    log.info(f"  unpacking {dep.name} {dep.version}".rstrip())
    part = target.with_name(target.name + ".part")
    if file:
        archive.unpack(file, part, strip=dep.strip, keep=tuple(dep.keep))
        absent = [kept for kept in dep.keep if not (part / kept).exists()]
        if absent or not any(part.iterdir()):
            msg = f"{file} does not hold {', '.join(absent) or 'any file'}"
            raise SourceError(msg, f"`strip` or `keep` of [{dep.name}] in deps.toml does not fit the archive")
    else:
        part.mkdir()
    if dep.program:  # wheels keep no permissions
        (part / dep.program).chmod(0o755)
    if patch:
        _apply(dep, patch, part)
    if shim:
        (part / "CMakeLists.txt").write_bytes(shim)
    part.rename(target)  # the folder's appearance is the stamp
    return target


def _apply(dep: Dependency, patch: bytes, folder: Path) -> None:
    # Inside another repository's work tree git would skip every path that is not below that repository's root.
    env = {name: None for name in os.environ if name.startswith("GIT_")}
    ceiling = {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent), "GIT_CONFIG_GLOBAL": os.devnull}
    proc.run(
        ["git", "apply", "--ignore-whitespace", "-p1", "-"],
        cwd=folder,
        env={**env, **ceiling},
        input=patch,
        error=SourceError,
        what=f"applying upstream's {dep.ort_patch or 'patch'} to {dep.name}",
    )


def _shim(cfg: Config, dep: Dependency) -> bytes:
    return (cfg.data / "shims" / dep.shim).read_bytes() if dep.shim else b""


def _parse(path: Path, name: str, table: dict[str, Any]) -> Dependency:
    try:
        upstream = Upstream(**table["upstream"]) if "upstream" in table else None
        return Dependency(name=name, **{**table, "upstream": upstream})
    except (TypeError, KeyError) as exc:
        msg = f"{path}: table [{name}]: {exc}"
        raise SourceError(msg, "a field is missing or has an unknown name") from exc
