"""apply, interrupted: killed between files, out of disk space, and edited before the next run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvbuild import sync
from kvbuild.errors import EnvironmentProblem, PatchError
from kvbuild.patchset import apply
from kvbuild.source import fetch_source
from python_tests.tool.fake_upstream import OVERLAY_FILES, REGISTRY, Project, contents, git, write_files

QUANT = "onnxruntime/contrib/quant.cc"


class Killed(BaseException):
    """Stands for a kill: nothing in kvbuild may handle it."""


def apply_until(project: Project, monkeypatch: pytest.MonkeyPatch, count: int, stop: BaseException) -> None:
    """apply, stopped by `stop` once it has written `count` files of the build tree."""
    left = count

    def counted(path: Path, data: bytes, mode: int | None = None) -> None:
        nonlocal left
        if mode is not None:
            if left == 0:
                raise stop
            left -= 1
        sync.write_atomically(path, data, mode)

    with monkeypatch.context() as patch:
        patch.setattr("kvbuild.checkout.write_atomically", counted)
        apply(project.cfg, project.base)


@pytest.mark.parametrize("count", range(4))
def test_move_goes_on_where_it_stopped(project: Project, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    fetch_source(project.cfg, project.base)
    with pytest.raises(Killed):
        apply_until(project, monkeypatch, count, Killed())
    result = apply(project.cfg, project.base)
    assert git(project.cfg.src, "rev-parse", "HEAD") == result.commit
    assert git(project.cfg.src, "status", "--porcelain") == ""


def test_edit_made_between_a_kill_and_the_next_run_is_kept(applied: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a half-made move git sees edits everywhere; only a file that is neither version is the user's."""
    for rel in OVERLAY_FILES:
        write_files(applied.cfg.overlay, {rel: b"// next version\n"})
    with pytest.raises(Killed):
        apply_until(applied, monkeypatch, 1, Killed())
    write_files(applied.cfg.src, {QUANT: b"// precious\n"})
    with pytest.raises(PatchError) as caught:
        apply(applied.cfg, applied.base)
    assert caught.value.what.splitlines()[1:] == [f"  {QUANT}"]
    assert (applied.cfg.src / QUANT).read_bytes() == b"// precious\n"
    write_files(applied.cfg.src, {QUANT: OVERLAY_FILES[QUANT]})
    apply(applied.cfg, applied.base)
    assert (applied.cfg.src / QUANT).read_bytes() == b"// next version\n"


def test_full_disk_leaves_whole_files_and_the_next_run_finishes(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_source(project.cfg, project.base)
    with pytest.raises(EnvironmentProblem, match="No space left") as caught:
        apply_until(project, monkeypatch, 2, OSError(28, "No space left on device", "kernel.cc"))
    assert "run again" in caught.value.todo
    partial = contents(project.cfg.src)
    apply(project.cfg, project.base)
    whole = contents(project.cfg.src)
    assert partial.items() <= whole.items()
    assert len(partial) < len(whole)


def test_tree_deleted_after_a_kill_is_written_in_full(applied: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted move covers two files only; the others have to come back as well."""
    for rel in OVERLAY_FILES:
        write_files(applied.cfg.overlay, {rel: b"// next version\n"})
    with pytest.raises(Killed):
        apply_until(applied, monkeypatch, 1, Killed())
    shutil.rmtree(applied.cfg.src)
    apply(applied.cfg, applied.base)
    assert git(applied.cfg.src, "status", "--porcelain") == ""
    assert (applied.cfg.src / REGISTRY).exists()


def test_half_made_work_tree_is_made_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure inside `git worktree add` leaves: a link to a record that is not complete, and locked."""
    fetch_source(project.cfg, project.base)
    with pytest.raises(Killed):
        apply_until(project, monkeypatch, 0, Killed())
    record = project.cfg.repo_store / "worktrees" / "src"
    (record / "commondir").unlink()
    (record / "locked").write_text("initializing")
    apply(project.cfg, project.base)
    assert git(project.cfg.src, "status", "--porcelain") == ""
