"""Jobs from cores and memory, fewer after an out-of-memory kill, progress that a log can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbuild import log, ninja
from kvbuild.errors import BuildError
from kvbuild.ninja import GIB, Progress, available_memory, cores, default_jobs
from python_tests.tool.engine import executable, make_cfg

GCC_KILLED = "c++: fatal error: Killed signal terminated program cc1plus"
NVCC_KILLED = "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"


@pytest.mark.parametrize(
    ("processors", "memory_gib", "cuda", "expected"),
    [(8, 64, False, 8), (8, 6, False, 3), (8, 64, True, 8), (64, 32, True, 5), (2, 1, False, 1), (2, 0, True, 1)],
)
def test_jobs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    memory_gib: int,
    cuda: bool,
    expected: int,
) -> None:
    monkeypatch.setattr(ninja, "cores", lambda: processors)
    monkeypatch.setattr(ninja, "available_memory", lambda: memory_gib * GIB)
    cfg = make_cfg(tmp_path, cuda_home=tmp_path if cuda else None)
    assert default_jobs(cfg) == expected
    assert default_jobs(make_cfg(tmp_path, jobs=3)) == 3


def test_memory_of_the_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       99 kB\nMemAvailable:   4194304 kB\n")
    assert available_memory(meminfo, tmp_path / "absent") == 4 * GIB


def test_memory_of_a_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 999999999 kB\n")
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {3 * GIB}\n")
    assert available_memory(meminfo, tmp_path) == 4 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 999999999 * 1024


def test_processor_quota_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == cores(tmp_path / "absent") >= 1


def fake_ninja(folder: Path, body: str) -> Path:
    """Notes the jobs of each call in `calls`; `$jobs` is at hand in `body`."""
    note = f"jobs=$4; echo $jobs >> '{folder}/calls'"
    return executable(folder / "fake ninja", f"{note}\n{body}")


def calls(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "calls").read_text().split()]


@pytest.mark.parametrize(
    "failure",
    [f"echo 'FAILED: x.o'; echo \"{GCC_KILLED}\"; exit 1", f'echo "{NVCC_KILLED}"; exit 1', "exit 137", "kill -9 $$"],
    ids=["gcc", "nvcc", "exit 137", "ninja itself"],
)
def test_out_of_memory_halves_the_jobs_and_goes_on(tmp_path: Path, failure: str) -> None:
    program = fake_ninja(tmp_path, f"if [ $jobs -gt 2 ]; then {failure}; fi\necho '[1/1] done'")
    assert ninja.build(program, tmp_path / "build dir", 9, tmp_path / "log", {}) == 2
    assert calls(tmp_path) == [9, 4, 2]


def test_out_of_memory_with_one_job_ends(tmp_path: Path) -> None:
    program = fake_ninja(tmp_path, "exit 137")
    with pytest.raises(BuildError, match="lack of memory"):
        ninja.build(program, tmp_path, 2, tmp_path / "log", {})
    assert calls(tmp_path) == [2, 1]


def test_source_text_that_mentions_memory_is_no_kill(tmp_path: Path) -> None:
    program = fake_ninja(tmp_path, "echo 'FAILED: x.o'; echo '  9 | catch (const std::bad_alloc&) {'; exit 1")
    with pytest.raises(BuildError, match="ninja failed"):
        ninja.build(program, tmp_path, 8, tmp_path / "log", {})
    assert calls(tmp_path) == [8]


def test_compile_error_is_not_taken_for_lack_of_memory(tmp_path: Path) -> None:
    noise = "; ".join(f"echo '[{number}/99] other step {number}'" for number in range(60, 90))
    error = "echo '[59/99] Building bad.o'; echo 'FAILED: bad.o'; echo 'bad.cc:1: error: no semicolon'"
    program = fake_ninja(tmp_path, f"{error}; {noise}; exit 1")
    with pytest.raises(BuildError) as caught:
        ninja.build(program, tmp_path / "b", 8, tmp_path / "build.log", {})
    assert calls(tmp_path) == [8]
    assert "error: no semicolon" in caught.value.why
    assert "other step" not in caught.value.why
    assert str(tmp_path / "build.log") in caught.value.todo
    assert f"-C {tmp_path}/b -j 8" in caught.value.todo.replace("'", "")


def test_log_gets_one_line_each_half_minute(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = Progress(clock=lambda: now)
    for second in range(1, 91):
        now = float(second)
        progress.line(f"[{100 + second}/1000] Building CXX object some/folder/file{second}.cc.o")
        progress.tick()
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "  [130/1000] 30.0 s, about 14 min 30 s left",
        "  [160/1000] 1 min 00 s, about 14 min 00 s left",
        "  [190/1000] 1 min 30 s, about 13 min 30 s left",
    ]


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(log, "is_terminal", lambda: True)
    monkeypatch.setattr(log, "progress", shown.append)
    now = 0.0
    progress = Progress(clock=lambda: now)
    now = 10.0
    progress.line("[50/100] Building CXX object a/b/c.cc.o")
    assert shown == [f"  {'#' * 12}{'.' * 12} [50/100] 10.0 s  c.cc.o"]
    progress.line("[60/100] Linking x")
    assert "about 36.4 s left" in shown[-1]  # 11 steps in 10 s, 40 to go
