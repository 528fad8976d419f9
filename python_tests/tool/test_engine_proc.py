"""Child processes: output, failures that can be repeated, and nothing that outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbuild import proc
from kvbuild.errors import BuildError, EnvironmentProblem, SourceError
from python_tests.tool.engine import REPO, executable

SLEEP = "1234"
"""Seconds that a child asks for; no test waits for them."""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], seconds: float = 10) -> list[int]:
    """The process ids that are still there in the end."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def wait_for_pids(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob("*.pid")]
        if len(texts) == count and all(text.strip() for text in texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    pytest.fail(f"{count} processes did not start")


def test_output_is_captured_apart_from_errors() -> None:
    done = proc.run(["sh", "-c", "echo out; echo err >&2; exit 0"], capture=True)
    assert done == proc.Completed(0, b"out\n")


def test_large_input_and_output_do_not_block() -> None:
    data = os.urandom(1 << 20)
    assert proc.run(["cat"], input=data, capture=True).stdout == data


def test_log_holds_the_command_and_both_streams(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    lines: list[str] = []
    proc.run(["sh", "-c", "echo out; echo err >&2; printf last"], log=log, on_line=lines.append)
    assert lines == ["out", "err", "last"]
    assert log.read_text() == "$ sh -c 'echo out; echo err >&2; printf last'\nout\nerr\nlast\n"


def test_failure_shows_the_end_the_log_and_the_way_to_repeat(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    script = "for i in $(seq 100); do echo line $i; done; exit 3"
    with pytest.raises(SourceError) as caught:
        proc.run(["sh", "-c", script], cwd=folder, log=tmp_path / "x.log", error=SourceError, what="the step")
    assert caught.value.what == "the step failed with exit code 3"
    assert "line 100" in caught.value.why
    assert "line 60" not in caught.value.why
    assert "line 61" in caught.value.why
    assert str(tmp_path / "x.log") in caught.value.todo
    repeat = caught.value.todo.splitlines()[-1]
    assert repeat == f"  cd '{folder}' && sh -c '{script}'"
    assert subprocess.run(["sh", "-c", repeat], capture_output=True).returncode == 3


def test_repeatable_command_survives_odd_arguments(tmp_path: Path) -> None:
    odd = ["a b", "c'd", '"e"', "$HOME", "f;g", "*"]
    line = proc.repeatable([sys.executable, "-c", "import sys; print(sys.argv[1:])", *odd], tmp_path)
    assert subprocess.run(["sh", "-c", line], capture_output=True).stdout.decode().strip() == str(odd)


def test_environment_is_merged_and_none_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_KEPT", "kept")
    monkeypatch.setenv("KVQ_GONE", "gone")
    env = {"KVQ_GONE": None, "KVQ_NEW": "new"}
    done = proc.run(["sh", "-c", "echo $KVQ_KEPT:$KVQ_GONE:$KVQ_NEW"], env=env, capture=True)
    assert done.stdout == b"kept::new\n"


def test_missing_program_and_folder_are_environment_problems(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot run no-such-program"):
        proc.run(["no-such-program"])
    with pytest.raises(EnvironmentProblem, match="does not exist"):
        proc.run(["true"], cwd=tmp_path / "absent")


def test_stdin_is_closed() -> None:
    assert proc.run(["cat"], capture=True, timeout=10).stdout == b""


def test_timeout_ends_the_whole_group(tmp_path: Path) -> None:
    script = f"sleep {SLEEP} & echo $! > '{tmp_path}/a.pid'; echo $$ > '{tmp_path}/b.pid'; wait"
    with pytest.raises(BuildError, match="no result within"):
        proc.run(["sh", "-c", script], timeout=1)
    assert wait_until_gone(wait_for_pids(tmp_path, 2)) == []


def test_daemon_that_keeps_the_pipe_is_not_waited_for(tmp_path: Path) -> None:
    start = time.monotonic()
    proc.run(["sh", "-c", f"setsid sleep {SLEEP} & echo $! > '{tmp_path}/a.pid'"])
    assert time.monotonic() - start < 30
    (daemon,) = wait_for_pids(tmp_path, 1)
    os.kill(daemon, signal.SIGKILL)


def test_ticks_come_while_the_child_is_silent() -> None:
    ticks: list[float] = []
    proc.run(["sleep", "2.6"], on_tick=lambda: ticks.append(time.monotonic()))
    assert 1 <= len(ticks) <= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_children_end_with_build_py(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end the group; after SIGKILL the kernel tells the child, which ends its own children."""
    script = f"""
trap 'kill $inner; exit' TERM
sleep {SLEEP} & inner=$!
echo $inner > '{tmp_path}/inner.pid'; echo $$ > '{tmp_path}/outer.pid'
wait"""
    program = executable(tmp_path / "child", script)
    parent_code = (
        "import signal, sys; from pathlib import Path; from kvbuild import cli, proc\n"
        "signal.signal(signal.SIGTERM, cli._interrupt)\n"
        "proc.run([Path(sys.argv[1])])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent_code, str(program)], cwd=REPO, stderr=subprocess.PIPE
    ) as parent:
        children = wait_for_pids(tmp_path, 2)
        assert all(map(alive, children))
        parent.send_signal(number)
        parent.communicate(timeout=20)
    assert wait_until_gone(children) == []
    assert parent.returncode != 0
