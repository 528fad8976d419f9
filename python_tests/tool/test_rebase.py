"""rebase --onto: the series on another release, and what happens where it conflicts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild.config import Config, load_base
from kvbuild.errors import KvBuildError, PatchError, UsageError
from kvbuild.patchset import apply
from kvbuild.rebase import rebase
from kvbuild.source import fetch_source
from python_tests.tool.fake_upstream import HOOK, KERNEL, REGISTRY, Project, bases_toml, git, write_files

Onto = Callable[[str], Config]


@pytest.fixture
def onto(applied: Project) -> Onto:
    """Adds a release to bases.toml; gives the options of a rebase onto it."""

    def add(version: str) -> Config:
        text = bases_toml(
            applied.upstream, git_upstream="", commit=git(applied.upstream.clone, "rev-parse", f"v{version}^{{commit}}")
        )
        path = applied.cfg.patches / "bases.toml"
        table = text.replace("1.0.0", version).replace(applied.upstream.archive_tree, "")
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{table}", encoding="utf-8")
        return replace(applied.cfg, onto=f"v{version}", source="git")

    return add


def apply_on(cfg: Config, name: str) -> Path:
    """Fetch and apply another base with the series that the rebase wrote."""
    target = replace(cfg, base=name, onto=None)
    fetch_source(target, load_base(target))
    apply(target, load_base(target))
    return target.src


def test_moved_lines_are_followed(applied: Project, onto: Onto, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = onto("1.1.0")
    written = rebase(cfg, applied.base)
    folder = cfg.patches / "v1.1.0"
    assert {path.name for path in written} == {f"{HOOK}.patch", "series"}
    assert (folder / "series").read_bytes() == applied.series.read_bytes()
    assert "same lines" in capsys.readouterr().err
    old, new = (path / f"{HOOK}.patch" for path in (applied.cfg.series_dir, folder))
    assert b"@@ -18,6 +18,7 @@" in old.read_bytes()
    assert b"@@ -19,6 +19,7 @@" in new.read_bytes()
    assert old.read_bytes().partition(b"\ndiff ")[0] == new.read_bytes().partition(b"\ndiff ")[0]
    kernel = (apply_on(cfg, "v1.1.0") / KERNEL).read_text(encoding="utf-8")
    assert kernel.startswith("// a new first line\n")
    assert "int line_20();\nint hook();\n" in kernel
    assert not (cfg.work_dir / "v1.1.0" / "rebase").exists()


def test_old_base_is_not_needed_afterwards(applied: Project, onto: Onto) -> None:
    """A repository that borrowed the old one's objects would be broken by its removal."""
    cfg = onto("1.1.0")
    rebase(cfg, applied.base)
    shutil.rmtree(applied.cfg.base_dir)
    assert (apply_on(cfg, "v1.1.0") / KERNEL).exists()


def test_conflict_stays_for_the_user_and_the_same_command_finishes(applied: Project, onto: Onto) -> None:
    cfg = onto("2.0.0")
    with pytest.raises(PatchError, match="patch 1 of 1 does not merge onto") as caught:
        rebase(cfg, applied.base)
    assert KERNEL in caught.value.what
    assert not (cfg.patches / "v2.0.0").exists()
    work = cfg.work_dir / "v2.0.0" / "rebase"
    assert str(work) in caught.value.todo
    assert "<<<<<<<" in (work / KERNEL).read_text(encoding="utf-8")
    with pytest.raises(PatchError, match="does not merge"):
        rebase(cfg, applied.base)

    lines = [line for line in (work / KERNEL).read_text(encoding="utf-8").splitlines() if line[:7] not in MARKERS]
    resolved = [line for line in lines if line != "int line_20();"]
    (work / KERNEL).write_text("\n".join(resolved) + "\n", encoding="utf-8")
    git(work, "add", "--all")
    git(work, "am", "--continue")
    rebase(cfg, applied.base)
    text = (apply_on(cfg, "v2.0.0") / KERNEL).read_text(encoding="utf-8")
    assert "int renamed_20();\nint hook();\n" in text


MARKERS = ("<" * 7, "=" * 7, ">" * 7, "|" * 7)


def test_overlay_edit_made_while_resolving_is_written_back(applied: Project, onto: Onto) -> None:
    cfg = onto("2.0.0")
    with pytest.raises(PatchError):
        rebase(cfg, applied.base)
    work = cfg.work_dir / "v2.0.0" / "rebase"
    git(work, "checkout", "--quiet", "--ours", "--", KERNEL)
    write_files(work, {"onnxruntime/contrib/quant.cc": b"// ported\n", REGISTRY: b"// hooked here instead\n"})
    git(work, "add", "--all")
    git(work, "am", "--continue")
    rebase(cfg, applied.base)
    assert (cfg.overlay / "onnxruntime/contrib/quant.cc").read_bytes() == b"// ported\n"
    assert REGISTRY in (cfg.patches / "v2.0.0" / f"{HOOK}.patch").read_text(encoding="utf-8")


def test_aborted_merge_writes_nothing(applied: Project, onto: Onto) -> None:
    cfg = onto("2.0.0")
    with pytest.raises(PatchError):
        rebase(cfg, applied.base)
    git(cfg.work_dir / "v2.0.0" / "rebase", "am", "--abort")
    with pytest.raises(PatchError, match="no patch is left"):
        rebase(cfg, applied.base)
    assert not (cfg.patches / "v2.0.0").exists()


def test_series_that_is_there_already_is_not_overwritten(applied: Project, onto: Onto) -> None:
    cfg = onto("1.1.0")
    write_files(cfg.patches / "v1.1.0", {"series": b"# by hand\n"})
    with pytest.raises(PatchError, match="would overwrite"):
        rebase(cfg, applied.base)
    assert (cfg.patches / "v1.1.0" / "series").read_bytes() == b"# by hand\n"
    rebase(replace(cfg, force=True), applied.base)
    assert f"{HOOK}.patch" in (cfg.patches / "v1.1.0" / "series").read_text()


def test_overlay_path_that_the_new_release_took_is_an_error(applied: Project, onto: Onto) -> None:
    cfg = onto("1.1.0")
    write_files(cfg.overlay, {REGISTRY: b"// ours\n"})
    with pytest.raises(KvBuildError, match="upstream has files at paths of the overlay"):
        rebase(cfg, applied.base)


@pytest.mark.parametrize("name", ["", "v1.0.0", "v9.9.9"])
def test_target_must_be_another_known_base(applied: Project, name: str) -> None:
    with pytest.raises(UsageError):
        rebase(replace(applied.cfg, onto=name), applied.base)
