"""Pinned files: looked for in mirrors, then the cache, then fetched; never used before their digest is checked."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbuild import debian, log, proc
from kvbuild.config import Config
from kvbuild.errors import DigestMismatch, SourceError

Algorithm = Literal["sha256", "sha1"]
ATTEMPTS = 4
TIMEOUT_SECONDS = 30
RETRY_PAUSE_SECONDS = 1.0
_CHUNK = 1 << 20
_TRY_AGAIN = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One file and its digest. Upstream's own list of dependencies has SHA-1 only, hence the choice."""

    file: str
    """name, or a relative path such as github.com/owner/..., below a mirror directory"""
    digest: str
    algorithm: Algorithm = "sha256"


Route = tuple[str, Callable[[Path], None]]
"""What a user knows the place by, and a function that fetches the file to a path, resuming what is there."""


def digest_file(path: Path, algorithm: Algorithm = "sha256") -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def from_mirrors(cfg: Config, pin: Pin) -> Path | None:
    """The file from a --mirror directory. One with the right name and the wrong bytes is an error, not a miss."""
    for mirror in cfg.mirrors:
        path = mirror / pin.file
        if path.is_file():
            _verify(path, pin, f"the mirror {mirror}")
            return path
    return None


def cached(cfg: Config, pin: Pin) -> Path:
    """Where the cache keeps a verified copy, whether or not it is there."""
    return cfg.cache_dir / pin.algorithm / pin.digest / pin.file


def at_hand(cfg: Config, pin: Pin) -> bool:
    """True when no network is needed; digests are not checked yet."""
    return any((mirror / pin.file).is_file() for mirror in cfg.mirrors) or cached(cfg, pin).is_file()


def obtain(cfg: Config, pin: Pin, routes: list[Route]) -> Path:
    """A verified local copy of `pin`: mirror, cache, then each route in order.

    Raises DigestMismatch for a file with other bytes, SourceError with every route's reason where none has the file.
    """
    if path := from_mirrors(cfg, pin):
        return path
    target = cached(cfg, pin)
    if target.is_file():
        if digest_file(target, pin.algorithm) == pin.digest:
            return target
        log.warn(f"{target} was damaged since it was stored; fetching it again")
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    reasons = []
    for name, fetch in routes:
        log.info(f"  fetching {pin.file} from {name}")
        try:
            _fetch_verified(pin, name, fetch, part)
        except DigestMismatch:
            raise
        except SourceError as exc:
            log.warn(f"{name}: {exc.what}")
            reasons.append(f"{name}: {exc.what}")
            continue
        part.replace(target)
        return target
    msg = f"{pin.file} ({pin.algorithm} {pin.digest}) could not be fetched"
    raise SourceError(
        msg,
        "; ".join(reasons) or "no place is known that serves it to this machine",
        "check the network and the proxy variables, or put the file into a directory and give --mirror DIRECTORY",
    )


def url_route(url: str) -> Route:
    return url, lambda part: fetch_url(url, part)


def debian_route(cfg: Config, source_package: str, pin: Pin) -> Route:
    def fetch(part: Path) -> None:
        debian.download(source_package, pin.file, pin.digest, part, log=cfg.logs / "downloads.log")

    return f"the Debian archive (source package {source_package})", fetch


def pip_route(cfg: Config, pip_python: Path, requirement: str, pin: Pin, pip_args: list[str]) -> Route:
    """`requirement` is name==version; `pip_args` pick the one file where the project has several for it."""

    def fetch(part: Path) -> None:
        folder = part.with_name("pip")
        shutil.rmtree(folder, ignore_errors=True)
        flags = ["--no-deps", "--no-input", "--disable-pip-version-check", *pip_args]
        cmd: proc.Command = [pip_python, "-m", "pip", "download", *flags, "--dest", folder, requirement]
        proc.run(cmd, log=cfg.logs / "downloads.log", error=SourceError, what=f"pip download {requirement}")
        got = sorted(path.name for path in folder.iterdir())
        if got != [pin.file]:
            msg = f"pip brought {', '.join(got)} instead of {pin.file}"
            raise SourceError(msg)
        (folder / pin.file).replace(part)
        folder.rmdir()

    return f"the Python package index ({requirement})", fetch


def fetch_url(url: str, part: Path) -> None:
    """Download to `part`, resuming what it holds; transient failures are tried again with growing pauses."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _transfer(url, part)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as exc:
            if attempt == ATTEMPTS or not _transient(exc):
                raise SourceError(_explain(exc)) from exc
            pause = RETRY_PAUSE_SECONDS * 2 ** (attempt - 1)
            log.info(f"  {_explain(exc)}; attempt {attempt + 1} of {ATTEMPTS} in {pause:g} s")
            time.sleep(pause)
        else:
            return


def _fetch_verified(pin: Pin, name: str, fetch: Callable[[Path], None], part: Path) -> None:
    while True:
        resumed = part.exists()
        try:
            fetch(part)
            _verify(part, pin, name)
        except DigestMismatch:
            part.unlink(missing_ok=True)
            if not resumed:
                raise
            # The start may have come from another server or an older run: once more, from the first byte.
        else:
            return


def _verify(path: Path, pin: Pin, origin: str) -> None:
    got = digest_file(path, pin.algorithm)
    if got != pin.digest:
        msg = f"{pin.file} from {origin}: {pin.algorithm} mismatch\n  expected {pin.digest}\n  got      {got}"
        raise DigestMismatch(
            msg,
            "the archive was generated anew by its host, or the transfer was altered on the way",
            "remove that file, or give --mirror with a directory that holds the pinned one",
        )


def _transfer(url: str, part: Path) -> None:
    offset = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "kvbuild"})
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as exc:
        if exc.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and offset:
            return  # complete already; the digest decides
        raise
    with response:
        appending = response.status == http.client.PARTIAL_CONTENT
        with part.open("ab" if appending else "wb") as stream:
            shutil.copyfileobj(response, stream, _CHUNK)
            stream.flush()
            os.fsync(stream.fileno())
        expected = response.headers.get("Content-Length")
        received = part.stat().st_size - (offset if appending else 0)
        if expected is not None and received != int(expected):
            nothing = b""
            raise http.client.IncompleteRead(nothing, int(expected) - received)


def _transient(exc: Exception) -> bool:
    return not isinstance(exc, urllib.error.HTTPError) or exc.code >= 500 or exc.code in _TRY_AGAIN


def _explain(exc: Exception) -> str:
    if isinstance(exc, urllib.error.HTTPError):
        return f"HTTP status {exc.code}"
    if isinstance(exc, http.client.IncompleteRead):
        return "the connection ended early"
    return f"no connection ({getattr(exc, 'reason', None) or exc})"
