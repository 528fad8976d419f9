"""Child processes: argument lists only, never a shell; nothing outlives build.py."""

from __future__ import annotations

import ctypes
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvbuild import log
from kvbuild.errors import BuildError, EnvironmentProblem, KvBuildError

Command = Sequence[str | Path]
"""A program and its arguments."""

TAIL_LINES = 40
GRACE_SECONDS = 5.0
"""How long a process group may take to end after SIGTERM before it is killed."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Completed:
    """`stdout` is the child's standard output when captured, else both streams' last lines."""

    returncode: int
    stdout: bytes


def run(
    cmd: Command,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    log: Path | None = None,
    check: bool = True,
    capture: bool = False,
    input: bytes | None = None,
    on_line: Callable[[str], None] | None = None,
    on_tick: Callable[[], None] | None = None,
    timeout: float | None = None,
    error: type[KvBuildError] = BuildError,
    what: str = "",
) -> Completed:
    """Run `cmd` to its end, in a process group of its own.

    `env` is merged over the inherited environment; a None value removes the variable.
    Both output streams are appended to the file `log`; with `capture`, standard output is returned instead.
    `on_line` gets each line of output, `on_tick` is called about once a second.
    Raises `error` on a non-zero exit (unless `check` is false) or after `timeout` seconds, and
    EnvironmentProblem where the program does not exist.
    """
    with _Child([str(part) for part in cmd], cwd, log, what) as child:
        try:
            child.start(env, capture, input)
            child.pump(on_line, on_tick, timeout, error)
        except BaseException:
            # Also on Ctrl-C: the group is in a session of its own, so the terminal did not signal it.
            child.end()
            raise
        done = child.completed()
        if check and done.returncode != 0:
            raise child.failure(error, done.returncode)
        return done


def repeatable(cmd: Command, cwd: Path | None = None) -> str:
    """The command as a line to paste into a shell."""
    line = shlex.join(str(part) for part in cmd)
    return f"cd {shlex.quote(str(cwd))} && {line}" if cwd else line


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    """After `kill -9` of build.py no compiler may go on writing into a build directory that the next run uses."""
    if _libc is None:
        return None

    def ask_kernel() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return ask_kernel


class _Child:
    def __init__(self, cmd: list[str], cwd: Path | None, log_path: Path | None, what: str) -> None:
        self.cmd = cmd
        self.cwd = cwd
        self.log_path = log_path
        self.what = what or Path(cmd[0]).name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.process: subprocess.Popen[bytes] | None = None
        self._files = ExitStack()
        self._partial = b""
        self._stdout: IO[bytes] | None = None
        self._pipe: IO[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.close()

    def start(self, env: Mapping[str, str | None] | None, capture: bool, input_bytes: bytes | None) -> None:
        log.debug(f"$ {repeatable(self.cmd, self.cwd)}")
        if self.cwd and not self.cwd.is_dir():
            msg = f"{self.what}: the directory {self.cwd} does not exist"
            raise EnvironmentProblem(msg)
        merged = {**os.environ, **(env or {})}
        if capture:
            self._stdout = self._files.enter_context(tempfile.TemporaryFile())
        stdin: int | IO[bytes] = subprocess.DEVNULL
        if input_bytes is not None:
            stdin = self._files.enter_context(tempfile.TemporaryFile())
            stdin.write(input_bytes)
            stdin.seek(0)
        if self.log_path:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._files.enter_context(self.log_path.open("ab"))
            self._log.write(f"$ {repeatable(self.cmd, self.cwd)}\n".encode())
            self._log.flush()
        try:
            self.process = subprocess.Popen(
                self.cmd,
                cwd=self.cwd,
                env={key: value for key, value in merged.items() if value is not None},
                stdin=stdin,
                stdout=self._stdout or subprocess.PIPE,
                stderr=subprocess.PIPE if capture else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent(os.getpid()),
            )
        except (FileNotFoundError, PermissionError) as exc:
            msg = f"{self.what}: cannot run {self.cmd[0]}: {exc.strerror}"
            raise EnvironmentProblem(msg, "the program is not installed or not executable") from exc
        self._pipe = self.process.stderr if capture else self.process.stdout
        assert self._pipe is not None
        self._files.enter_context(self._pipe)
        os.set_blocking(self._pipe.fileno(), False)

    def pump(
        self,
        on_line: Callable[[str], None] | None,
        on_tick: Callable[[], None] | None,
        timeout: float | None,
        error: type[KvBuildError],
    ) -> None:
        """Read until the process has ended. A daemon that it leaves behind may keep the pipe open."""
        process, stream = self.process, self._pipe
        assert process
        assert stream
        deadline = None if timeout is None else time.monotonic() + timeout
        last_tick = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            at_end = False
            while not at_end or process.poll() is None:
                ended = process.poll() is not None
                if at_end:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
                elif selector.select(0 if ended else 0.5):
                    data = os.read(stream.fileno(), 1 << 16)
                    at_end = not data
                    self._feed(data, on_line)
                elif ended:
                    at_end = True
                now = time.monotonic()
                if on_tick and now - last_tick >= 1:
                    last_tick = now
                    on_tick()
                if deadline is not None and now > deadline:
                    msg = f"{self.what}: no result within {timeout:g} s"
                    raise error(msg, "the machine or the network is much slower than expected", self._way_out())
        self._feed(b"\n" if self._partial else b"", on_line)

    def _feed(self, data: bytes, on_line: Callable[[str], None] | None) -> None:
        if self._log and data:
            self._log.write(data)
            self._log.flush()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip("\r")
            self.tail.append(line)
            if on_line:
                on_line(line)

    def end(self) -> None:
        """SIGTERM first: ninja and pip then end their own children, which may sit in other groups."""
        if not self.process:
            return
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)

    def completed(self) -> Completed:
        assert self.process
        stdout = "\n".join(self.tail).encode()
        if self._stdout:
            self._stdout.seek(0)
            stdout = self._stdout.read()
        return Completed(self.process.returncode, stdout)

    def failure(self, error: type[KvBuildError], returncode: int) -> KvBuildError:
        if returncode < 0:
            status = f"was killed by signal {-returncode}"
        else:
            status = f"failed with exit code {returncode}"
        shown = "\n".join(f"  | {line}" for line in self.tail)
        return error(f"{self.what} {status}", f"its last lines were\n{shown}" if shown else "", self._way_out())

    def _way_out(self) -> str:
        see = f"see {self.log_path}; " if self.log_path else ""
        return f"{see}repeat with\n  {repeatable(self.cmd, self.cwd)}"
