"""One run at a time, in a directory that is ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvbuild import lock
from kvbuild.errors import EnvironmentProblem, UsageError
from python_tests.tool.engine import REPO

HOLDER = (
    "import sys, time; from pathlib import Path; from kvbuild.lock import exclusive\n"
    "with exclusive(Path(sys.argv[1])):\n"
    "    print('held', flush=True); time.sleep(1000)"
)


def hold(directory: Path) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], cwd=REPO, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    return holder


def test_second_run_is_told_who_is_there(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        with pytest.raises(EnvironmentProblem, match="another run") as caught, lock.exclusive(tmp_path):
            pytest.fail("two runs at once")
        assert f"process {holder.pid} since" in caught.value.why
        holder.terminate()


def test_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert "process" in (tmp_path / ".lock").read_text()  # what the killed run wrote is still there
    with lock.exclusive(tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / ".lock").read_text()
    with lock.exclusive(tmp_path):
        pass


def test_lock_is_free_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock.exclusive(tmp_path):
        raise ZeroDivisionError
    with lock.exclusive(tmp_path):
        pass


def test_directories_that_may_be_claimed(tmp_path: Path) -> None:
    new, empty = tmp_path / "a b" / "new", tmp_path / "empty"
    empty.mkdir()
    for directory in (new, empty, new):
        lock.claim(directory)
        assert lock.is_ours(directory)
    assert (new / ".gitignore").read_text() == "*\n"


def test_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not made by kvbuild"):
        lock.claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    lock.claim(tmp_path, ours=True)
    assert lock.is_ours(tmp_path)


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a directory"):
        lock.claim(tmp_path / "file")
    with pytest.raises(EnvironmentProblem):
        lock.claim(tmp_path / "file" / "below")
