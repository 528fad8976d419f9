"""check: every rule finds its fault, and none is found in a sound patch set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvbuild.check import check, lint, set_value
from kvbuild.config import read_toml
from kvbuild.errors import PatchError
from kvbuild.patchfile import parse_patch
from kvbuild.patchset import apply, patchset_digest
from kvbuild.source import fetch_source
from python_tests.tool.fake_upstream import HEADER, HOOK, KERNEL, REGISTRY, Project, git, write_files

Edit = Callable[[bytes], bytes]


def edit_patch(project: Project, edit: Edit) -> None:
    path = project.cfg.series_dir / f"{HOOK}.patch"
    before = path.read_bytes()
    path.write_bytes(edit(before))
    assert path.read_bytes() != before, "the test's edit did nothing"


def swap(old: str, new: str) -> Edit:
    return lambda data: data.replace(old.encode(), new.encode())


def test_sound_patch_set_has_no_fault(applied: Project) -> None:
    assert lint(applied.cfg) == []
    check(replace(applied.cfg, update_trees=True), applied.base)
    check(applied.cfg, applied.base)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        pytest.param(swap("From 0000000", "From 1234567"), "carries a commit id", id="commit-id"),
        pytest.param(swap("Subject: core", "Subject: [PATCH 1/2] core"), "starts with a bracket", id="patch-number"),
        pytest.param(swap("Subject: core-kernel-hook", "Subject: core-hook"), "names core-hook.patch", id="other-name"),
        pytest.param(swap("Subject: core-kernel-hook:", "Subject: Hook the kernel"), "does not name", id="no-name"),
        pytest.param(swap("Upstream-Status: I", "Upstream-State: I"), "one trailer `Upstream-Status:`", id="no-status"),
        pytest.param(swap("Inappropriate [belongs to the test]", "Maybe [x]"), "Maybe", id="unknown-status"),
        pytest.param(swap(" [belongs to the test]", ""), "Upstream-Status", id="status-without-reason"),
        pytest.param(swap("[belongs to the test]", "[]"), "Upstream-Status", id="empty-reason"),
        pytest.param(swap("Covered-By", "Seen-By"), "needs a trailer `Covered-By:`", id="no-test"),
        pytest.param(swap("test_hook.py", "test_gone.py"), "test_gone.py, which does not exist", id="missing-test"),
        pytest.param(swap(HEADER.split("\n\n")[0].strip(), "x"), "does not say why", id="no-reason"),
        pytest.param(swap("+int hook();", "+int hook(); "), "adds trailing white space", id="trailing-space"),
        pytest.param(swap("+two and a half\r", "+two and a half\t\r"), "trailing white space", id="tab-before-cr"),
        pytest.param(lambda data: data.replace(b"\nUpstream calls", b"\n\xff"), "not UTF-8", id="latin-1"),
    ],
)
def test_faults_of_a_patch_are_found_without_source(project: Project, edit: Edit, fault: str) -> None:
    edit_patch(project, edit)
    with pytest.raises(PatchError) as caught:
        check(replace(project.cfg, no_source=True), project.base)
    assert fault in caught.value.what
    assert f"v1.0.0/{HOOK}.patch" in caught.value.what


def test_every_fault_is_listed_at_once(project: Project) -> None:
    edit_patch(project, swap("Covered-By", "Seen-By"))
    edit_patch(project, swap("From 0000000", "From 1234567"))
    write_files(project.cfg.overlay, {"onnxruntime/contrib/bad.cc": b"int x; \n"})
    assert len(lint(project.cfg)) == 3


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"int x; \n", "white space in line 1"), (b"int x;\r\n", "CR"), (b"int x;", "newline"), (b"\xff\n", "UTF-8")],
)
def test_faults_of_overlay_text_are_found(project: Project, content: bytes, fault: str) -> None:
    write_files(project.cfg.overlay, {"onnxruntime/contrib/bad.cc": content, "onnxruntime/test/model.onnx": content})
    found = lint(project.cfg)
    assert len(found) == 1, "a binary file is no text"
    assert fault in found[0]
    assert "bad.cc" in found[0]


def test_series_and_files_must_agree_in_both_directions(project: Project) -> None:
    (project.cfg.series_dir / "core-unlisted.patch").write_bytes(b"From x\n\ny")
    with project.series.open("a") as stream:
        stream.write("core-missing.patch\n")
    assert lint(project.cfg) == [
        "v1.0.0/series lists core-missing.patch, which does not exist",
        "v1.0.0/core-unlisted.patch is not listed in the series",
    ]


@pytest.mark.parametrize("entry", ["core-kernel-hook", "Core.patch", "0001-x_y.patch", "../x.patch"])
def test_series_entry_that_is_no_patch_name_is_refused(project: Project, entry: str) -> None:
    project.series.write_text(f"{entry}\n")
    with pytest.raises(PatchError, match="not the name of a patch file"):
        lint(project.cfg)


def test_patch_listed_twice_is_refused(project: Project) -> None:
    project.series.write_text(f"{HOOK}.patch\n{HOOK}.patch\n")
    with pytest.raises(PatchError, match="listed twice"):
        lint(project.cfg)


def test_new_file_in_a_patch_is_a_fault(project: Project) -> None:
    project.add_patch("core-new", lambda tree: write_files(tree, {"onnxruntime/new.cc": b"// new\n"}))
    assert any("adds onnxruntime/new.cc" in fault for fault in lint(project.cfg))


def test_patch_that_an_export_would_write_otherwise_is_a_fault(applied: Project) -> None:
    """The same edit with other hunk context applies all the same, so only the re-export tells."""
    edit_patch(applied, swap(" int line_23();\n", ""))
    edit_patch(applied, swap("@@ -18,6 +18,7 @@", "@@ -18,5 +18,6 @@"))
    apply(applied.cfg, applied.base)
    with pytest.raises(PatchError, match="not what an export writes"):
        check(applied.cfg, applied.base)


def test_abbreviated_blob_ids_are_refused(project: Project) -> None:
    full = (project.cfg.series_dir / f"{HOOK}.patch").read_text(encoding="utf-8")
    row = next(line for line in full.splitlines() if line.startswith("index "))
    edit_patch(project, swap(row, f"{row[:13]}..{row[48:55]} 100644"))
    with pytest.raises(PatchError, match="abbreviated blob ids"):
        lint(project.cfg)


def test_unrecorded_and_wrong_tree_ids_are_faults(applied: Project) -> None:
    with pytest.raises(PatchError, match="patched_tree of the git source is none"):
        check(applied.cfg, applied.base)
    digest = patchset_digest(applied.cfg, applied.base)
    applied.write_bases(git_patched="1" * 40, patchset=digest)
    with pytest.raises(PatchError, match="1111"):
        check(applied.cfg, applied.base)


def test_update_trees_writes_the_ids_and_keeps_every_comment(applied: Project) -> None:
    path = applied.cfg.patches / "bases.toml"
    applied.write_bases(debian_patched="2" * 40, patchset="0" * 64)
    before = path.read_text(encoding="utf-8")
    check(replace(applied.cfg, update_trees=True), applied.base)
    after = path.read_text(encoding="utf-8")
    assert [line.partition("#")[2] for line in after.splitlines()] == [
        line.partition("#")[2] for line in before.splitlines()
    ]
    table = read_toml(path)["v1.0.0"]
    assert table["sources"]["git"]["patched_tree"] == git(applied.cfg.src, "rev-parse", "HEAD^{tree}")
    assert table["patchset"] == patchset_digest(applied.cfg, applied.base)
    assert table["sources"]["debian"]["patched_tree"] == "", "it belonged to another patch set"
    check(applied.cfg, applied.base)


def test_edit_of_the_patch_set_makes_the_record_stale(applied: Project) -> None:
    check(replace(applied.cfg, update_trees=True), applied.base)
    write_files(applied.cfg.overlay, {"onnxruntime/contrib/quant.cc": b"// edited\n"})
    with pytest.raises(PatchError, match="run check --update-trees"):
        check(applied.cfg, applied.base)


def test_edit_of_a_header_makes_the_record_stale(applied: Project) -> None:
    """The tree stays the same, but the digest in the wheel's build info does not."""
    check(replace(applied.cfg, update_trees=True), applied.base)
    edit_patch(applied, swap("nothing here", "nothing at all here"))
    with pytest.raises(PatchError, match="run check --update-trees"):
        check(applied.cfg, applied.base)


def test_source_that_is_neither_tag_nor_archive_cannot_be_recorded(project: Project) -> None:
    project.write_bases(git_upstream="3" * 40)
    fetch_source(project.cfg, project.base)
    with pytest.raises(PatchError, match="neither the tag nor the pinned archive"):
        check(replace(project.cfg, update_trees=True), project.base)


def test_set_value_stays_within_its_table() -> None:
    text = '[a]\nkey = "1" # why\n\n["b.c".d]\nkey = "2"\nother = "key = "\n[e]\nkey = "3"\n'
    assert set_value(text, '"b.c".d', "key", "x") == text.replace('"2"', '"x"')
    assert set_value(text, "a", "key", "x") == text.replace('"1"', '"x"')
    assert set_value(text, "e", "new", "x") == text.replace("[e]\n", '[e]\nnew = "x"\n')
    with pytest.raises(PatchError, match=r"no table \[f\]"):
        set_value(text, "f", "key", "x")


def test_hunk_lines_that_look_like_headers_are_content(project: Project) -> None:
    """A removed line `-- a/x` reads `--- a/x` in a diff; only the hunk's counts tell it from a header."""
    tricky = b"-- a/gone\n++ b/gone\ndiff --git a/q b/q\nindex 1..2\n"
    project.add_patch("docs-tricky", lambda tree: write_files(tree, {REGISTRY: tricky}))
    patch = parse_patch("docs-tricky", (project.cfg.series_dir / "docs-tricky.patch").read_bytes())
    assert [edit.path for edit in patch.edits] == [REGISTRY]
    assert [text for _, text in patch.added] == tricky.decode().splitlines()


def test_quoted_paths_are_read(project: Project) -> None:
    """git quotes letters beyond ASCII unless told otherwise; such a patch must still be held against its file."""
    quoted = KERNEL.replace("ö", "\\303\\266").replace("ß", "\\303\\237")
    raw = (project.cfg.series_dir / f"{HOOK}.patch").read_bytes()
    raw = raw.replace(f"a/{KERNEL} b/{KERNEL}".encode(), f'"a/{quoted}" "b/{quoted}"'.encode())
    assert b'"a/onnx' in raw
    assert KERNEL in [edit.path for edit in parse_patch(HOOK, raw).edits]
