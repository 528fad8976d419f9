"""The build tree: a linked work tree, moved between commits so that unchanged files keep their mtimes.

A move is planned in a journal first, every file is replaced in one step, and HEAD follows last. A run that was killed
in between is finished by the next one; a file that is neither the old nor the new version is the user's and stops it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbuild import log
from kvbuild.errors import EnvironmentProblem, PatchError
from kvbuild.git import EMPTY_TREE, Change, Entry, Git
from kvbuild.sync import SYNCED, write_atomically

TARGET = "refs/kvq/target"
_JOURNAL = "kvq-move.json"
_IN_PROGRESS = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD")
_MAX_LISTED = 10
SUBMODULE = "160000"


def move(store: Git, src: Path, target: str, refs: Mapping[str, str]) -> int:
    """Bring the work tree `src` to the commit `target`; returns how many files were written or removed.

    `refs` are set together with HEAD. Raises PatchError where uncommitted edits, or commits that are not in patches/
    yet, would be lost, and EnvironmentProblem where a file cannot be written.
    """
    touched = _finish_interrupted(store, src)
    if not src.exists() or not any(src.iterdir()):
        _plan(store, EMPTY_TREE, target, refs)
        return _finish_interrupted(store, src)
    tree = open_tree(store, src)
    refuse_local_edits(tree)
    head = tree.text("rev-parse", "HEAD")
    saved = store.tree_of(head) == store.tree_of(target) or any(
        store.resolve(ref) and store.is_ancestor(head, ref) for ref in (SYNCED, TARGET)
    )
    if not saved:
        msg = f"{src} has commits that are not in patches/ yet"
        raise PatchError(msg, "they would be dropped", "run `build.py export` first")
    _pending(src, store.changes(head, target))  # before there is a plan: a refusal must leave nothing to finish
    _plan(store, head, target, refs)
    return touched + _finish_interrupted(store, src)


def _plan(store: Git, old: str, new: str, refs: Mapping[str, str]) -> None:
    store.set_ref(TARGET, new)  # protects the new commits from `git gc` in the build tree
    plan = {"from": old, "to": new, "refs": dict(refs)}
    write_atomically(store.git_dir / _JOURNAL, json.dumps(plan).encode())


def open_tree(store: Git, src: Path) -> Git:
    """The work tree's own repository handle. PatchError where `src` is something else."""
    tree = Git(src / ".git", src)
    if not (src / ".git").is_file():
        msg = f"{src} exists but is not a work tree of this tool"
        raise PatchError(msg, "something else was put there", "move it away and run again")
    _follow_move(store, src)
    if _common_dir(tree) != store.git_dir.resolve():
        msg = f"{src} belongs to another repository than {store.git_dir}"
        raise PatchError(msg, "something else was put there", "move it away and run again")
    return tree


def _follow_move(store: Git, src: Path) -> None:
    """Tie the work tree to `store` again after the work directory was moved or copied as a whole.

    `git worktree repair` of common git versions gives up where both ends have moved.
    """
    own_file = src / ".git"
    told = Path(own_file.read_text(encoding="utf-8").strip().removeprefix("gitdir: "))
    admin = store.git_dir / "worktrees" / told.name
    moved = not (told / "gitdir").exists() or (told / "gitdir").read_text(encoding="utf-8").strip() != str(own_file)
    if moved and admin.is_dir():
        write_atomically(admin / "gitdir", f"{own_file}\n".encode())
        write_atomically(own_file, f"gitdir: {admin}\n".encode())


def _common_dir(tree: Git) -> Path | None:
    done = tree.run("rev-parse", "--path-format=absolute", "--git-common-dir", check=False)
    return Path(os.fsdecode(done.stdout).rstrip("\n")).resolve() if done.returncode == 0 else None


def _admin(tree: Git) -> Path:
    """Where git keeps HEAD and the index of this work tree."""
    return Path(tree.text("rev-parse", "--absolute-git-dir"))


def refuse_local_edits(tree: Git) -> None:
    """PatchError where tracked files were changed without a commit, or a rebase and the like is under way."""
    admin = _admin(tree)
    for name in _IN_PROGRESS:
        if (admin / name).exists():
            msg = f"{tree.work_tree}: a {name.split('_')[0].split('-')[0].lower()} is in progress"
            raise PatchError(msg, todo="finish or abort it, then run again")
    edited = [row[3:] for row in tree.fields("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no")]
    if edited:
        msg = f"{tree.work_tree} has edits that were not committed:\n{_listed(edited)}"
        at = f"git -C {shlex.quote(str(tree.work_tree))}"
        todo = f"keep them: `{at} commit -a` and then `build.py export`; or set them aside: `{at} stash`"
        raise PatchError(msg, "they would be overwritten", todo)


def _listed(paths: list[str]) -> str:
    more = [f"and {len(paths) - _MAX_LISTED} more"] if len(paths) > _MAX_LISTED else []
    return "\n".join(f"  {line}" for line in [*paths[:_MAX_LISTED], *more])


def _finish_interrupted(store: Git, src: Path) -> int:
    """Carry out the journal, if there is one; returns the number of files written or removed."""
    journal = store.git_dir / _JOURNAL
    if not journal.exists():
        return 0
    plan = json.loads(journal.read_text(encoding="utf-8"))
    if plan["from"] == EMPTY_TREE and (src / ".git").exists() and not _common_dir(Git(src / ".git", src)):
        (src / ".git").unlink()  # written by a `worktree add` that did not get to its end
    if not (src / ".git").exists():
        src.mkdir(parents=True, exist_ok=True)
        plan["from"] = EMPTY_TREE  # whatever was written before, it is gone
        # Forced twice: a run killed inside this command leaves a record of `src` that git keeps locked.
        store.run("worktree", "add", "--quiet", "--no-checkout", "--detach", "--force", "--force", src, plan["to"])
    tree = open_tree(store, src)
    changes = store.changes(plan["from"], plan["to"])
    pending = _pending(src, changes)
    try:
        _remove(src, [change.path for change in pending if change.new is None])
        _write(store, src, [change for change in pending if change.new is not None])
    except OSError as exc:
        msg = f"{exc.filename or src}: {exc.strerror}"
        todo = "free the space or fix the permission and run again: it goes on where it stopped"
        raise EnvironmentProblem(msg, "the patched source could not be written completely", todo) from exc
    (_admin(tree) / "index.lock").unlink(missing_ok=True)  # the journal says that only we were at it
    tree.run("read-tree", "--reset", plan["to"])
    tree.run("update-index", "-q", "--refresh", check=False)
    tree.run("update-ref", "--no-deref", "-m", "kvbuild: move", "HEAD", plan["to"])
    for ref, commit in plan["refs"].items():
        store.set_ref(ref, commit)
    journal.unlink()
    return len(pending)


def _pending(src: Path, changes: Iterable[Change]) -> list[Change]:
    """Changes still to be made. PatchError where a file is neither version: it is the user's."""
    pending, foreign = [], []
    for change in changes:
        found = _on_disk(src / change.path, change)
        if found == change.new:
            continue
        if found is None or found == change.old:
            pending.append(change)
        else:
            foreign.append(change.path)
    if foreign:
        msg = f"{src} has files of yours where others have to be written:\n{_listed(foreign)}"
        raise PatchError(msg, "they would be overwritten", "move them to another place and run again")
    return pending


def _on_disk(path: Path, change: Change) -> Entry | None:
    """What git would record for the file; None where there is none. An empty folder stands for any submodule."""
    if path.is_dir() and not path.is_symlink():
        return next((side for side in (change.new, change.old) if side and side.mode == SUBMODULE), None)
    if path.is_symlink():
        return Entry("120000", _blob_id(os.fsencode(path.readlink())))
    if path.is_file():
        return Entry("100755" if path.stat().st_mode & 0o100 else "100644", _blob_id(path.read_bytes()))
    return None


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()


def _remove(src: Path, paths: list[str]) -> None:
    for rel in paths:
        path = src / rel
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
        elif not any(path.iterdir()):  # a submodule that nobody filled
            path.rmdir()
        for folder in path.parents:
            if folder == src or any(folder.iterdir()):
                break
            folder.rmdir()


def _write(store: Git, src: Path, changes: list[Change]) -> None:
    entries = [(change.path, change.new) for change in changes if change.new]
    for rel, entry in entries:
        if entry.mode == SUBMODULE:
            (src / rel).mkdir(parents=True, exist_ok=True)
    files = [(rel, entry) for rel, entry in entries if entry.mode != SUBMODULE]
    contents = store.blobs([entry.oid for _, entry in files])
    for (rel, entry), data in zip(files, contents, strict=True):
        path = src / rel
        if entry.mode == "120000":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(os.fsdecode(data))
        else:
            write_atomically(path, data, 0o755 if entry.mode == "100755" else 0o644)
    if files:
        log.debug(f"wrote {len(files)} files below {src}")
