"""export: the inverse of apply, to the byte, and what it refuses."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild.errors import EnvironmentProblem, PatchError
from kvbuild.export import export, export_mbox, series_text
from kvbuild.patchset import apply
from kvbuild.source import fetch_source
from python_tests.tool.fake_upstream import (
    CRLF,
    FILES,
    HOOK,
    KERNEL,
    OVERLAY_FILES,
    REGISTRY,
    Project,
    contents,
    git,
    write_files,
)

QUANT = "onnxruntime/contrib/quant.cc"
MORE = b"void Register();\nvoid More();\n"


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_export_of_what_was_applied_gives_identical_bytes(applied: Project) -> None:
    """Also proves that git format-patch, called by hand with the documented flags, gives the same file."""
    before = contents(applied.cfg.patches)
    result = export(applied.cfg, applied.base)
    assert (result.written, result.removed) == ((), ())
    assert contents(applied.cfg.patches) == before


def test_exported_patches_apply_to_the_same_tree(applied: Project) -> None:
    applied.commit("core-registry: register more", {REGISTRY: MORE, CRLF: FILES[CRLF].replace(b"two", b"2")})
    tree = git(applied.cfg.src, "rev-parse", "HEAD^{tree}")
    export(applied.cfg, applied.base)
    assert apply(applied.cfg, applied.base).tree == tree
    again = replace(applied.cfg, work_dir=applied.cfg.work_dir.with_name("second work dir"))
    fetch_source(again, applied.base)
    assert apply(again, applied.base).tree == tree


def test_new_commit_becomes_a_patch_at_the_end_of_the_series(applied: Project) -> None:
    before = contents(applied.cfg.patches)
    applied.commit("core-registry: register more", {REGISTRY: MORE})
    export(applied.cfg, applied.base)
    after = contents(applied.cfg.patches)
    assert changed(before, after) == {"v1.0.0/series", "v1.0.0/core-registry.patch"}
    assert after["v1.0.0/series"] == before["v1.0.0/series"] + b"core-registry.patch\n"
    text = after["v1.0.0/core-registry.patch"]
    assert text.startswith(
        b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\nFrom: =?UTF-8?q?J=C3=BCrgen=20Tester?= <"
    )
    assert b"\nSubject: core-registry: register more\n" in text
    assert text.endswith(b"+void More();\n")


def test_amended_commit_changes_its_patch_only(applied: Project) -> None:
    before = contents(applied.cfg.patches)
    write_files(applied.cfg.src, {KERNEL: FILES[KERNEL].replace(b"line_20();", b"line_20(); int hook(long);")})
    git(applied.cfg.src, "commit", "--quiet", "--amend", "-a", "--no-edit")
    export(applied.cfg, applied.base)
    assert changed(before, contents(applied.cfg.patches)) == {f"v1.0.0/{HOOK}.patch"}


def test_dropped_commit_removes_its_patch(applied: Project) -> None:
    git(applied.cfg.src, "reset", "--quiet", "--hard", "HEAD~1")
    result = export(applied.cfg, applied.base)
    assert result.removed == (f"v1.0.0/{HOOK}.patch",)
    assert applied.series.read_bytes() == b"# what is applied, in order\n"
    apply(applied.cfg, applied.base)
    assert (applied.cfg.src / KERNEL).read_bytes() == FILES[KERNEL]


def test_reordered_commits_reorder_the_series(applied: Project) -> None:
    applied.commit("core-registry: register more", {REGISTRY: MORE})
    reverse = {"GIT_SEQUENCE_EDITOR": "sed -i -e '1{h;d}' -e '2{G}'"}
    git(applied.cfg.src, "rebase", "--quiet", "-i", "HEAD~2", env=reverse)
    before = contents(applied.cfg.patches)
    export(applied.cfg, applied.base)
    assert applied.series.read_text().splitlines()[1:] == ["core-registry.patch", f"{HOOK}.patch"]
    assert changed(before, contents(applied.cfg.patches)) == {"v1.0.0/series", "v1.0.0/core-registry.patch"}


def test_new_files_and_overlay_edits_go_to_the_overlay(applied: Project) -> None:
    """The commit's edit of an upstream file stays a patch; the patch must not hold the other two."""
    new = "onnxruntime/contrib/sub dir/new ñ.cc"
    applied.commit("core-registry: use the new file", {REGISTRY: MORE, new: b"// new\n", QUANT: b"// edited\n"})
    git(applied.cfg.src, "update-index", "--chmod=+x", new)
    (applied.cfg.src / new).chmod(0o755)
    git(applied.cfg.src, "commit", "--quiet", "--amend", "--no-edit")
    export(applied.cfg, applied.base)
    assert (applied.cfg.overlay / new).read_bytes() == b"// new\n"
    assert (applied.cfg.overlay / new).stat().st_mode & 0o111
    assert (applied.cfg.overlay / QUANT).read_bytes() == b"// edited\n"
    text = (applied.cfg.series_dir / "core-registry.patch").read_text(encoding="utf-8")
    assert text.count("diff --git") == 1
    assert apply(applied.cfg, applied.base).touched == 0


def test_removed_upstream_file_and_changed_mode_come_back(applied: Project) -> None:
    """Neither has a `+` line, and a change of mode has no `index` line."""
    src = applied.cfg.src
    (src / "tools/run.sh").chmod(0o644)
    applied.commit("tools-drop: remove a file and a mode", {REGISTRY: None})
    tree = git(src, "rev-parse", "HEAD^{tree}")
    export(applied.cfg, applied.base)
    (src / "tools/run.sh").chmod(0o755)
    git(src, "reset", "--quiet", "--hard", "HEAD~1")
    assert apply(applied.cfg, applied.base).tree == tree
    assert not (src / REGISTRY).exists()
    assert not (src / "tools/run.sh").stat().st_mode & 0o111


def test_commit_to_the_overlay_alone_gives_no_patch(applied: Project) -> None:
    """Its subject need not name a patch file, and no file is removed with it."""
    before = contents(applied.cfg.patches)
    applied.commit("Whatever Subject", {QUANT: b"// edited\n", "onnxruntime/contrib/quant ä.h": None})
    export(applied.cfg, applied.base)
    expected = {f"overlay/{QUANT}", "overlay/onnxruntime/contrib/quant ä.h"}
    assert changed(before, contents(applied.cfg.patches)) == expected
    assert not (applied.cfg.overlay / "onnxruntime/contrib/quant ä.h").exists()


def test_two_exports_in_a_row_need_no_apply_between(applied: Project) -> None:
    for text in (b"// first\n", b"// second\n"):
        applied.commit("core-registry: again", {QUANT: text})
        export(applied.cfg, applied.base)
        assert (applied.cfg.overlay / QUANT).read_bytes() == text


def test_source_fetched_since_does_not_lock_commits_in(applied: Project) -> None:
    """apply refuses to drop the commit, so export must not need the next apply."""
    applied.commit("core-registry: register more", {REGISTRY: MORE})
    archive = replace(applied.cfg, source=str(applied.upstream.archive))
    fetch_source(archive, applied.base)
    with pytest.raises(PatchError, match="not in patches/"):
        apply(archive, applied.base)
    export(archive, applied.base)
    assert (applied.cfg.series_dir / "core-registry.patch").exists()
    apply(archive, applied.base)
    assert (applied.cfg.src / REGISTRY).read_bytes() == MORE
    assert not (applied.cfg.src / "dropped").exists()


@pytest.mark.parametrize("subject", ["fixup! core-kernel-hook: call the overlay", "squash! x", "amend! x"])
def test_commits_to_be_squashed_are_refused(applied: Project, subject: str) -> None:
    before = contents(applied.cfg.patches)
    applied.commit(subject, {REGISTRY: MORE})
    with pytest.raises(PatchError, match=subject.split()[0]) as caught:
        export(applied.cfg, applied.base)
    assert "--autosquash" in caught.value.todo
    assert contents(applied.cfg.patches) == before


def test_autosquash_as_the_message_says_then_exports(applied: Project) -> None:
    applied.commit(f"fixup! {HOOK}: call the overlay", {REGISTRY: MORE})
    with pytest.raises(PatchError) as caught:
        export(applied.cfg, applied.base)
    command = caught.value.todo.partition(": git ")[2].split()
    git(applied.cfg.src, *command, env={"GIT_SEQUENCE_EDITOR": "true"})
    export(applied.cfg, applied.base)
    assert REGISTRY in (applied.cfg.series_dir / f"{HOOK}.patch").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "subject", ["No Name At All", "Upper-Case: x", f"{'a' * 51}: too long", "under_score: x", "name-only:", "a: "]
)
def test_subject_that_names_no_file_is_refused(applied: Project, subject: str) -> None:
    applied.commit(subject, {REGISTRY: MORE})
    with pytest.raises(PatchError, match="does not name a patch file"):
        export(applied.cfg, applied.base)


def test_two_commits_with_one_name_are_refused(applied: Project) -> None:
    applied.commit(f"{HOOK}: again", {REGISTRY: MORE})
    with pytest.raises(PatchError, match=f"two commits are named {HOOK}"):
        export(applied.cfg, applied.base)


def test_merge_commit_is_refused(applied: Project) -> None:
    src = applied.cfg.src
    head = git(src, "rev-parse", "HEAD")
    applied.commit("core-registry: more", {REGISTRY: MORE})
    side = git(src, "rev-parse", "HEAD")
    git(src, "checkout", "--quiet", head)
    git(src, "merge", "--quiet", "--no-ff", "-m", "merge", side)
    with pytest.raises(PatchError, match="merge commits"):
        export(applied.cfg, applied.base)


def test_history_without_the_overlay_commit_is_refused(applied: Project) -> None:
    git(applied.cfg.src, "checkout", "--quiet", "HEAD~2")
    with pytest.raises(PatchError, match="does not hold the overlay commit"):
        export(applied.cfg, applied.base)


@pytest.mark.parametrize("tracked", [True, False])
def test_uncommitted_files_are_refused(applied: Project, tracked: bool) -> None:
    before = contents(applied.cfg.patches)
    write_files(applied.cfg.src, {REGISTRY if tracked else "stray.cc": b"// mine\n"})
    with pytest.raises(PatchError, match="registry.cc" if tracked else "stray.cc"):
        export(applied.cfg, applied.base)
    assert contents(applied.cfg.patches) == before


def test_ignored_files_and_compiled_python_do_not_count_as_stray(applied: Project) -> None:
    write_files(applied.cfg.src, {"build.generated": b"", "tools/__pycache__/script.pyc": b""})
    export(applied.cfg, applied.base)


def test_edit_on_both_sides_is_refused_and_kept(applied: Project) -> None:
    applied.commit("core-registry: mine", {QUANT: b"// in the tree\n"})
    write_files(applied.cfg.overlay, {QUANT: b"// in patches\n"})
    before = contents(applied.cfg.patches)
    with pytest.raises(PatchError, match="edited since they were last applied") as caught:
        export(applied.cfg, applied.base)
    assert QUANT in caught.value.what
    assert contents(applied.cfg.patches) == before


def test_overlay_edit_in_patches_alone_survives_an_export(applied: Project) -> None:
    """patches/ is ahead of the build tree there: an export of something else must not turn it back."""
    write_files(applied.cfg.overlay, {QUANT: b"// in patches\n", "onnxruntime/contrib/own.cc": b"// new\n"})
    applied.commit("core-registry: more", {REGISTRY: MORE})
    export(applied.cfg, applied.base)
    assert (applied.cfg.overlay / QUANT).read_bytes() == b"// in patches\n"
    assert (applied.cfg.overlay / "onnxruntime/contrib/own.cc").exists()
    assert (applied.cfg.series_dir / "core-registry.patch").exists()


@pytest.mark.parametrize("how", ["edited", "added", "series"])
def test_series_edited_since_apply_is_refused_and_kept(applied: Project, how: str) -> None:
    patch = applied.cfg.series_dir / f"{HOOK}.patch"
    if how == "edited":
        patch.write_bytes(patch.read_bytes().replace(b"nothing here", b"nothing at all here"))
    elif how == "added":
        shutil.copy(patch, patch.with_name("core-other.patch"))
    else:
        applied.series.write_text("# emptied by hand\n")
    before = contents(applied.cfg.patches)
    with pytest.raises(PatchError, match="edited since they were last applied"):
        export(applied.cfg, applied.base)
    assert contents(applied.cfg.patches) == before


def test_header_edited_by_hand_is_taken_by_the_next_apply(applied: Project) -> None:
    patch = applied.cfg.series_dir / f"{HOOK}.patch"
    edited = patch.read_bytes().replace(b"nothing here", b"nothing at all here")
    patch.write_bytes(edited)
    assert apply(applied.cfg, applied.base).touched == 0
    export(applied.cfg, applied.base)
    assert patch.read_bytes() == edited


def test_export_without_a_build_tree_says_what_to_run(project: Project) -> None:
    fetch_source(project.cfg, project.base)
    with pytest.raises(PatchError) as caught:
        export(project.cfg, project.base)
    assert caught.value.todo == "run build.py apply"


def test_full_disk_keeps_the_old_file_and_a_second_export_finishes(
    applied: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied.commit("core-registry: more", {REGISTRY: MORE, QUANT: b"// edited\n"})
    before = contents(applied.cfg.patches)
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "core-registry" in path.name:
            raise OSError(28, "No space left on device", str(path))
        return real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(EnvironmentProblem, match="No space left"):
            export(applied.cfg, applied.base)
    assert changed(before, contents(applied.cfg.patches)) == {f"overlay/{QUANT}"}
    export(applied.cfg, applied.base)
    assert (applied.cfg.series_dir / "core-registry.patch").exists()


def test_mailbox_gives_the_patched_tree_on_a_plain_checkout(applied: Project, tmp_path: Path) -> None:
    out = export_mbox(applied.cfg, applied.base, tmp_path / "all of it.mbox")
    plain = tmp_path / "plain"
    git(tmp_path, "clone", "--quiet", str(applied.upstream.clone), str(plain))
    git(plain, "checkout", "--quiet", "v1.0.0")
    git(plain, "am", "--quiet", "--keep-cr", str(out))
    assert git(plain, "rev-parse", "HEAD^{tree}") == git(applied.cfg.src, "rev-parse", "HEAD^{tree}")
    assert set(OVERLAY_FILES) <= set(git(plain, "ls-files", "-z").split("\0"))


def test_series_keeps_its_comments() -> None:
    old = "# head\n\na.patch\n# about b\nb.patch\nc.patch\n# tail\n"
    assert series_text(old, ["a", "b", "c"]) == old
    assert series_text(old, ["b", "a"]) == "# head\n\n# about b\nb.patch\na.patch\n# tail\n"
    assert series_text(old, ["c"]) == "# head\n\nc.patch\n# tail\n"
    assert series_text("", ["a"]) == "a.patch\n"
