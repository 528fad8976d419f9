"""The command line: what is refused, what it becomes, and the exit code of every kind of failure."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbuild import cli, stages, steps
from kvbuild.config import STAGES, Base, Config
from kvbuild.errors import (
    BuildError,
    DigestMismatch,
    EnvironmentProblem,
    KvBuildError,
    PatchError,
    SourceError,
    TestFailure,
    UsageError,
)
from python_tests.tool.engine import REPO


def config(*argv: str) -> Config:
    return cli.make_config(cli.parse(argv), REPO)


def test_defaults() -> None:
    cfg = config()
    assert cfg.base == "v1.21.0"
    assert (cfg.first, cfg.last) == ("doctor", "test")
    assert cfg.work_dir == REPO / ".work"
    assert cfg.python == Path(sys.executable)
    assert cfg.python_tag == f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert cfg.cmake_args == ()


def test_options_need_no_verb(tmp_path: Path) -> None:
    folder = tmp_path / "a path with spaces"
    folder.mkdir()
    cfg = config("--cuda-home", str(folder), "--mirror", str(folder), "--mirror", str(tmp_path), "--jobs", "3")
    assert cfg.cuda_home == folder
    assert cfg.mirrors == (folder, tmp_path)
    assert cfg.jobs == 3
    assert "cuda" in cfg.build_dir.name


def test_what_follows_two_dashes_goes_to_cmake() -> None:
    cfg = config("build", "-v", "--", "-DX=a b", "--fresh", "-v")
    assert cfg.cmake_args == ("-DX=a b", "--fresh", "-v")
    assert cfg.verbosity == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_verb(stage: str) -> None:
    cfg = config(stage)
    assert (cfg.first, cfg.last) == (stage, stage)


def test_relative_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    cfg = config("--work-dir", "work", "--source", "src")
    assert cfg.work_dir == tmp_path / "work"
    assert cfg.source == str(tmp_path / "src")


def test_virtual_environment_is_not_resolved_to_what_it_came_from(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert config("--python", str(link)).python == link


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--no-such-option"], "unrecognized arguments"),
        (["fetchh"], "invalid choice"),
        (["--forc"], "unrecognized arguments"),
        (["--jobs", "0"], "not a number of jobs"),
        (["--jobs", "many"], "not a number of jobs"),
        (["--profile", "tiny"], "invalid choice"),
        (["--from", "wheel", "--until", "fetch"], "comes after"),
        (["fetch", "--from", "apply"], "--from means nothing with fetch"),
        (["export", "--onto", "v2"], "--onto means nothing with export"),
        (["fetch", "--all"], "--all means nothing with fetch"),
        (["check", "--dry-run"], "--dry-run means nothing with check"),
        (["--cuda-home", "/no/such/cuda"], "--cuda-home /no/such/cuda: no such path"),
        (["--mirror", "/no/such/mirror"], "--mirror /no/such/mirror: no such path"),
        (["--mirror", __file__], "is not a directory"),
        (["--source", "/no/such/source"], "--source /no/such/source: no such path"),
        (["--python", "no-such-python"], "--python no-such-python: no such program"),
        (["--base", "v0.0.0"], "--base v0.0.0: no such base"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_with_exit_code_2(argv: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv, REPO) == UsageError.exit_code == 2
    output = capfd.readouterr()
    assert told in output.err
    assert "do: " in output.err
    assert output.out == ""


FAILURES = [
    (UsageError("x"), 2),
    (EnvironmentProblem("x"), 3),
    (SourceError("x"), 4),
    (DigestMismatch("x"), 4),
    (PatchError("x"), 5),
    (BuildError("x"), 6),
    (TestFailure("x"), 7),
    (KvBuildError("x"), 1),
    (KeyboardInterrupt(), 130),
    (OSError(errno.ENOSPC, "No space left on device", "/full/file"), 3),
]


@pytest.mark.parametrize(("failure", "code"), FAILURES, ids=lambda value: type(value).__name__)
def test_exit_codes(
    failure: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_args: object) -> None:
        raise failure

    monkeypatch.setattr(cli, "run", fail)
    assert cli.main([], REPO) == code
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert "error: " in told


def test_programming_errors_are_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise IndexError

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(IndexError):
        cli.main([], REPO)


def test_message_says_what_why_and_what_to_do() -> None:
    assert str(EnvironmentProblem("no disk", "it is full", "free some")) == "no disk\nwhy: it is full\ndo: free some"
    assert str(EnvironmentProblem("no disk")) == "no disk"


@pytest.mark.parametrize("verb", [["--dry-run"], ["status"], ["clean"]], ids=" ".join)
def test_looking_creates_nothing(tmp_path: Path, verb: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*verb, "--work-dir", str(tmp_path / "work")], REPO) == 0
    assert list(tmp_path.iterdir()) == []
    if verb != ["clean"]:
        assert capfd.readouterr().out.count("not run") == len(STAGES)


def test_foreign_work_directory_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("data")
    assert cli.main(["doctor", "--work-dir", str(tmp_path)], REPO) == 2
    assert cli.main(["clean", "--work-dir", str(tmp_path)], REPO) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert "not made by kvbuild" in capfd.readouterr().err


def test_a_run_prints_its_table_and_keeps_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stage(name: str) -> stages.Stage:
        return stages.Stage(
            digest=lambda run: "d", execute=lambda run: {"note": f"did {name}"}, valid=lambda run, outputs: True
        )

    monkeypatch.setattr(steps, "TABLE", {name: stage(name) for name in STAGES})
    argv = ["--until", "build", "--work-dir", str(tmp_path / "my work")]
    assert cli.main(argv, REPO) == 0
    first = capfd.readouterr().out
    assert first.count("ran") == 5
    assert "did apply" in first
    saved = json.loads((tmp_path / "my work" / "v1.21.0" / "config.json").read_text())
    assert saved["work_dir"] == str(tmp_path / "my work")
    assert cli.main(argv, REPO) == 0
    assert capfd.readouterr().out.count("cached") == 5


def test_ctrl_c_exits_130_and_releases_the_lock(tmp_path: Path) -> None:
    """The whole program, in a stage that never ends."""
    code = (
        "import sys, time; from pathlib import Path; from kvbuild import cli, doctor, proc\n"
        "doctor.examine = lambda cfg, base: proc.run(['sleep', '1000'])\n"
        "sys.exit(cli.main(['doctor', '-v', '--work-dir', sys.argv[1]], Path.cwd()))"
    )
    cmd = [sys.executable, "-c", code, str(tmp_path / "work")]
    with subprocess.Popen(cmd, cwd=REPO, stderr=subprocess.PIPE) as program:
        assert program.stderr is not None
        deadline = time.monotonic() + 20
        while b"$ sleep" not in program.stderr.readline() and time.monotonic() < deadline:
            pass
        os.kill(program.pid, signal.SIGINT)
        told = program.stderr.read().decode()
        assert program.wait(20) == 130
    assert "interrupted" in told
    assert "Traceback" not in told
    assert cli.main(["status", "--work-dir", str(tmp_path / "work")], REPO) == 0


def test_build_py_is_thin_and_runs_from_anywhere(tmp_path: Path) -> None:
    build = REPO / "build.py"
    assert len(build.read_text().splitlines()) <= 60
    done = subprocess.run([sys.executable, build, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Exit codes: 2 usage" in done.stdout


def test_old_interpreter_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    code = compile((REPO / "build.py").read_text(), "build.py", "exec")
    with pytest.raises(SystemExit) as caught:
        exec(code, {"__name__": "__main__", "__file__": str(REPO / "build.py")})
    assert caught.value.code == 3
    assert "3.11 or later, this is 3.9" in capfd.readouterr().err


def test_every_base_loads() -> None:
    from kvbuild.config import load_bases

    bases = load_bases(REPO / "patches" / "bases.toml")
    assert all(isinstance(base, Base) and base.name == name for name, base in bases.items())


def test_broken_bases_file_is_named(tmp_path: Path) -> None:
    from kvbuild.config import load_bases

    path = tmp_path / "bases.toml"
    path.write_text('["v1"]\nversion = "1"\n')
    with pytest.raises(SourceError, match=r"table \[v1\]"):
        load_bases(path)
    path.write_text("[[[")
    with pytest.raises(SourceError, match=r"bases\.toml"):
        load_bases(path)
