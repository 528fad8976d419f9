"""From commits in the build tree back to patches/: the inverse of apply, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbuild import checkout, log, sync
from kvbuild.config import Base, Config
from kvbuild.errors import EnvironmentProblem, PatchError
from kvbuild.git import Entry, Git
from kvbuild.patchfile import subject_name
from kvbuild.patchset import OVERLAY, build_commits, file_mode, open_store, overlay_files, prepare
from kvbuild.sync import write_atomically

_FORMAT_PATCH = (
    "format-patch",
    "--stdout",
    "-1",
    "--zero-commit",  # commit ids change with every rebase of the series
    "--full-index",  # abbreviations grow with the repository, and apply compares whole blob ids
    "--no-signature",  # the git version of whoever exports
    "--no-stat",  # repeats the diff and depends on the terminal's width
    "--no-numbered",  # n/m changes in every file when a patch is added
    "--subject-prefix=",  # the name of the file says what `[PATCH]` would
    "--no-renames",  # detection depends on limits, and hides lines from review
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-notes",
    "--no-thread",
    "--no-attach",
    "--no-base",
    "--encode-email-headers",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
_SQUASH = ("fixup!", "squash!", "amend!")


@dataclass(frozen=True)
class ExportResult:
    """Files below patches/ that were written or removed, relative to it."""

    written: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Rendered:
    """What patches/ should hold for a commit of the build tree."""

    patches: tuple[tuple[str, bytes], ...]
    """(name without .patch, mailbox text), in order"""
    overlay: dict[str, Entry]


def export(cfg: Config, base: Base) -> ExportResult:
    """Write the commits after the overlay commit of `cfg.src` as patches, and files that upstream lacks as overlay.

    Raises PatchError on a dirty tree, on commits that give no patch, and where patches/ was edited since it was
    applied and the export would overwrite that. Nothing is written then.
    """
    store = open_store(cfg)
    if not (cfg.src / ".git").exists():
        msg = f"{cfg.src} does not exist"
        raise PatchError(msg, "there is no build tree to export from", "run build.py apply")
    tree = checkout.open_tree(store, cfg.src)
    checkout.refuse_local_edits(tree)
    _refuse_untracked(tree)
    head = tree.text("rev-parse", "HEAD")
    overlay = store.resolve(OVERLAY) or ""
    upstream = store.resolve(f"{OVERLAY}^") or ""  # what the tree stands on; another source may be fetched by now
    rendered = render(store, upstream, overlay, head)
    again = build_commits(store, cfg.base_dir / "export.tmp", upstream, rendered.overlay, rendered.patches)
    if again.tree != store.tree_of(head):
        msg = "the exported patches do not give the tree that they came from"
        raise PatchError(msg, f"they give {again.tree}, the build tree is {store.tree_of(head)}", "report this")
    writes, removals = _plan(cfg, store, upstream, rendered)
    carry_out(cfg, writes, removals)
    sync.record(store, head, cfg.series_dir)
    result = ExportResult(
        tuple(path.relative_to(cfg.patches).as_posix() for path, _, _ in writes),
        tuple(path.relative_to(cfg.patches).as_posix() for path in removals),
    )
    log.info(f"exported {base.name}; patches: {len(rendered.patches)}, overlay files: {len(rendered.overlay)}")
    for verb, names in (("wrote", result.written), ("removed", result.removed)):
        for name in names:
            log.info(f"  {verb} patches/{name}")
    return result


def export_mbox(cfg: Config, base: Base, out: Path) -> Path:
    """Write overlay and series of patches/ as one mailbox for `git am --keep-cr` on a plain checkout of upstream."""
    store = open_store(cfg)
    prepared = prepare(cfg, store)
    commits = store.text("rev-list", "--reverse", f"{prepared.upstream}..{prepared.patched}").split()
    text = b"".join(store.run(*_FORMAT_PATCH, commit).stdout for commit in commits)
    try:
        write_atomically(out, text)
    except OSError as exc:
        msg = f"{out}: {exc.strerror}"
        raise EnvironmentProblem(msg, "the mailbox could not be written", "free space or name another file") from exc
    log.info(f"{out}: {len(commits)} messages; in a checkout of {base.git.tag} run `git am --keep-cr {out}`")
    return out


def render(store: Git, upstream: str, overlay: str, head: str) -> Rendered:
    """Patches and overlay of the commits `overlay`..`head`. Raises PatchError on a commit that gives none."""
    if not overlay or not store.is_ancestor(overlay, head):
        msg = "the build tree's history does not hold the overlay commit"
        todo = f"put your commits on top of it: git rebase --onto {overlay[:12]} <the commit before your first one>"
        raise PatchError(msg, "the overlay commit was rewritten, or HEAD is on another branch", todo)
    known = store.entries(upstream)
    if merges := store.text("rev-list", "--min-parents=2", f"{overlay}..{head}").split():
        msg = f"merge commits cannot be exported: {', '.join(commit[:12] for commit in merges)}"
        raise PatchError(msg, todo=f"make the history linear: git rebase {overlay[:12]}")
    patches: list[tuple[str, bytes]] = []
    for commit in store.text("rev-list", "--reverse", f"{overlay}..{head}").split():
        subject = store.text("show", "-s", "--format=%s", commit)
        if subject.startswith(_SQUASH):
            msg = f"{commit[:12]} is a `{subject.split()[0]}` commit"
            raise PatchError(msg, todo=f"fold it in first: git rebase -i --autosquash {overlay[:12]}")
        edited = [change.path for change in store.changes(f"{commit}^", commit) if change.path in known]
        if not edited:
            log.info(f"{commit[:12]} ({subject}) edits no file of upstream's: it goes into the overlay")
            continue
        name = subject_name(subject)
        if any(name == earlier for earlier, _ in patches):
            msg = f"two commits are named {name}"
            raise PatchError(msg, todo="squash them, or give one another name before the colon of its subject")
        # Literal: a path may hold characters that git takes for a pattern.
        done = store.run(*_FORMAT_PATCH, commit, "--", *edited, env={"GIT_LITERAL_PATHSPECS": "1"})
        patches.append((name, done.stdout))
    added = {path: entry for path, entry in store.entries(head).items() if path not in known}
    if odd := [path for path, entry in added.items() if not entry.mode.startswith("100")]:
        msg = f"only plain files can go into the overlay: {', '.join(odd)}"
        raise PatchError(msg)
    return Rendered(tuple(patches), added)


def series_text(old: str, names: Sequence[str]) -> str:
    """The series file for `names`: unchanged when they are; else comments above the first entry head the file, and
    any other entry keeps those above it."""
    above: dict[str, list[str]] = {}
    pending: list[str] = []
    order: list[str] = []
    head: list[str] = []
    for line in old.splitlines():
        entry = line.strip()
        if not entry or entry.startswith("#"):
            (pending if order else head).append(line)
        else:
            order.append(entry)
            above[entry] = pending
            pending = []
    wanted = [f"{name}.patch" for name in names]
    if wanted == order:
        return old
    lines = [*head, *(line for entry in wanted for line in (*above.get(entry, []), entry)), *pending]
    return "".join(f"{line}\n" for line in lines)


def _refuse_untracked(tree: Git) -> None:
    found = [row[3:] for row in tree.fields("status", "--porcelain", "-z", "--untracked-files=all") if row[:2] == "??"]
    if found:
        msg = f"{tree.work_tree} has files that git does not know:\n" + "\n".join(f"  {path}" for path in found[:20])
        todo = "commit them (`git add`, `git commit`) or remove them"
        raise PatchError(msg, "an export would leave them behind", todo)


Write = tuple[Path, bytes, int | None]


def _plan(cfg: Config, store: Git, upstream: str, rendered: Rendered) -> tuple[list[Write], list[Path]]:
    """Files to write and to remove. PatchError where one was edited in patches/ since it was applied."""
    edited: list[Path] = []
    writes, removals = _plan_series(cfg, sync.recorded(store), rendered, edited)
    known = store.entries(upstream)
    synced = {path: entry for path, entry in store.entries(sync.SYNCED).items() if path not in known}
    overlay_writes, overlay_removals = plan_overlay(cfg, store, synced, rendered.overlay, edited)
    if edited:
        names = "\n".join(f"  {path.relative_to(cfg.repo)}" for path in edited)
        msg = f"edited since they were last applied, and the export would overwrite that:\n{names}"
        todo = "set these edits aside (`git stash`), export, bring them back, and run build.py apply"
        raise PatchError(msg, "both the build tree and patches/ were changed", todo)
    return [*overlay_writes, *writes], [*removals, *overlay_removals]


def _plan_series(
    cfg: Config, recorded: dict[str, str], rendered: Rendered, edited: list[Path]
) -> tuple[list[Write], list[Path]]:
    series = cfg.series_dir / "series"
    old_series = series.read_bytes().decode() if series.exists() else ""
    wanted = {f"{name}.patch": raw for name, raw in rendered.patches}
    wanted["series"] = series_text(old_series, [name for name, _ in rendered.patches]).encode()
    present = sync.series_digests(cfg.series_dir)
    writes: list[Write] = []
    for name, data in wanted.items():
        path = cfg.series_dir / name
        if path.exists() and path.read_bytes() == data:
            continue
        if present.get(name) == recorded.get(name):
            writes.append((path, data, None))
        else:
            edited.append(path)
    removals: list[Path] = []
    for name in sorted(present.keys() - wanted.keys()):
        (removals if present[name] == recorded.get(name) else edited).append(cfg.series_dir / name)
    return writes, removals


def plan_overlay(
    cfg: Config, store: Git, synced: Mapping[str, Entry], wanted: Mapping[str, Entry], edited: list[Path]
) -> tuple[list[Write], list[Path]]:
    """Overlay files to write and to remove, so that `wanted` is there.

    `synced` is what patches/ held when `wanted` branched off. Files edited on both sides are added to `edited`.
    """
    files = overlay_files(cfg.overlay)
    oids = store.store_files(list(files.values()))
    present = {rel: Entry(file_mode(path), oid) for (rel, path), oid in zip(files.items(), oids, strict=True)}
    changed: list[str] = []
    removals = []
    for rel in sorted(wanted.keys() | synced.keys()):
        ours, base, theirs = present.get(rel), synced.get(rel), wanted.get(rel)
        if ours == theirs or theirs == base:  # equal already, or only patches/ has moved on
            continue
        if ours != base:
            edited.append(cfg.overlay / rel)
        elif theirs is None:
            removals.append(cfg.overlay / rel)
        else:
            changed.append(rel)
    contents = store.blobs([wanted[rel].oid for rel in changed])
    modes: list[int | None] = [0o755 if wanted[rel].mode == "100755" else 0o644 for rel in changed]
    writes: list[Write] = [
        (cfg.overlay / rel, data, mode) for rel, data, mode in zip(changed, contents, modes, strict=True)
    ]
    return writes, removals


def carry_out(cfg: Config, writes: list[Write], removals: list[Path]) -> None:
    """Write and remove files below patches/, each in one step."""
    try:
        for path, data, mode in writes:
            write_atomically(path, data, mode)
        for path in removals:
            path.unlink()
            for folder in path.parents:
                if folder in (cfg.overlay, cfg.series_dir) or any(folder.iterdir()):
                    break
                folder.rmdir()
    except OSError as exc:
        msg = f"{exc.filename}: {exc.strerror}"
        todo = "free the space or fix the permission and export again; the commits of the build tree are untouched"
        raise EnvironmentProblem(msg, "the export could not be written completely", todo) from exc
