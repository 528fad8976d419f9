"""What the real stages depend on, on the fake upstream: edits in the build tree are seen, named and built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild import clean, configure, lock, ninja, steps
from kvbuild.errors import BuildError, PatchError, UsageError
from kvbuild.stages import Run
from python_tests.tool.fake_upstream import KERNEL, Project, git

LIBRARY = "onnxruntime_pybind11_state.cpython-311-x86_64-linux-gnu.so"


@pytest.fixture
def run(applied: Project) -> Run:
    """A run whose fetch and apply are behind it."""
    run = Run(cfg=applied.cfg, base=applied.base)
    run.outputs["fetch"] = {"commit": "upstream", "dependencies": {}}
    run.outputs["apply"] = {"commit": git(applied.cfg.src, "rev-parse", "HEAD")}
    run.digests["configure"] = "configured"
    return run


@pytest.fixture
def linked(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each build: whether the native library was there when ninja started. The stand-in for ninja links it."""
    found: list[bool] = []

    def build(_program: Path, build_dir: Path, jobs: int, _log: Path, _env: object) -> int:
        library = build_dir / LIBRARY
        found.append(library.exists())
        build_dir.mkdir(parents=True, exist_ok=True)
        library.touch()
        return jobs

    monkeypatch.setattr(ninja, "build", build)
    return found


def digests(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr(configure, "digest", lambda _cfg, _base, inputs, names: f"{inputs.patchset} {names}")
    return steps.TABLE["configure"].digest(run), steps.TABLE["build"].digest(run)


def test_edited_file_is_built_and_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    configured, built = digests(run, monkeypatch)
    assert digests(run, monkeypatch) == (configured, built)
    (run.cfg.src / KERNEL).write_text("int edited();\n")
    edited_configured, edited_built = digests(run, monkeypatch)
    assert edited_built != built
    assert edited_configured.split()[0] == configured.split()[0] + "-edited"
    (run.cfg.src / KERNEL).write_text("int edited_again();\n")
    again_configured, again_built = digests(run, monkeypatch)
    assert again_built != edited_built
    assert again_configured == edited_configured  # the set of files is the same: no need to configure


def test_new_file_configures_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's CMake files glob their sources."""
    (run.cfg.src / KERNEL).write_text("int edited();\n")
    before = digests(run, monkeypatch)[0]
    (run.cfg.src / "onnxruntime" / "core" / "added.cc").write_text("int added();\n")
    assert digests(run, monkeypatch)[0] != before


def test_commit_in_the_build_tree_is_built_and_keeps_apply_current(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(run, monkeypatch)
    (run.cfg.src / KERNEL).write_text("int edited();\n")
    git(run.cfg.src, "commit", "--quiet", "-a", "-m", "my-edit: try something")
    configured, built = digests(run, monkeypatch)
    assert built != before[1]
    assert "-edited" in configured
    assert steps.TABLE["apply"].valid(run, run.outputs["apply"])
    git(run.cfg.src, "reset", "--quiet", "--hard", "HEAD~2")
    assert not steps.TABLE["apply"].valid(run, run.outputs["apply"])


def test_changed_python_file_links_again(run: Run, linked: list[bool]) -> None:
    """Upstream copies Python files after linking, and ninja does not know it."""
    build = steps.TABLE["build"].execute
    module = run.cfg.src / "onnxruntime" / "python" / "tool.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    build(run)
    build(run)
    module.write_text("x = 1\n")
    build(run)
    build(run)
    (run.cfg.src / KERNEL).write_text("int edited();\n")
    build(run)
    assert linked == [False, True, False, True, True]


def test_build_without_the_python_binding_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ninja, "build", lambda *_args: 1)
    with pytest.raises(BuildError, match="is not there"):
        steps.TABLE["build"].execute(run)


def test_wheel_is_known_by_size_and_mtime(run: Run, tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"wheel")
    stat = wheel.stat()
    outputs = {"path": str(wheel), "file": [stat.st_size, stat.st_mtime_ns]}
    assert steps.TABLE["wheel"].valid(run, outputs)
    wheel.write_bytes(b"other wheel")
    assert not steps.TABLE["wheel"].valid(run, outputs)
    wheel.unlink()
    assert not steps.TABLE["wheel"].valid(run, outputs)


@pytest.fixture
def owned(applied: Project) -> Project:
    """As the command line leaves it: directories that carry the mark."""
    lock.claim(applied.cfg.work_dir, ours=True)
    lock.claim(applied.cfg.base_dir, ours=True)
    (applied.cfg.deps_dir / "lib-1").mkdir(parents=True, exist_ok=True)
    return applied


def test_clean_removes_the_base_and_keeps_downloads(owned: Project) -> None:
    clean.clean(owned.cfg)
    assert not owned.cfg.base_dir.exists()
    assert owned.cfg.deps_dir.exists()


def test_clean_all_keeps_the_directory_itself(owned: Project) -> None:
    clean.clean(replace(owned.cfg, clean_all=True))
    assert sorted(path.name for path in owned.cfg.work_dir.iterdir()) == [lock.MARKER]


def test_clean_refuses_to_lose_edits_and_commits(owned: Project) -> None:
    (owned.cfg.src / KERNEL).write_text("int edited();\n")
    for cfg in (owned.cfg, replace(owned.cfg, clean_all=True)):
        with pytest.raises(PatchError):
            clean.clean(cfg)
    git(owned.cfg.src, "commit", "--quiet", "-a", "-m", "my-edit: try something")
    with pytest.raises(PatchError, match="not in patches/"):
        clean.clean(owned.cfg)
    assert (owned.cfg.src / KERNEL).read_text() == "int edited();\n"
    clean.clean(replace(owned.cfg, force=True))
    assert not owned.cfg.base_dir.exists()


def test_clean_leaves_what_it_did_not_make(owned: Project) -> None:
    (owned.cfg.base_dir / lock.MARKER).unlink()
    with pytest.raises(UsageError, match="not made by kvbuild"):
        clean.clean(owned.cfg)
    assert owned.cfg.src.exists()
