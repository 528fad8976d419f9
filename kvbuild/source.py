"""Upstream's source: from git by tag and commit, from Debian's source archive by digest, or from a path."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbuild import debian, download, gitremote, log
from kvbuild.config import Base, Config
from kvbuild.errors import SourceError
from kvbuild.git import ZERO_ID, Git, init_store
from kvbuild.patchfile import Patch, read_patches
from kvbuild.patchset import UPSTREAM, known_trees, require_fit, store_overlay
from kvbuild.sync import write_atomically
from kvbuild.treeimport import (
    INCOMING,
    Member,
    import_tree,
    members_of_archive,
    members_of_commit,
    members_of_folder,
)

_RECORD = "kvq-source.json"


@dataclass(frozen=True)
class SourceResult:
    """What refs/kvq/upstream of the repository holds."""

    kind: str
    """git, debian or path"""
    commit: str
    tree: str
    note: str
    """where it came from, and why from there"""


@dataclass(frozen=True)
class _Choice:
    kind: str
    why: str


def fetch_source(cfg: Config, base: Base) -> SourceResult:
    """Bring upstream's source into `cfg.repo_store`. SourceError with every route's reason when none gives it."""
    digest = fetch_digest(cfg, base)
    if not cfg.force and (known := _recorded(cfg, digest)):
        log.info(f"source of {base.name}: {known.note} (imported before)")
        return known
    store = init_store(cfg.repo_store, error=SourceError)
    choice, commit = _bring(cfg, base, store, _choose(cfg, base))
    result = SourceResult(choice.kind, commit, store.tree_of(commit), choice.why)
    _check_tree(cfg, base, store, result)
    store.set_ref(UPSTREAM, commit)
    store.run("update-ref", "-d", INCOMING)
    write_atomically(cfg.repo_store / _RECORD, json.dumps({"digest": digest, **asdict(result)}, indent=1).encode())
    log.info(f"source of {base.name}: {result.note} (tree {result.tree[:12]})")
    return result


def _bring(cfg: Config, base: Base, store: Git, choice: _Choice) -> tuple[_Choice, str]:
    """Import the chosen source, or with --source auto Debian's where git breaks off; the choice made and the commit."""
    if choice.kind == "path":
        return choice, _from_path(cfg, base, store, Path(cfg.source))
    if choice.kind == "debian":
        return choice, _from_debian(cfg, base, store)
    try:
        gitremote.download_tag(base, store, INCOMING)
    except SourceError as exc:
        if cfg.source != "auto":
            raise
        log.warn(f"{exc.what}; going on with {_package(base)}\n{exc.why}")
        choice = _Choice("debian", f"{_package(base)}, because the transfer from {base.git.url} failed")
        return choice, _from_debian(cfg, base, store)
    return choice, gitremote.pinned_commit(base, store, INCOMING)


def fetch_digest(cfg: Config, base: Base) -> str:
    """Changes when another fetch could bring other files."""
    parts = [base.name, cfg.source, base.git.url, base.git.tag, base.git.commit, base.debian.sha256]
    if cfg.source not in ("auto", "git", "debian"):
        parts.append(_path_state(Path(cfg.source)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def sources_reachable(cfg: Config, base: Base) -> str:
    """Which source a fetch would use, and why. SourceError where there is none."""
    if known := _recorded(cfg, fetch_digest(cfg, base)):
        return f"{known.note} (imported before)"
    return _choose(cfg, base).why


def kind_of_source(cfg: Config) -> str:
    """git, debian or path: what the last fetch imported; empty before the first."""
    path = cfg.repo_store / _RECORD
    return str(json.loads(path.read_text(encoding="utf-8"))["kind"]) if path.exists() else ""


def _recorded(cfg: Config, digest: str) -> SourceResult | None:
    """The result of an earlier fetch with the same inputs, if its commit is still there."""
    path = cfg.repo_store / _RECORD
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    store = Git(cfg.repo_store, error=SourceError)
    if found.pop("digest") != digest or store.resolve(UPSTREAM) != found["commit"]:
        return None
    return SourceResult(**found)


def _choose(cfg: Config, base: Base) -> _Choice:
    """The kind of source for this run. Cheap: a few seconds at most, nothing is downloaded."""
    pin = _pin(base)
    if cfg.source == "git":
        if reason := gitremote.unreachable(base):
            msg = f"{base.git.url} cannot be reached: {reason}"
            raise SourceError(msg, "no network, a proxy, or a firewall", "try --source debian or --source PATH")
        return _Choice("git", f"{base.git.tag} from {base.git.url}")
    if cfg.source == "debian":
        if not download.at_hand(cfg, pin) and (reason := debian.unavailable()):
            msg = f"{pin.file}: {reason}"
            raise SourceError(msg, todo="give --mirror DIRECTORY with that file, or --source git or PATH")
        return _Choice("debian", _package(base))
    if cfg.source != "auto":
        return _choose_path(Path(cfg.source))
    package = _package(base)
    if any((mirror / pin.file).is_file() for mirror in cfg.mirrors):
        return _Choice("debian", f"{package}, because a mirror has it")
    if not (unreachable := gitremote.unreachable(base)):
        return _Choice("git", f"{base.git.tag} from {base.git.url}")
    log.warn(f"{base.git.url} cannot be reached: {unreachable}; going on with {package}")
    if not download.at_hand(cfg, pin) and (reason := debian.unavailable()):
        msg = f"no source of {base.name} can be reached"
        why = f"git: {unreachable}; Debian: {reason}"
        raise SourceError(msg, why, "check the network and proxy settings, or give --source PATH or --mirror DIRECTORY")
    return _Choice("debian", f"{package}, because {base.git.url} cannot be reached")


def _choose_path(path: Path) -> _Choice:
    if path.is_dir():
        what = "the git checkout" if (path / ".git").exists() else "the folder"
        return _Choice("path", f"{what} {path}")
    if path.is_file():
        return _Choice("path", f"the archive {path}")
    msg = f"--source {path}: no such file or folder"
    raise SourceError(msg, todo="give auto, git, debian, or the path of an unpacked source tree or archive")


def _package(base: Base) -> str:
    return f"the Debian source package {base.debian.package} {base.debian.version}"


def _pin(base: Base) -> download.Pin:
    return download.Pin(file=base.debian.archive, digest=base.debian.sha256)


def _from_debian(cfg: Config, base: Base, store: Git) -> str:
    pin = _pin(base)
    archive = download.obtain(cfg, pin, [download.debian_route(cfg, base.debian.package, pin)])
    return _store(store, base, members_of_archive(archive), archive)


def _from_path(cfg: Config, base: Base, store: Git, path: Path) -> str:
    if path.is_file():
        return _store(store, base, members_of_archive(path), path)
    if not (path / ".git").exists():
        _look_like_source(cfg, path)
        return _store(store, base, members_of_folder(path), path)
    checkout = Git(path / ".git", path, error=SourceError)
    edited = _edited(checkout)
    if edited:
        msg = f"--source {path}: {len(edited)} files differ from HEAD, first {edited[0][3:]}"
        raise SourceError(msg, "only committed files are taken", "commit or stash them, or give a copy without .git")
    head = checkout.text("rev-parse", "HEAD^{commit}")
    if head != base.git.commit and checkout.resolve(f"{base.git.commit}^{{commit}}"):
        log.warn(f"{path} is at {head[:12]}, not at {base.git.tag}; the files of that commit are taken")
    return _store(store, base, members_of_commit(checkout, head), path)


def _edited(checkout: Git) -> list[str]:
    """`git status` rows of tracked files; takes no lock in the user's repository."""
    done = checkout.run(
        "status", "--porcelain", "-z", "--untracked-files=no", "--no-renames", env={"GIT_OPTIONAL_LOCKS": "0"}
    )
    return done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]


def _store(store: Git, base: Base, members: Iterable[Member], origin: Path) -> str:
    with log.step(f"import {origin}"):
        return import_tree(store, members, f"onnxruntime {base.version}\n")


def _look_like_source(cfg: Config, folder: Path) -> None:
    """Refuse a folder that is plainly something else before all of it is read: it may be a whole disk."""
    edits = [edit for patch in _patches(cfg) for edit in patch.edits if edit.old != ZERO_ID]
    landmarks = ["VERSION_NUMBER", *(edit.path for edit in edits)]
    missing = [path for path in landmarks if not (folder / path).is_file()]
    if missing:
        msg = f"--source {folder}: it has no {missing[0]}"
        raise SourceError(msg, "it is not the top folder of an ORT source tree", "name the folder with VERSION_NUMBER")


def _path_state(path: Path) -> str:
    """What tells two states of a --source path apart without reading all of it."""
    if path.is_file():
        return download.digest_file(path)
    if (path / ".git").exists():
        checkout = Git(path / ".git", path, error=SourceError)
        return f"{checkout.resolve('HEAD')} {_edited(checkout)}"
    digest = hashlib.sha256()
    for here, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            found = Path(here, name).lstat()
            digest.update(os.fsencode(f"{here}/{name} {found.st_size} {found.st_mtime_ns} {found.st_mode}\n"))
    return digest.hexdigest()


def _check_tree(cfg: Config, base: Base, store: Git, result: SourceResult) -> None:
    """Hold the imported tree against the recorded ones; one that is not recorded must fit the patches at least."""
    known = known_trees(base)
    expected = {"git": base.git.upstream_tree, "debian": base.debian.upstream_tree}.get(result.kind, "")
    if expected and result.tree != expected:
        differ = f"\n  expected {expected}\n  got      {result.tree}"
        msg = f"the {result.kind} source of {base.name} gives another tree{differ}"
        why = "the download is the pinned one, so the import or the record in patches/bases.toml is at fault"
        raise SourceError(msg, why, "report it with the output of `git --version`")
    if result.tree in known:
        return
    require_fit(cfg, store.entries(result.tree), _patches(cfg), store_overlay(store, cfg.overlay), SourceError)
    log.warn(
        f"the tree {result.tree} is not recorded for {base.name}; every file that the patches edit is the right one"
    )


def _patches(cfg: Config) -> list[Patch]:
    """The series; none for a base that `build.py rebase` is still to write one for."""
    return read_patches(cfg.series_dir) if (cfg.series_dir / "series").exists() else []
