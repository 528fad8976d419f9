"""`build.py rebase --onto BASE`: the series carried to another release by a three-way merge.

The work tree of the merge stays for the user where a patch conflicts; the same command then finishes the job.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from kvbuild import lock, log
from kvbuild.config import Base, Config, load_base
from kvbuild.errors import PatchError, UsageError
from kvbuild.export import Write, carry_out, plan_overlay, render, series_text
from kvbuild.git import ZERO_ID, Git
from kvbuild.patchfile import Patch, read_patches
from kvbuild.patchset import OVERLAY_SUBJECT, UPSTREAM, am_command, open_store, prepare, require_fit, store_overlay
from kvbuild.source import fetch_source

FORK_POINT = "refs/kvq/rebase"
"""The overlay commit on the new base that the carried patches follow."""


def rebase(cfg: Config, base: Base) -> list[Path]:
    """Write patches/<onto>/ from the series of `cfg.base`; returns the files written.

    `cfg.source` is the source of the new base. Raises PatchError where a patch conflicts, with the way to go on.
    """
    if not cfg.onto or cfg.onto == cfg.base:
        msg = "rebase needs --onto with another base than --base"
        raise UsageError(msg, todo="add the new release to patches/bases.toml and name it")
    onto = replace(cfg, base=cfg.onto, onto=None)
    target = load_base(onto)
    lock.claim(onto.base_dir)
    fetch_source(onto, target)
    store = open_store(onto)
    work = onto.base_dir / "rebase"
    if not (work / ".git").exists():
        patches = read_patches(cfg.series_dir)
        _start(cfg, onto, store, work, patches)
    tree = Git(work / ".git", work)
    if (_admin(tree) / "rebase-apply").exists():
        raise _conflict(cfg, tree)
    written = _finish(cfg, onto, store, tree)
    _remove(store, work)
    log.info(f"wrote patches/{onto.base}; now: build.py fetch, apply and check --update-trees with --base {onto.base}")
    return written


def _start(cfg: Config, onto: Config, store: Git, work: Path, patches: list[Patch]) -> None:
    """Commit the overlay on the new base and let git merge the series onto it, as far as it goes."""
    old_store = open_store(cfg)
    prepare(cfg, old_store)  # the patches must fit their own base before they are carried anywhere
    overlay = store_overlay(store, onto.overlay)
    require_fit(onto, store.entries(UPSTREAM), [], overlay, PatchError)
    upstream = store.resolve(UPSTREAM) or ""
    commit = store.commit(
        store.store_tree(upstream, dict(overlay), work.with_suffix(".index")), [upstream], OVERLAY_SUBJECT + "\n"
    )
    # git am builds the common ancestor from the old blobs alone, so no other object has to come along.
    wanted = {edit.old for patch in patches for edit in patch.edits if edit.old != ZERO_ID}
    for data in old_store.blobs(sorted(wanted)):
        store.run("hash-object", "-w", "--no-filters", "--stdin", input=data)
    store.set_ref(FORK_POINT, commit)
    _remove(store, work)
    store.run("worktree", "add", "--quiet", "--detach", work, commit)
    tree = Git(work / ".git", work)
    mailbox = b"".join(patch.raw for patch in patches)
    if not mailbox:
        return
    try:
        tree.run(*am_command(three_way=True), input=mailbox, what="git am --3way")
    except PatchError:
        if not (_admin(tree) / "rebase-apply").exists():  # not a conflict: git did not get as far as merging
            _remove(store, work)
            raise


def _remove(store: Git, work: Path) -> None:
    """Forced twice: also where a killed `git worktree add` left its record locked. Nothing to remove is no error."""
    store.run("worktree", "remove", "--force", "--force", work, check=False)
    shutil.rmtree(work, ignore_errors=True)


def _admin(tree: Git) -> Path:
    return Path(tree.text("rev-parse", "--absolute-git-dir"))


def _conflict(cfg: Config, tree: Git) -> PatchError:
    state = _admin(tree) / "rebase-apply"
    number, total = ((state / name).read_text().strip() for name in ("next", "last"))
    files = sorted({row.split("\t", 1)[1] for row in tree.fields("ls-files", "-z", "--unmerged")})
    shown = "\n".join(f"  {path}" for path in files) or "  (see `git status` there)"
    msg = f"patch {number} of {total} does not merge onto {cfg.onto}:\n{shown}"
    todo = (
        f"in {tree.work_tree} resolve the files, `git add` them and run `git am --continue` (`git am --skip` drops the "
        f"patch); then repeat this command. To give up, remove that folder"
    )
    return PatchError(msg, "upstream changed the lines around the edit", todo)


def _finish(cfg: Config, onto: Config, store: Git, tree: Git) -> list[Path]:
    """Export the carried commits to patches/<onto>/, and overlay files that the merge had to change."""
    fork = store.resolve(FORK_POINT) or ""
    upstream = store.resolve(UPSTREAM) or ""
    rendered = render(store, upstream, fork, tree.text("rev-parse", "HEAD"))
    before = {patch.name: patch.raw for patch in read_patches(cfg.series_dir)}
    if before and not rendered.patches:
        msg = f"no patch is left in {tree.work_tree}"
        raise PatchError(
            msg, "the merge was aborted, or every patch skipped", f"remove {tree.work_tree} to start again"
        )
    names = [name for name, _ in rendered.patches]
    series = series_text((cfg.series_dir / "series").read_text(encoding="utf-8"), names)
    writes: list[Write] = [(onto.series_dir / f"{name}.patch", raw, None) for name, raw in rendered.patches]
    writes.append((onto.series_dir / "series", series.encode(), None))
    writes = [row for row in writes if not row[0].exists() or row[0].read_bytes() != row[1]]
    edited = [path for path, _, _ in writes if path.exists() and not cfg.force]
    known = store.entries(upstream)
    synced = {path: entry for path, entry in store.entries(fork).items() if path not in known}
    overlay_writes, removals = plan_overlay(onto, store, synced, rendered.overlay, edited)
    if edited:
        names_shown = "\n".join(f"  {path.relative_to(cfg.repo)}" for path in edited)
        msg = f"the rebase would overwrite:\n{names_shown}"
        raise PatchError(msg, f"patches/{onto.base} has a series already", "move it away, or give --force")
    carry_out(onto, [*overlay_writes, *writes], removals)
    for name in before:
        fate = _fate(before[name], dict(rendered.patches).get(name))
        log.info(f"  {name}: {fate}")
    return [path for path, _, _ in [*overlay_writes, *writes]]


def _fate(old: bytes, new: bytes | None) -> str:
    """How a patch came over: the porting report in one word each."""
    if new is None:
        return "dropped"
    place = re.compile(rb"^(index [0-9a-f]+\.\.[0-9a-f]+.*|@@ .*)$", re.MULTILINE)
    return "same lines" if place.sub(b"", old) == place.sub(b"", new) else "changed"
