"""apply: the patched commit, the build tree that follows it, and what must never be overwritten."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild import checkout, patchset, sync
from kvbuild.errors import PatchError
from kvbuild.export import export
from kvbuild.git import init_store
from kvbuild.patchset import apply, patchset_digest
from kvbuild.source import fetch_source
from kvbuild.treeimport import Member, import_tree
from python_tests.tool.fake_upstream import (
    CRLF,
    FILES,
    HEADER,
    HOOK,
    KERNEL,
    OVERLAY_FILES,
    REGISTRY,
    Project,
    Upstream,
    contents,
    git,
    hook_edit,
    make_project,
    snapshot,
    write_files,
)

QUANT = "onnxruntime/contrib/quant.cc"


def age(root: Path) -> None:
    """Date every file back, so that a rewrite cannot hide within the clock's resolution."""
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name != ".git":
            os.utime(path, ns=(10**18, 10**18))


def test_tree_is_upstream_plus_overlay_plus_patches(applied: Project, upstream: Upstream) -> None:
    src = applied.cfg.src
    expected = dict(FILES) | OVERLAY_FILES | {"link": FILES["VERSION_NUMBER"]}
    expected[KERNEL] = FILES[KERNEL].replace(b"int line_20();\n", b"int line_20();\nint hook();\n")
    expected[CRLF] = b"one\r\ntwo and a half\r\nthree\r\n"
    assert contents(src) == expected
    assert (src / "link").readlink() == Path("VERSION_NUMBER")
    assert os.access(src / "tools/run.sh", os.X_OK)
    assert not os.access(src / KERNEL, os.X_OK)
    assert git(src, "status", "--porcelain") == ""
    subjects = git(src, "log", "--format=%s|%an|%cn", "HEAD").splitlines()
    assert [line.split(":")[0] for line in subjects[:2]] == [HOOK, "overlay"]
    assert subjects[0].endswith("|Jürgen Tester|kvbuild")
    assert git(src, "rev-parse", "HEAD~2^{tree}") == upstream.tree


def test_commit_ids_do_not_depend_on_place_time_or_settings(
    applied: Project, tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where a date, a user's identity, or one of these settings leaks into a commit or a file."""
    hostile = tmp_path / ".gitconfig"
    (tmp_path / "hooks").mkdir()
    hook = tmp_path / "hooks" / "applypatch-msg"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    hostile.write_text(
        f'[user]\n\tname = Somebody Else\n[core]\n\tautocrlf = true\n\thooksPath = "{tmp_path}/hooks"\n'
        "[commit]\n\tgpgSign = true\n[am]\n\tthreeWay = true\n[apply]\n\twhitespace = fix\n"
        "[i18n]\n\tcommitEncoding = ISO-8859-1\n[format]\n\tpretty = oneline\n\tsignOff = true\n"
        "[diff]\n\tnoprefix = true\n\tcontext = 1\n\tsuppressBlankEmpty = true\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_COMMITTER_NAME", "Somebody Else")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    other = make_project(tmp_path / "elsewhere", upstream)
    fetch_source(other.cfg, other.base)
    result = apply(other.cfg, other.base)
    assert result.commit == git(applied.cfg.src, "rev-parse", "HEAD")
    assert contents(other.cfg.src) == contents(applied.cfg.src)
    before = contents(other.cfg.patches)
    export(other.cfg, other.base)
    assert contents(other.cfg.patches) == before


def test_git_variables_of_a_hook_lead_nowhere_else(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `git commit` hooks GIT_DIR and GIT_INDEX_FILE name the outer repository: it must stay as it was."""
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    before = contents(outer)
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(outer / ".git" / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(outer))
    fetch_source(project.cfg, project.base)
    apply(project.cfg, project.base)
    assert contents(outer) == before


def test_checkout_by_hand_gives_the_same_bytes(applied: Project) -> None:
    """Upstream's attributes ask for CR LF and expanded `$Id$`; the next move would take such a file for an edit."""
    before = contents(applied.cfg.src)
    for rel in ("tools/fake.sln", REGISTRY):
        (applied.cfg.src / rel).unlink()
    git(applied.cfg.src, "checkout", "--", ".")
    assert contents(applied.cfg.src) == before


def test_second_apply_touches_nothing(applied: Project) -> None:
    age(applied.cfg.src)
    before = snapshot(applied.cfg.src)
    assert apply(applied.cfg, applied.base).touched == 0
    assert snapshot(applied.cfg.src) == before


def test_edit_of_the_overlay_touches_that_file_only(applied: Project) -> None:
    age(applied.cfg.src)
    before = snapshot(applied.cfg.src)
    write_files(applied.cfg.overlay, {QUANT: b"// edited\n", "onnxruntime/contrib/sub/more.cc": b"// more\n"})
    assert apply(applied.cfg, applied.base).touched == 2
    after = snapshot(applied.cfg.src)
    changed = {rel for rel in after if after[rel] != before.get(rel)}
    assert changed == {QUANT, "onnxruntime/contrib/sub/more.cc"}
    assert after[QUANT][1] == b"// edited\n"


def test_removed_overlay_file_and_its_folder_go(applied: Project) -> None:
    shutil.rmtree(applied.cfg.overlay / "onnxruntime")
    assert apply(applied.cfg, applied.base).touched == len(OVERLAY_FILES)
    assert not (applied.cfg.src / "onnxruntime/contrib").exists()
    assert (applied.cfg.src / KERNEL).exists()


def test_compiled_python_is_no_part_of_the_overlay(project: Project) -> None:
    before = patchset_digest(project.cfg, project.base)
    write_files(project.cfg.overlay, {"onnxruntime/python/__pycache__/x.pyc": b"\0"})
    assert patchset_digest(project.cfg, project.base) == before


@pytest.mark.parametrize("staged", [False, True])
def test_uncommitted_edits_are_never_overwritten(applied: Project, staged: bool) -> None:
    src = applied.cfg.src
    write_files(src, {QUANT: b"// precious\n"})
    if staged:
        git(src, "add", "--all")
    write_files(applied.cfg.overlay, {QUANT: b"// from the overlay\n"})
    with pytest.raises(PatchError) as caught:
        apply(applied.cfg, applied.base)
    assert (src / QUANT).read_bytes() == b"// precious\n"
    assert QUANT in caught.value.what
    assert "build.py export" in caught.value.todo
    assert "stash" in caught.value.todo


def test_uncommitted_edit_of_a_file_that_would_stay_is_refused_too(applied: Project) -> None:
    """It would survive the move, but what was staged would not."""
    write_files(applied.cfg.src, {REGISTRY: b"// staged\n"})
    git(applied.cfg.src, "add", "--all")
    write_files(applied.cfg.overlay, {QUANT: b"// from the overlay\n"})
    with pytest.raises(PatchError, match=r"registry\.cc"):
        apply(applied.cfg, applied.base)
    assert git(applied.cfg.src, "diff", "--cached", "--name-only") == REGISTRY


def test_untracked_file_in_the_way_is_kept(applied: Project) -> None:
    write_files(applied.cfg.src, {"onnxruntime/contrib/extra.cc": b"// mine\n"})
    write_files(applied.cfg.overlay, {"onnxruntime/contrib/extra.cc": b"// theirs\n"})
    with pytest.raises(PatchError, match=r"extra\.cc"):
        apply(applied.cfg, applied.base)
    assert (applied.cfg.src / "onnxruntime/contrib/extra.cc").read_bytes() == b"// mine\n"


def test_commits_that_were_not_exported_are_refused_until_they_are(applied: Project) -> None:
    commit = applied.commit("core-registry: register", {REGISTRY: b"void Register();\nvoid More();\n"})
    write_files(applied.cfg.overlay, {QUANT: b"// newer\n"})
    with pytest.raises(PatchError, match="commits that are not in patches/"):
        apply(applied.cfg, applied.base)
    assert git(applied.cfg.src, "rev-parse", "HEAD") == commit
    export(applied.cfg, applied.base)
    apply(applied.cfg, applied.base)
    assert (applied.cfg.src / REGISTRY).read_bytes() == b"void Register();\nvoid More();\n"
    assert (applied.cfg.src / QUANT).read_bytes() == b"// newer\n"


def test_rebase_in_progress_is_left_alone(applied: Project) -> None:
    src = applied.cfg.src
    git(src, "rebase", "--quiet", "-i", "HEAD~1", env={"GIT_SEQUENCE_EDITOR": "sed -i s/^pick/edit/"})
    with pytest.raises(PatchError, match="rebase is in progress"):
        apply(applied.cfg, applied.base)


def test_branch_of_the_user_does_not_move(applied: Project) -> None:
    git(applied.cfg.src, "switch", "--quiet", "-c", "mine")
    mine = git(applied.cfg.src, "rev-parse", "mine")
    write_files(applied.cfg.overlay, {QUANT: b"// newer\n"})
    apply(applied.cfg, applied.base)
    assert git(applied.cfg.src, "rev-parse", "mine") == mine


def test_other_upstream_is_refused_with_its_files(project: Project, tmp_path: Path) -> None:
    """A tag with other contents below the same name, as when the wrong release is given."""
    store = project.cfg.repo_store
    fetch_source(project.cfg, project.base)
    wrong = git(project.upstream.clone, "rev-parse", "v1.1.0^{commit}")
    git(store, "fetch", "--quiet", str(project.upstream.clone), f"+{wrong}:refs/kvq/upstream")
    with pytest.raises(PatchError, match="these files are not those") as caught:
        apply(project.cfg, project.base)
    assert KERNEL in caught.value.what
    assert HOOK in caught.value.what
    assert CRLF not in caught.value.what, "that file is the same in both releases"
    assert not project.cfg.src.exists()


@pytest.mark.parametrize("path", [REGISTRY, "onnxruntime/core", REGISTRY + "/below.h"])
def test_overlay_path_that_upstream_took_is_an_error(project: Project, path: str) -> None:
    fetch_source(project.cfg, project.base)
    write_files(project.cfg.overlay, {path: b"ours\n"})
    with pytest.raises(PatchError, match="upstream has files at paths of the overlay") as caught:
        apply(project.cfg, project.base)
    assert path in caught.value.what
    assert not project.cfg.src.exists()


def test_recorded_tree_must_come_out(project: Project) -> None:
    digest = patchset_digest(project.cfg, project.base)
    project.write_bases(git_patched="1" * 40, patchset=digest)
    fetch_source(project.cfg, project.base)
    with pytest.raises(PatchError, match="not the recorded one") as caught:
        apply(project.cfg, project.base)
    assert "1" * 40 in caught.value.what
    assert not project.cfg.src.exists()


def test_tree_recorded_for_another_patch_set_only_warns(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.write_bases(git_patched="1" * 40, patchset="0" * 64)
    fetch_source(project.cfg, project.base)
    apply(project.cfg, project.base)
    assert "check --update-trees" in capsys.readouterr().err


def test_patch_that_does_not_apply_is_named_and_nothing_moves(applied: Project) -> None:
    patch = applied.cfg.series_dir / f"{HOOK}.patch"
    patch.write_bytes(patch.read_bytes().replace(b" int line_19();", b" int line_xx();"))
    before = snapshot(applied.cfg.src)
    with pytest.raises(PatchError, match=f"{HOOK}.patch does not apply") as caught:
        apply(applied.cfg, applied.base)
    assert KERNEL in caught.value.why
    assert snapshot(applied.cfg.src) == before
    assert sorted(path.name for path in applied.cfg.base_dir.iterdir()) == ["git", "src"]


def test_second_patch_on_the_same_file_follows_the_first(project: Project) -> None:
    """The second patch's old blob is the first one's result, not upstream's."""
    first = project.upstream.clone.parent / "first"
    git(project.upstream.clone, "worktree", "add", "--quiet", "--detach", str(first), "v1.0.0")
    hook_edit(first)
    git(first, "commit", "--quiet", "-a", "-m", "first")
    onto = git(first, "rev-parse", "HEAD")
    git(project.upstream.clone, "worktree", "remove", "--force", str(first))

    def second_edit(tree: Path) -> None:
        path = tree / KERNEL
        path.write_bytes(path.read_bytes().replace(b"int hook();", b"int hook(int);"))

    project.add_patch("core-kernel-argument", second_edit, body=HEADER, onto=onto)
    fetch_source(project.cfg, project.base)
    apply(project.cfg, project.base)
    assert b"int hook(int);" in (project.cfg.src / KERNEL).read_bytes()


def test_work_directory_may_be_moved(applied: Project, tmp_path: Path) -> None:
    applied.cfg.work_dir.rename(tmp_path / "moved")
    moved = replace(applied.cfg, work_dir=tmp_path / "moved")
    assert apply(moved, applied.base).touched == 0
    assert git(moved.src, "status", "--porcelain") == ""


def test_refused_move_leaves_nothing_to_finish(applied: Project) -> None:
    """After the untracked file has gone from the overlay again, it is in nobody's way."""
    write_files(applied.cfg.src, {"onnxruntime/contrib/extra.cc": b"// mine\n"})
    write_files(applied.cfg.overlay, {"onnxruntime/contrib/extra.cc": b"// theirs\n"})
    with pytest.raises(PatchError, match=r"extra\.cc"):
        apply(applied.cfg, applied.base)
    (applied.cfg.overlay / "onnxruntime/contrib/extra.cc").unlink()
    assert apply(applied.cfg, applied.base).touched == 0
    assert (applied.cfg.src / "onnxruntime/contrib/extra.cc").read_bytes() == b"// mine\n"


def test_files_folders_and_submodules_take_each_others_place(tmp_path: Path) -> None:
    """As between the tag, which has submodules, and an archive, which has none."""
    store = init_store(tmp_path / "store")
    link = Member("external/onnx", "160000", b"8" * 40)
    first = import_tree(store, [link, Member("a", "100644", b"file\n"), Member("b/c", "120000", b"d")], "1\n")
    second = import_tree(store, [Member("a/b", "100755", b"x\n"), Member("b", "100644", b"y\n")], "2\n")
    src = tmp_path / "src"
    for commit in (first, second, first):
        checkout.move(store, src, commit, {sync.SYNCED: commit})
        assert git(src, "status", "--porcelain") == ""
        assert git(src, "rev-parse", "HEAD") == commit
        assert (src / "external/onnx").is_dir() == (commit == first)


def test_something_else_at_the_place_of_the_tree_is_refused(project: Project) -> None:
    fetch_source(project.cfg, project.base)
    write_files(project.cfg.src, {"notes.txt": b"mine\n"})
    with pytest.raises(PatchError, match="not a work tree of this tool"):
        apply(project.cfg, project.base)
    assert contents(project.cfg.src) == {"notes.txt": b"mine\n"}


def test_apply_before_fetch_says_so(project: Project) -> None:
    with pytest.raises(PatchError, match="not fetched") as caught:
        patchset.apply(project.cfg, project.base)
    assert caught.value.todo == "run build.py fetch"
