"""The real build.py on the fake upstream: killed, limited, run twice, cut off, and misused."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from python_tests.tool.fake_tools import Machine, make_machine
from python_tests.tool.fake_upstream import (
    ARCHIVE,
    OVERLAY_FILES,
    Project,
    Upstream,
    contents,
    git,
    make_project,
    sha256,
    write_files,
)

UNTIL_WHEEL = ("--from", "fetch", "--until", "wheel")
QUANT = "onnxruntime/contrib/quant.cc"


@pytest.fixture
def machine(tmp_path: Path, project: Project) -> Machine:
    return make_machine(tmp_path, project)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, upstream: Upstream) -> Machine:
    """A finished, undisturbed run. Tests that change it put it back."""
    root = tmp_path_factory.mktemp("built")
    machine = make_machine(root, make_project(root, upstream))
    git_source = str(upstream.clone)
    done = machine.run(*UNTIL_WHEEL, "--source", git_source)
    assert done.code == 0, done.err
    assert "cached" not in done.out
    return machine


def rerun(machine: Machine, *args: str, until: str = "build") -> str:
    done = machine.run("--from", "fetch", "--until", until, *args)
    assert done.code == 0, done.err
    return done.out


def stages(out: str) -> dict[str, str]:
    """Stage -> ran or cached, from the closing table."""
    rows = [line.split() for line in out.splitlines() if line]
    found = {row[0]: next((cell for cell in row if cell in ("ran", "cached")), "") for row in rows}
    return {name: how for name, how in found.items() if how}


def library_of(machine: Machine) -> str:
    """What the stand-in for ninja linked: the patch set's digest, then every source file."""
    (path,) = machine.project.cfg.work_dir.glob("v1.0.0/build-*/onnxruntime_pybind11_state.so")
    return path.read_text()


def wheel_of(machine: Machine) -> bytes:
    (path,) = machine.project.cfg.work_dir.glob("v1.0.0/dist-*/*.whl")
    assert path.name == "onnxruntime-1.0.0+kvq.3-py3-none-any.whl"
    return path.read_bytes()


def test_second_run_finds_everything_cached(built: Machine) -> None:
    start = time.monotonic()
    out = rerun(built, "--source", str(built.project.upstream.clone), until="wheel")
    assert set(stages(out).values()) == {"cached"}
    assert time.monotonic() - start < 20


def test_edit_of_one_overlay_file_recompiles_that_file(built: Machine) -> None:
    """Everything else keeps its mtime through apply and configure."""
    (log,) = built.project.cfg.work_dir.glob("v1.0.0/build-*/compiled.log")
    log.unlink()
    write_files(built.project.cfg.overlay, {QUANT: b"// edited\n"})
    try:
        out = rerun(built, "--source", str(built.project.upstream.clone))
        assert log.read_text().splitlines() == ["quant.cc"]
        assert stages(out)["fetch"] == "cached"
        assert "// edited" in library_of(built)
    finally:
        write_files(built.project.cfg.overlay, {QUANT: OVERLAY_FILES[QUANT]})
        rerun(built, "--source", str(built.project.upstream.clone))


KILLS = (
    "git fast-import",
    "git update-ref -d refs/kvq/incoming",
    "git am",
    "git worktree",
    "git read-tree --reset",
    "cmake",
    "ninja 1",
    "ninja 2",
)
"""Points of one run, in order; each run of the test is killed at the next one."""


def test_killed_at_any_point_the_same_command_completes(machine: Machine, built: Machine) -> None:
    """The wheel and the tree must equal those of a run that nothing disturbed, and no child may outlive its run."""
    args = (*UNTIL_WHEEL, "--source", str(machine.project.upstream.clone))
    for point in KILLS:
        name = point if point != "git read-tree --reset" else _reset_of_the_move(built)
        held = machine.kill_at(name, *args)
        if point != "git fast-import":  # that one reads a pipe and ends when it closes
            _wait_gone(held)
        else:
            os.kill(held, signal.SIGKILL)
    (log,) = machine.project.cfg.work_dir.glob("v1.0.0/build-*/compiled.log")
    compiled_before_the_kill = log.read_text().splitlines()
    assert len(compiled_before_the_kill) == 1
    rerun(machine, "--source", str(machine.project.upstream.clone), until="wheel")
    everything = log.read_text().splitlines()
    assert len(everything) == len(set(everything)), "a finished object was compiled again"
    assert wheel_of(machine) == wheel_of(built)
    assert contents(machine.project.cfg.src) == contents(built.project.cfg.src)
    assert git(machine.project.cfg.src, "status", "--porcelain") == ""
    leftovers = {path.name for path in machine.project.cfg.base_dir.iterdir()}
    assert leftovers == {path.name for path in built.project.cfg.base_dir.iterdir()}


def _reset_of_the_move(built: Machine) -> str:
    """The patched commit is the same in both projects, so the finished one tells the command to wait for."""
    return f"git read-tree --reset {git(built.project.cfg.src, 'rev-parse', 'HEAD')}"


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} outlived its build.py")


def test_two_runs_at_once_are_kept_apart(built: Machine) -> None:
    args = (*UNTIL_WHEEL, "--source", str(built.project.upstream.clone))
    write_files(built.project.cfg.overlay, {QUANT: b"// to have something to do\n"})
    first = built.start(*args, hold="ninja 1")
    try:
        built.wait_held(first)
        second = built.run(*args, "-q")
        assert second.code == 3
        assert "another run works in" in second.err
        assert f"process {first.pid} " in second.err
    finally:
        first.kill()
        first.communicate()
        write_files(built.project.cfg.overlay, {QUANT: OVERLAY_FILES[QUANT]})
    rerun(built, "--source", str(built.project.upstream.clone))


def test_ctrl_c_ends_children_and_exits_130(built: Machine) -> None:
    args = (*UNTIL_WHEEL, "--source", str(built.project.upstream.clone))
    write_files(built.project.cfg.overlay, {QUANT: b"// to have something to do\n"})
    process = built.start(*args, hold="ninja 1")
    try:
        held = built.wait_held(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "interrupted" in err
        _wait_gone(held)
    finally:
        process.kill()
        write_files(built.project.cfg.overlay, {QUANT: OVERLAY_FILES[QUANT]})
    rerun(built, "--source", str(built.project.upstream.clone))


def test_build_tree_commits_are_exported_and_built(built: Machine) -> None:
    """The round trip that a developer makes: commit, build, export, build again without compiling."""
    project = built.project
    registry = project.cfg.src / "onnxruntime/core/registry.cc"
    before = {path: path.read_bytes() for path in project.cfg.patches.rglob("*") if path.is_file()}
    head = git(project.cfg.src, "rev-parse", "HEAD")
    project.commit("core-registry: register more", {"onnxruntime/core/registry.cc": b"void More();\n"})
    source = ("--source", str(project.upstream.clone))
    try:
        rerun(built, *source)
        assert "void More" in library_of(built)
        assert "-edited" in library_of(built), "the build info tells that the tree is not that of patches/"
        done = built.run("export")
        assert done.code == 0, done.err
        stamp = registry.stat().st_mtime_ns
        rerun(built, *source)
        assert "-edited" not in library_of(built)
        assert registry.stat().st_mtime_ns == stamp
    finally:
        git(project.cfg.src, "checkout", "--quiet", "--force", head)
        for path in set(project.cfg.patches.rglob("*.patch")) - before.keys():
            path.unlink()
        for path, data in before.items():
            path.write_bytes(data)
        rerun(built, *source)


@pytest.fixture
def reused(built: Machine) -> Iterator[Machine]:
    """The finished run, for tests that change its patch set or mirror: put back afterwards, environments kept."""
    yield built
    built.project.write_bases()
    (built.mirror / ARCHIVE).unlink(missing_ok=True)
    shutil.rmtree(built.bin / "cache", ignore_errors=True)
    shutil.rmtree(built.project.cfg.overlay)
    write_files(built.project.cfg.overlay, OVERLAY_FILES)
    rerun(built, "--source", str(built.project.upstream.clone))


def test_without_network_it_says_so_and_names_the_way_out(reused: Machine) -> None:
    reused.project.write_bases(url="http://127.0.0.1:9/x.git")
    before = contents(reused.project.cfg.src)
    done = reused.run("fetch")
    assert done.code == 4
    assert "no source of v1.0.0 can be reached" in done.err
    assert "--mirror DIRECTORY" in done.err
    assert contents(reused.project.cfg.src) == before


def test_unreachable_git_goes_on_from_the_archive_in_the_mirror(reused: Machine) -> None:
    reused.project.write_bases(url="http://127.0.0.1:9/x.git")
    shutil.copy(reused.project.upstream.archive, reused.mirror)
    done = reused.run("--from", "fetch", "--until", "apply")
    assert done.code == 0, done.err
    assert "Debian source package" in done.err
    assert not (reused.project.cfg.src / "dropped").exists(), "the archive lacks this file of the tag"


def test_wrong_digest_stops_with_expected_and_got(reused: Machine) -> None:
    shutil.copy(reused.project.upstream.archive, reused.mirror)
    reused.project.write_bases(sha256="7" * 64)
    done = reused.run("fetch", "--source", "debian")
    assert done.code == 4
    assert "7" * 64 in done.err
    assert sha256(reused.project.upstream.archive) in done.err


@pytest.mark.parametrize("name", ["onnxruntime/contrib/large.bin", QUANT])
def test_full_disk_during_apply_leaves_nothing_half_written(reused: Machine, name: str) -> None:
    """A limit on file sizes makes every write of the large overlay file fail, git's as well as ours."""
    source = ("--source", str(reused.project.upstream.clone))
    before = contents(reused.project.cfg.src)
    write_files(reused.project.cfg.overlay, {name: os.urandom(400_000)})
    done = reused.run("apply", *source, file_limit=200_000)
    assert done.code == 3, done.err
    assert "Traceback" not in done.err
    assert contents(reused.project.cfg.src) == before
    done = reused.run("apply", *source)
    assert done.code == 0, done.err
    assert (reused.project.cfg.src / name).stat().st_size == 400_000
    assert git(reused.project.cfg.src, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (("fetch", "--base", "v9.9.9"), 2, "choose one of v1.0.0"),
        (("fetch", "--source", "/nowhere/at all"), 2, "/nowhere/at all"),
        (("--from", "wheel", "--until", "fetch"), 2, "comes after"),
        (("apply",), 2, "needs fetch"),
        (("export",), 5, "not fetched"),
        (("rebase", "--onto", "v9.9.9"), 2, "no such base"),
        (("frobnicate",), 2, "frobnicate"),
    ],
)
def test_misuse_is_one_clear_error(machine: Machine, args: tuple[str, ...], code: int, told: str) -> None:
    done = machine.run(*args)
    assert (done.code, done.out) == (code, "")
    assert told in done.err
    assert "Traceback" not in done.err
    assert not machine.project.cfg.src.exists()


def test_folder_of_somebody_else_is_no_work_directory(machine: Machine) -> None:
    write_files(machine.project.cfg.work_dir, {"thesis.txt": b"mine\n"})
    for verb in ("fetch", "clean"):
        done = machine.run(verb)
        assert done.code == 2
        assert contents(machine.project.cfg.work_dir) == {"thesis.txt": b"mine\n"}
