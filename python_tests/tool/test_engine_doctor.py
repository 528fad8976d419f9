"""What is found out before anything slow: each fault with its way out, all faults at once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild import doctor, ninja, toolchain, venv, wheel
from kvbuild.config import Config
from kvbuild.errors import EnvironmentProblem, SourceError
from kvbuild.venv import PythonInfo
from python_tests.tool.engine import executable, make_base, make_cfg
from python_tests.tool.test_engine_toolkit import NVCC

BASE = make_base()
REAL_CHECK_CXX = toolchain.check_cxx
"""Compiles a program, which takes a second; most tests here are about something else."""


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A machine on which everything is in order."""
    monkeypatch.setattr(doctor, "sources_reachable", lambda _cfg, _base: "a source that is there")
    monkeypatch.setattr(wheel, "second_runtime", lambda _python: [])
    monkeypatch.setattr(toolchain, "check_cxx", lambda _header: "a compiler")
    monkeypatch.setattr(ninja, "available_memory", lambda: 16 * ninja.GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(0, 0, 100 * ninja.GIB))
    return make_cfg(tmp_path)


def problem(cfg: Config) -> EnvironmentProblem:
    with pytest.raises(EnvironmentProblem) as caught:
        doctor.examine(cfg, BASE)
    return caught.value


def python_is(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    info = venv.probe(Path(sys.executable))
    monkeypatch.setattr(venv, "probe", lambda _python: replace(info, **changes))  # type: ignore[arg-type]


def test_machine_in_order_passes(
    cfg: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "check_cxx", REAL_CHECK_CXX)
    doctor.examine(cfg, BASE)
    told = capfd.readouterr().err
    for word in ("git: ", "python: ", "compiler: ", "disk: 100 GiB free", "jobs: ", "source: a source that is there"):
        assert word in told
    assert not cfg.work_dir.exists()


def test_old_git(cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "bin" / "git", "echo git version 2.17.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert problem(cfg).what == "git 2.17.1 is too old"


def test_headers_of_the_chosen_python(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    found = venv.probe(Path(sys.executable))
    python_is(monkeypatch, header="/no/such/Python.h", version="3.12.4")
    told = problem(cfg)
    assert "/no/such/Python.h is missing" in told.what
    assert told.todo == "apt install python3.12-dev"
    python_is(monkeypatch, header=found.header, venv=False, version="3.12.4")
    assert problem(cfg).todo == "apt install python3.12-venv"


@pytest.mark.parametrize(
    "changes",
    [{"version": "3.10.1"}, {"version": "3.14.0"}, {"implementation": "pypy"}, {"bits": 32}, {"free_threaded": True}],
    ids=str,
)
def test_python_that_upstream_does_not_support(
    cfg: Config, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    python_is(monkeypatch, **changes)
    told = problem(cfg)
    assert "3.11 to 3.13" in told.why
    assert "--python" in told.todo


def test_missing_compiler(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "check_cxx", REAL_CHECK_CXX)
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = problem(cfg)
    assert told.what == "no compiler found (CXX=no-such-compiler)"
    assert "build-essential" in told.todo


def test_compiler_that_cannot(cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "check_cxx", REAL_CHECK_CXX)
    script = 'case "$1" in --version) echo old 1.0 ;; *) echo "probe.cc:3: optional: No such file"; exit 1 ;; esac'
    monkeypatch.setenv("CXX", str(executable(tmp_path / "old-c++", script)))
    told = problem(cfg)
    assert "cannot compile a C++17 program" in told.what
    assert "optional: No such file" in told.why


def test_little_disk_and_memory(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(0, 0, ninja.GIB))
    assert "1.0 GiB are free" in problem(cfg).what
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(0, 0, 100 * ninja.GIB))
    monkeypatch.setattr(ninja, "available_memory", lambda: ninja.GIB)
    assert "1.0 GiB of memory" in problem(cfg).what


@pytest.mark.parametrize("letter", [":", ";", "$", '"'])
def test_path_that_build_tools_misread(cfg: Config, tmp_path: Path, letter: str) -> None:
    assert repr(letter) in problem(replace(cfg, work_dir=tmp_path / f"a{letter}b")).what


def test_several_problems_are_told_at_once(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_cfg: Config, _base: object) -> str:
        msg = "no source"
        raise SourceError(msg)

    monkeypatch.setattr(doctor, "sources_reachable", unreachable)
    monkeypatch.setattr(toolchain, "check_cxx", REAL_CHECK_CXX)
    with pytest.raises(SourceError):
        doctor.examine(cfg, BASE)
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = problem(cfg).what
    assert "2 problems" in told
    assert "no source" in told
    assert "no-such-compiler" in told


def test_second_runtime_is_a_warning(
    cfg: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheel, "second_runtime", lambda _python: ["onnxruntime-gpu 1.20.0"])
    doctor.examine(cfg, BASE)
    assert "already has onnxruntime-gpu 1.20.0" in capfd.readouterr().err


@pytest.fixture
def cuda(cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    home = tmp_path / "cuda"
    executable(home / "bin" / "nvcc", NVCC)
    monkeypatch.setattr("kvbuild.toolkit.missing_libraries", lambda _cfg, _home: [])
    monkeypatch.setattr(toolchain, "gpu_architectures", lambda: ["90"])
    return replace(cfg, cuda_home=home)


def test_cuda_in_order(cuda: Config, capfd: pytest.CaptureFixture[str]) -> None:
    doctor.examine(cuda, BASE)
    told = capfd.readouterr().err
    assert "nvcc: 13.0" in told
    assert "architectures: 90-real" in told


@pytest.mark.parametrize("release", ["11.8", "13.3"])
def test_unknown_cuda_release_needs_force(cuda: Config, release: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cuda.cuda_home
    executable(cuda.cuda_home / "bin" / "nvcc", NVCC.replace("13.0", release))
    told = problem(cuda)
    assert f"is CUDA {release}" in told.what
    assert told.why == "v1.21.0 is known to build with 12.0 to 13.0"
    doctor.examine(replace(cuda, force=True), BASE)
    assert f"CUDA {release}" in capfd.readouterr().err


def test_host_compiler_that_nvcc_refuses(cuda: Config) -> None:
    assert cuda.cuda_home
    refusal = "*) echo 'error: -- unsupported GNU version! gcc versions later than 15 are not supported!'; exit 1 ;;"
    executable(cuda.cuda_home / "bin" / "nvcc", NVCC.replace("*) exit 0 ;;", refusal))
    told = problem(cuda)
    assert "unsupported GNU version" in told.why
    assert "CMAKE_CUDA_HOST_COMPILER" in told.todo


def test_examined_again_when_something_changes(cfg: Config, tmp_path: Path) -> None:
    cfg = replace(cfg, python=executable(tmp_path / "python", "exit 0"))
    first = doctor.digest(cfg, BASE)
    assert doctor.digest(replace(cfg, verbosity=1, first="build"), BASE) == first
    assert doctor.digest(replace(cfg, mirrors=(tmp_path,)), BASE) != first
    executable(tmp_path / "python", "echo another; exit 0")
    assert doctor.digest(cfg, BASE) != first


def test_probe_of_this_interpreter() -> None:
    info = venv.probe(Path(sys.executable))
    assert info == PythonInfo(**vars(info))
    assert info.tag == f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert Path(info.header).name == "Python.h"


def test_program_that_is_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem):
        venv.probe(executable(tmp_path / "python", "echo I am not Python >&2; exit 1"))


def test_environment_is_made_once_and_again_when_its_pins_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = executable(
        tmp_path / "python", f'echo "$@" >> "{tmp_path}/made"; mkdir -p "$3/bin"; touch "$3/bin/python"'
    )
    cfg = make_cfg(tmp_path, python=interpreter)
    pins = tmp_path / "pins.txt"
    pins.write_text("a==1")
    monkeypatch.setattr(venv, "_pip", lambda *_args: 0)
    folder = cfg.work_dir / "an env"

    def made() -> int:
        assert venv.ensure(cfg, folder, [pins], tmp_path / "log") == folder / "bin" / "python"
        return (tmp_path / "made").read_text().count("-m venv")

    assert [made(), made()] == [1, 1]
    pins.write_text("a==2")
    assert [made(), made()] == [2, 2]
    (folder / "kvbuild.json").unlink()  # as a run that was killed while installing leaves it
    (folder / "half installed").touch()
    assert made() == 3
    assert not (folder / "half installed").exists()


def test_environment_of_the_real_interpreter(tmp_path: Path) -> None:
    cfg = make_cfg(tmp_path)
    python = venv.ensure(cfg, cfg.work_dir / "an env", [], tmp_path / "log")
    assert subprocess.run([python, "-c", "import sys; sys.exit(sys.prefix == sys.base_prefix)"]).returncode == 0
