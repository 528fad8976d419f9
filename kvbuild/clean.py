"""Removes what was built, and only that."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvbuild import checkout, lock, log
from kvbuild.config import Config
from kvbuild.errors import PatchError, UsageError
from kvbuild.git import Git
from kvbuild.sync import SYNCED


def clean(cfg: Config) -> None:
    """Remove the base's directory; with `cfg.clean_all` everything in the work directory.

    Raises UsageError where kvbuild did not make it, PatchError where a build tree holds work that was not exported.
    """
    bases = [path for path in cfg.work_dir.iterdir() if path.is_dir() and lock.is_ours(path)]
    doomed = bases if cfg.clean_all else [cfg.base_dir]
    for folder in doomed:
        if folder.exists() and not lock.is_ours(folder):
            msg = f"{folder} was not made by kvbuild"
            raise UsageError(msg, todo="remove it by hand if nothing in it is needed")
        if not cfg.force:
            _keep_unexported(folder)
    if cfg.clean_all:
        doomed = [path for path in cfg.work_dir.iterdir() if path.name not in (".lock", lock.MARKER)]
    for path in doomed:
        _remove(path)


def _keep_unexported(folder: Path) -> None:
    if not (folder / "src" / ".git").is_file():
        return
    store = Git(folder / "git")
    tree = checkout.open_tree(store, folder / "src")
    checkout.refuse_local_edits(tree)
    synced = store.resolve(SYNCED)
    if synced and not tree.is_ancestor("HEAD", synced):
        msg = f"{folder / 'src'} has commits that are not in patches/"
        raise PatchError(msg, "they would be lost", "run build.py export first, or clean with --force")


def _remove(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    log.info(f"removing {path}")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
