"""Overlay and series: read, fitted against an upstream tree, and turned into commits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbuild import checkout, log, sync
from kvbuild.config import Base, Config, read_toml
from kvbuild.errors import KvBuildError, PatchError
from kvbuild.git import ZERO_ID, Entry, Git, init_store, scratch_work_tree
from kvbuild.patchfile import FileEdit, Patch, read_patches, read_series

UPSTREAM = "refs/kvq/upstream"
OVERLAY = "refs/kvq/overlay"
OVERLAY_SUBJECT = "overlay: files that upstream does not have"

_NO_OVERLAY = ("__pycache__", ".DS_Store")
_MAX_LISTED = 20


@dataclass(frozen=True)
class Prepared:
    """The patched commit on upstream's; nothing but objects was written for it."""

    upstream: str
    upstream_tree: str
    overlay: str
    patched: str
    tree: str


@dataclass(frozen=True)
class ApplyResult:
    commit: str
    tree: str
    touched: int
    """files of the build tree that were written or removed"""


def apply(cfg: Config, base: Base) -> ApplyResult:
    """Bring `cfg.src` to upstream plus overlay plus series, touching only files that differ.

    Raises PatchError where the patch set does not fit, the tree id is not the recorded one, or local edits would go.
    """
    store = open_store(cfg)
    prepared = prepare(cfg, store)
    compare_tree(cfg, base, prepared)
    refs = {OVERLAY: prepared.overlay, sync.SYNCED: prepared.patched}
    touched = checkout.move(store, cfg.src, prepared.patched, refs)
    sync.record(store, prepared.patched, cfg.series_dir)
    log.info(f"patched source: {cfg.src} (tree {prepared.tree[:12]}, files written or removed: {touched})")
    return ApplyResult(prepared.patched, prepared.tree, touched)


def open_store(cfg: Config) -> Git:
    """The repository with upstream's source. PatchError before the first fetch."""
    store = Git(cfg.repo_store)
    if not (cfg.repo_store / "HEAD").exists() or not store.resolve(UPSTREAM):
        msg = f"the source of {cfg.base} was not fetched yet"
        raise PatchError(msg, todo="run build.py fetch")
    return init_store(cfg.repo_store)


def prepare(cfg: Config, store: Git) -> Prepared:
    """The patched commit of the patch set on disk. PatchError where it does not fit upstream's tree."""
    upstream = store.resolve(UPSTREAM) or ""
    entries = store.entries(upstream)
    patches = read_patches(cfg.series_dir)
    overlay = store_overlay(store, cfg.overlay)
    require_fit(cfg, entries, patches, overlay, PatchError)
    scratch = cfg.base_dir / "apply.tmp"
    return build_commits(store, scratch, upstream, overlay, [(patch.name, patch.raw) for patch in patches])


def build_commits(
    store: Git,
    scratch: Path,
    upstream: str,
    overlay: Mapping[str, Entry],
    patches: Sequence[tuple[str, bytes]],
) -> Prepared:
    """One commit with the overlay, then one for each patch (name, mailbox text), prepared in `scratch`."""
    tree = store.store_tree(upstream, dict(overlay), scratch.with_suffix(".index"))
    first = store.commit(tree, [upstream], OVERLAY_SUBJECT + "\n")
    head = first
    if patches:
        with scratch_work_tree(store, scratch, first) as work:
            for name, raw in patches:
                _am(work, name, raw)
            head = work.text("rev-parse", "HEAD")
    return Prepared(upstream, store.tree_of(upstream), first, head, store.tree_of(head))


def am_command(*, three_way: bool = False) -> list[str]:
    """git am as this tool runs it, reading one mailbox from standard input."""
    return [
        "am",
        "--quiet",
        "--3way" if three_way else "--no-3way",
        "--keep-cr",  # upstream has files with CR LF
        "--no-scissors",
        "--no-gpg-sign",
        "--whitespace=nowarn",
    ]


def _am(work: Git, name: str, raw: bytes) -> None:
    try:
        work.run(*am_command(), input=raw, what=f"git am {name}.patch")
    except PatchError as exc:
        msg = f"{name}.patch does not apply"
        raise PatchError(msg, exc.why, "the patch and the source do not belong together; see docs/patching.md") from exc


def compare_tree(cfg: Config, base: Base, prepared: Prepared) -> None:
    """Hold the patched tree against the id recorded for this source and this patch set."""
    kind, expected = known_trees(base).get(prepared.upstream_tree, ("", ""))
    if not kind:
        log.warn(f"no tree id of {base.name} is recorded for this source; its patched tree is {prepared.tree}")
    elif not expected:
        log.warn(f"no patched tree is recorded for the {kind} source of {base.name}; it is {prepared.tree}")
    elif recorded_patchset(cfg, base) != patchset_digest(cfg, base):
        log.warn("the patch set was edited since its tree id was recorded; `build.py check --update-trees` records it")
    elif expected != prepared.tree:
        differ = f"\n  expected {expected}\n  got      {prepared.tree}"
        msg = f"the patched tree of {base.name} is not the recorded one{differ}"
        why = "the patch set is the recorded one, so git or the imported source differs from where it was recorded"
        raise PatchError(msg, why, f"remove {cfg.base_dir} and run again; if it stays, report it with `git --version`")


def known_trees(base: Base) -> dict[str, tuple[str, str]]:
    """Recorded upstream tree id -> (kind of source, recorded patched tree id)."""
    rows = (("debian", base.debian), ("git", base.git))
    return {row.upstream_tree: (kind, row.patched_tree) for kind, row in rows if row.upstream_tree}


def recorded_patchset(cfg: Config, base: Base) -> str:
    """Digest of the patch set that the recorded patched trees belong to; empty before the first record."""
    return str(read_toml(cfg.patches / "bases.toml").get(base.name, {}).get("patchset", ""))


def overlay_files(overlay: Path) -> dict[str, Path]:
    """Files of the overlay by their path in the ORT tree, sorted. Compiled Python is no part of it."""
    found = {}
    for folder, subfolders, names in os.walk(overlay):
        subfolders[:] = sorted(name for name in subfolders if name not in _NO_OVERLAY)
        for name in sorted(names):
            if name not in _NO_OVERLAY:
                path = Path(folder, name)
                found[path.relative_to(overlay).as_posix()] = path
    return dict(sorted(found.items()))


def file_mode(path: Path) -> str:
    """The mode that git records for a file on disk."""
    if path.is_symlink():
        return "120000"
    return "100755" if path.stat().st_mode & 0o100 else "100644"


def store_overlay(store: Git, overlay: Path) -> dict[str, Entry]:
    """Write the overlay's files as blobs; their entries by path."""
    files = overlay_files(overlay)
    links = [rel for rel, path in files.items() if path.is_symlink()]
    if links:
        msg = f"the overlay holds symbolic links: {', '.join(links)}"
        raise PatchError(msg, todo="put the file itself there")
    oids = store.store_files(list(files.values()))
    return {rel: Entry(file_mode(path), oid) for (rel, path), oid in zip(files.items(), oids, strict=True)}


def require_fit(
    cfg: Config,
    upstream: Mapping[str, Entry],
    patches: Sequence[Patch],
    overlay: Mapping[str, Entry],
    error: type[KvBuildError],
) -> None:
    """Raise `error` where the patches were made for other files, or upstream has a path of the overlay."""
    mismatches = edits_that_miss(upstream, patches)
    if mismatches:
        msg = f"these files are not those that the patches of {cfg.base} were made for:\n" + "\n".join(
            f"  {edit.path}: expected blob {edit.old[:12]}, got {_blob(upstream, edit.path)[:12]} ({name}.patch)"
            for name, edit in mismatches[:_MAX_LISTED]
        )
        raise error(msg, f"the source is not that of {cfg.base}, or it was changed", _other_base(cfg, upstream))
    taken = overlay_clashes(upstream, overlay)
    if taken:
        msg = "upstream has files at paths of the overlay:\n" + "\n".join(f"  {path}" for path in taken[:_MAX_LISTED])
        raise error(msg, "upstream took the name", "move the overlay's file, or drop it for upstream's")


def edits_that_miss(upstream: Mapping[str, Entry], patches: Sequence[Patch]) -> list[tuple[str, FileEdit]]:
    """(patch name, edit) for each edit whose old blob is neither upstream's nor an earlier patch's result."""
    current: dict[str, str] = {}
    found = []
    for patch in patches:
        for edit in patch.edits:
            if edit.old != current.get(edit.path, _blob(upstream, edit.path)):
                found.append((patch.name, edit))
            current[edit.path] = edit.new
    return found


def overlay_clashes(upstream: Mapping[str, Entry], overlay: Mapping[str, Entry]) -> list[str]:
    """Overlay paths that upstream has as a file or folder, or below one of upstream's files."""
    folders = {"/".join(path.split("/")[:depth]) for path in upstream for depth in range(1, path.count("/") + 1)}
    return [
        path
        for path in overlay
        if path in upstream
        or path in folders
        or any("/".join(path.split("/")[:depth]) in upstream for depth in range(1, path.count("/") + 1))
    ]


def _blob(upstream: Mapping[str, Entry], path: str) -> str:
    return upstream[path].oid if path in upstream else ZERO_ID


def _other_base(cfg: Config, upstream: Mapping[str, Entry]) -> str:
    """Advice that names the base whose patches fit this tree, if one does."""
    for name in read_toml(cfg.patches / "bases.toml"):
        folder = cfg.patches / name
        if name != cfg.base and (folder / "series").exists() and not edits_that_miss(upstream, read_patches(folder)):
            return f"it fits --base {name}"
    return f"give the unchanged source of {cfg.base}, or leave --source away to have it fetched"


def patchset_digest(cfg: Config, base: Base) -> str:
    """SHA-256 over base name, series, patches and overlay: names, modes and bytes."""
    digest = hashlib.sha256(f"{base.name}\0".encode())
    rows = [(f"series/{name}", cfg.series_dir / f"{name}.patch") for name in read_series(cfg.series_dir)]
    rows += [(f"overlay/{rel}", path) for rel, path in overlay_files(cfg.overlay).items()]
    for label, path in rows:
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as exc:
            msg = f"{path}: {exc.strerror}"
            raise PatchError(msg, "a file of the patch set cannot be read") from exc
        mode = file_mode(path) if label.startswith("overlay/") else ""
        digest.update(os.fsencode(f"{label}\0{mode}\0{content}\n"))
    return digest.hexdigest()
