"""fetch: each kind of source, what is refused, and that a failure leaves the earlier state."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbuild import debian, gitremote, source
from kvbuild.config import Config
from kvbuild.errors import SourceError
from kvbuild.git import Git, init_store
from kvbuild.source import SourceResult, fetch_digest, fetch_source, sources_reachable
from kvbuild.treeimport import Member, import_tree
from python_tests.tool.fake_upstream import (
    ARCHIVE,
    FILES,
    HOOK,
    KERNEL,
    REGISTRY,
    Project,
    git,
    write_archive,
    write_files,
)

CLOSED = "http://127.0.0.1:9/onnxruntime.git"
"""A port where nobody listens: refused at once, like a host that cannot be resolved."""


def fetch(project: Project, **options: object) -> SourceResult:
    values: dict[str, Any] = {**vars(project.cfg), **options}
    return fetch_source(Config(**values), project.base)


def upstream_ref(project: Project) -> str:
    return git(project.cfg.repo_store, "rev-parse", "refs/kvq/upstream")


def test_git_brings_the_pinned_commit_itself(project: Project) -> None:
    result = fetch(project, source="git")
    assert (result.kind, result.commit, result.tree) == ("git", project.upstream.commit, project.upstream.tree)
    assert upstream_ref(project) == project.upstream.commit
    assert git(project.cfg.repo_store, "rev-list", "--count", "refs/kvq/upstream") == "1"


def test_tag_that_was_moved_is_refused(project: Project) -> None:
    project.write_bases(commit="4" * 40)
    with pytest.raises(SourceError, match="not the pinned commit") as caught:
        fetch(project, source="git")
    assert "4" * 40 in caught.value.what
    assert project.upstream.commit in caught.value.what
    assert not (project.cfg.repo_store / "refs/kvq/upstream").exists()


def test_archive_of_a_mirror_gives_the_recorded_tree(project: Project) -> None:
    result = fetch(project, source="debian", mirrors=(project.upstream.archive.parent,))
    assert (result.kind, result.tree) == ("debian", project.upstream.archive_tree)


def test_auto_prefers_git_where_it_answers(project: Project) -> None:
    assert fetch(project, source="auto").kind == "git"


def test_auto_takes_the_archive_that_a_mirror_has(project: Project) -> None:
    result = fetch(project, source="auto", mirrors=(project.upstream.archive.parent,))
    assert result.kind == "debian"
    assert "mirror" in result.note


def _apt(monkeypatch: pytest.MonkeyPatch, archive: Path) -> None:
    """An apt that serves the archive: everything but the transfer itself is the real code."""

    def download(_package: str, _file: str, _sha256: str, target: Path, *, log: Path | None = None) -> None:
        shutil.copy(archive, target)

    monkeypatch.setattr(debian, "archives", lambda: ("http://127.0.0.1:9/debian",))
    monkeypatch.setattr(debian, "download", download)


def test_auto_says_that_git_is_unreachable_and_goes_on_with_debian(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _apt(monkeypatch, project.upstream.archive)
    project.write_bases(url=CLOSED)
    result = fetch(project, source="auto")
    assert result.kind == "debian"
    assert f"because {CLOSED} cannot be reached" in result.note
    told = capsys.readouterr().err
    assert f"warning: {CLOSED} cannot be reached: " in told
    assert "unable to access" in told or "Failed to connect" in told


def test_auto_goes_on_with_debian_where_the_transfer_breaks_off(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tag is advertised, but its objects are gone."""
    broken = project.repo.parent / "broken"
    git(project.repo.parent, "clone", "--quiet", "--bare", "--no-local", str(project.upstream.clone), str(broken))
    for pack in (broken / "objects/pack").glob("*.pack"):
        pack.chmod(0o644)
        pack.write_bytes(pack.read_bytes()[:100])
    project.write_bases(url=str(broken))
    with pytest.raises(SourceError, match="git fetch failed"):
        fetch(project, source="git")
    _apt(monkeypatch, project.upstream.archive)
    assert fetch(project, source="auto").kind == "debian"
    assert "git fetch failed" in capsys.readouterr().err


def test_cached_archive_needs_no_network(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _apt(patch, project.upstream.archive)
        fetch(project, source="debian")
    shutil.rmtree(project.cfg.work_dir)
    project.write_bases(url=CLOSED)
    assert fetch(project, source="auto").kind == "debian"


def test_without_any_network_both_reasons_are_told(project: Project) -> None:
    project.write_bases(url=CLOSED)
    with pytest.raises(SourceError, match=r"no source of v1\.0\.0 can be reached") as caught:
        fetch(project, source="auto")
    assert "git: " in caught.value.why
    assert "Debian: apt is not configured" in caught.value.why
    assert "--mirror" in caught.value.todo
    assert not (project.cfg.repo_store / "refs/kvq/upstream").exists()


@pytest.mark.parametrize("kind", ["git", "debian"])
def test_named_source_that_cannot_be_reached_is_no_reason_for_another(project: Project, kind: str) -> None:
    project.write_bases(url=CLOSED)
    with pytest.raises(SourceError):
        fetch(project, source=kind)


def test_slow_host_is_given_up_within_seconds(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts and never answers; without the limit this test would hang."""
    monkeypatch.setattr(gitremote, "REACH_SECONDS", 1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        project.write_bases(url=f"http://127.0.0.1:{silent.getsockname()[1]}/x.git")
        start = time.monotonic()
        with pytest.raises(SourceError, match="no result within 1 s"):
            fetch(project, source="git")
        assert time.monotonic() - start < 15


def test_wrong_digest_prints_expected_and_got(project: Project) -> None:
    project.write_bases(sha256="5" * 64)
    with pytest.raises(SourceError) as caught:
        fetch(project, source="debian", mirrors=(project.upstream.archive.parent,))
    assert "5" * 64 in caught.value.what
    assert "got" in caught.value.what
    assert not (project.cfg.repo_store / "refs/kvq/upstream").exists()


def test_archive_with_another_tree_than_recorded_is_refused(project: Project) -> None:
    project.write_bases(debian_upstream="6" * 40)
    with pytest.raises(SourceError, match="gives another tree") as caught:
        fetch(project, source="debian", mirrors=(project.upstream.archive.parent,))
    assert "6" * 40 in caught.value.what
    assert project.upstream.archive_tree in caught.value.what


def _unpacked(project: Project, target: Path) -> Path:
    target.mkdir()
    subprocess.run(["tar", "-xf", project.upstream.archive, "--strip-components=1", "-C", target], check=True)
    return target


@pytest.mark.parametrize("kind", ["archive", "zip", "folder", "checkout"])
def test_paths_of_every_kind(project: Project, tmp_path: Path, kind: str) -> None:
    """The folder and the archives lack a file of the tag, so their tree is the archive's."""
    place, expected = tmp_path / "a path with ü", project.upstream.archive_tree
    if kind == "archive":
        place = project.upstream.archive
    elif kind == "checkout":
        place, expected = project.upstream.clone, project.upstream.tree
    else:
        _unpacked(project, place)
    if kind == "zip":
        packed = place.with_suffix(".zip")
        with zipfile.ZipFile(packed, "w") as target:
            for path in sorted(place.rglob("*")):
                info = zipfile.ZipInfo(f"top/{path.relative_to(place).as_posix()}")
                info.external_attr = path.lstat().st_mode << 16
                if path.is_symlink():
                    target.writestr(info, str(path.readlink()))
                elif path.is_file():
                    target.writestr(info, path.read_bytes())
        place = packed
    result = fetch(project, source=str(place))
    assert (result.kind, result.tree) == ("path", expected)


def test_checkout_is_taken_by_its_commit_and_not_touched(project: Project, tmp_path: Path) -> None:
    clone = tmp_path / "own clone"
    git(tmp_path, "clone", "--quiet", str(project.upstream.clone), str(clone))
    git(clone, "checkout", "--quiet", "v1.0.0")
    write_files(clone, {"untracked.txt": b"mine\n"})
    os.utime(clone / REGISTRY, ns=(10**18, 10**18))  # makes git want to refresh its index
    index = (clone / ".git" / "index").read_bytes()
    assert fetch(project, source=str(clone)).tree == project.upstream.tree
    assert (clone / ".git" / "index").read_bytes() == index
    write_files(clone, {REGISTRY: b"// not committed\n"})
    with pytest.raises(SourceError, match=r"registry\.cc"):
        fetch(project, source=str(clone))


def test_folder_with_submodule_checkouts_is_imported_as_files(project: Project, tmp_path: Path) -> None:
    """`git add` would store a nested repository as a link to a commit that nobody has."""
    folder = _unpacked(project, tmp_path / "tree")
    write_files(folder, {"external/onnx/a.proto": b"x\n", "external/onnx/.git": b"gitdir: elsewhere\n"})
    write_files(folder, {"external/eigen/b.h": b"x\n", "external/eigen/.git/HEAD": b"ref: refs/heads/main\n"})
    fetch(project, source=str(folder))
    names = git(project.cfg.repo_store, "ls-tree", "-r", "--name-only", "refs/kvq/upstream").splitlines()
    assert {"external/onnx/a.proto", "external/eigen/b.h"} <= set(names)
    assert not any(".git" in name.split("/") for name in names)


def test_unknown_tree_that_fits_the_patches_is_taken_with_a_warning(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _unpacked(project, tmp_path / "tree")
    write_files(folder, {REGISTRY: b"// no patch edits this\n"})
    result = fetch(project, source=str(folder))
    assert f"{result.tree} is not recorded" in capsys.readouterr().err


def test_source_that_does_not_fit_the_patches_is_refused_and_the_old_one_stays(project: Project) -> None:
    fetch(project, source="git")
    clone = project.upstream.clone.parent / "at 1.1.0"
    git(project.upstream.clone, "worktree", "add", "--quiet", "--force", "--detach", str(clone), "v1.1.0")
    try:
        with pytest.raises(SourceError, match="these files are not those") as caught:
            fetch(project, source=str(clone))
    finally:
        git(project.upstream.clone, "worktree", "remove", "--force", str(clone))
    assert KERNEL in caught.value.what
    assert f"{HOOK}.patch" in caught.value.what
    assert upstream_ref(project) == project.upstream.commit


def test_wrong_paths_say_what_is_wrong(project: Project, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file or folder"):
        fetch(project, source=str(tmp_path / "nothing here"))
    (tmp_path / "other").mkdir()
    with pytest.raises(SourceError, match="it has no VERSION_NUMBER"):
        fetch(project, source=str(tmp_path / "other"))
    (tmp_path / "text.tar.xz").write_bytes(b"no archive")
    with pytest.raises(SourceError, match="cannot be read"):
        fetch(project, source=str(tmp_path / "text.tar.xz"))


def test_truncated_archive_is_refused_and_nothing_is_stored(project: Project, tmp_path: Path) -> None:
    broken = tmp_path / ARCHIVE
    data = project.upstream.archive.read_bytes()
    broken.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match="cannot be read"):
        fetch(project, source=str(broken))
    assert not (project.cfg.repo_store / "refs/kvq/upstream").exists()
    assert list((project.cfg.repo_store / "objects/pack").iterdir()) == []


@pytest.mark.parametrize("names", [["a/x", "b/y"], ["file-on-top"]])
def test_archive_without_one_top_folder_is_refused(project: Project, tmp_path: Path, names: list[str]) -> None:
    odd = tmp_path / "odd.tar.xz"
    write_archive(odd, dict.fromkeys(names, b""), top="")
    with pytest.raises(SourceError, match="outside of one top folder"):
        fetch(project, source=str(odd))


@pytest.mark.parametrize("path", ["../../escaped", "a/../../escaped", "/escaped", ".GIT/config", "sub/.git/config"])
def test_archive_that_leads_out_of_its_folder_is_refused(project: Project, tmp_path: Path, path: str) -> None:
    """git stores such a path when asked to, and a checkout would then write there."""
    evil = tmp_path / "evil.tar.xz"
    write_archive(evil, dict(FILES) | {path: b"x"})
    with pytest.raises(SourceError, match="leads out of the tree"):
        fetch(project, source=str(evil))
    assert not (project.cfg.repo_store / "refs/kvq/upstream").exists()


def test_second_fetch_does_nothing_until_an_input_changes(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch(project)
    with monkeypatch.context() as patch:
        patch.setattr(source, "_choose", lambda *_: pytest.fail("asked again"))
        assert fetch(project) == first
        assert "imported before" in sources_reachable(project.cfg, project.base)
    assert fetch(project, source="git").kind == "git"


def test_digest_follows_the_source(project: Project, tmp_path: Path) -> None:
    folder = _unpacked(project, tmp_path / "tree")
    cfg = replace(project.cfg, source=str(folder))
    before = fetch_digest(cfg, project.base)
    assert fetch_digest(cfg, project.base) == before
    write_files(folder, {REGISTRY: b"// edited\n"})
    edited = fetch_digest(cfg, project.base)
    assert len({before, edited, fetch_digest(replace(cfg, source="auto"), project.base)}) == 3


def _interrupted() -> Iterator[Member]:
    yield Member("first", "100644", b"x" * 100_000)
    raise KeyboardInterrupt


def test_interrupted_import_leaves_no_ref_and_no_pack(project: Project) -> None:
    store = init_store(project.cfg.repo_store)
    with pytest.raises(KeyboardInterrupt):
        import_tree(store, _interrupted(), "x\n")
    assert not store.resolve("refs/kvq/incoming")
    assert list((project.cfg.repo_store / "objects/pack").iterdir()) == []


def test_import_whose_process_is_gone_leaves_no_commit(tmp_path: Path) -> None:
    """git then sees the end of its input, here just between two files; that must not pass for the end of the tree."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from kvbuild.git import init_store; from kvbuild.treeimport import Member, import_tree\n"
        "def members():\n"
        "    yield Member('first', '100644', b'x')\n"
        "    sys._getframe(1).f_locals['process'].stdin.flush()\n"
        "    os._exit(9)\n"
        "import_tree(init_store(Path(sys.argv[1])), members(), 'x')\n"
    )
    cmd = [sys.executable, "-c", code, str(tmp_path / "store")]
    assert subprocess.run(cmd, cwd=Path(source.__file__).parent.parent).returncode == 9
    time.sleep(0.5)
    assert not Git(tmp_path / "store").resolve("refs/kvq/incoming")


def test_import_keeps_any_file_name(tmp_path: Path) -> None:
    names = ['quo"te', "back\\slash", "new\nline", "tab\t", " leading", "ünï", os.fsdecode(b"latin-\xe9"), "-dash"]
    store = init_store(tmp_path / "store")
    commit = import_tree(store, [Member(name, "100644", name.encode(errors="replace")) for name in names], "x\n")
    assert sorted(store.entries(commit)) == sorted(names)


def test_limit_on_file_sizes_is_reported_and_a_later_fetch_completes(project: Project) -> None:
    """RLIMIT_FSIZE stands for a full disk: git is ended by SIGXFSZ while it writes the pack."""
    big = project.upstream.archive.parent / "big.tar.xz"
    write_archive(big, dict(FILES) | {"big.bin": os.urandom(300_000)})
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from kvbuild.git import init_store; from kvbuild.treeimport import import_tree, members_of_archive\n"
        "from kvbuild.errors import EnvironmentProblem\n"
        "store = init_store(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "try: import_tree(store, members_of_archive(Path(sys.argv[2])), 'x')\n"
        "except EnvironmentProblem as exc: print(exc)\n"
    )
    root = Path(source.__file__).parent.parent
    cmd = [sys.executable, "-c", code, str(project.cfg.repo_store), str(big)]
    done = subprocess.run(cmd, capture_output=True, text=True, cwd=root)
    assert "could not be stored" in done.stdout, done.stderr
    assert not Git(project.cfg.repo_store).resolve("refs/kvq/incoming")
    assert list((project.cfg.repo_store / "objects/pack").iterdir()) == []
    assert fetch(project, source=str(big)).kind == "path"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
