"""One run at a time in a work directory, and no work directory that something else owns."""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbuild.errors import EnvironmentProblem, UsageError

MARKER = ".kvbuild"
"""Shows that a directory was made here: only such a directory is ever removed."""


def claim(directory: Path, *, ours: bool = False) -> None:
    """Create `directory`, or accept it where it is empty, was made by kvbuild, or is `ours` by its place.

    Raises UsageError for anything else: a mistyped --work-dir must not fill, or later clean, somebody's folder.
    """
    if directory.exists() and not is_ours(directory):
        if not directory.is_dir():
            msg = f"{directory} is not a directory"
            raise UsageError(msg, todo="give another --work-dir")
        if not ours and any(directory.iterdir()):
            msg = f"{directory} is not empty and was not made by kvbuild"
            raise UsageError(msg, "--work-dir points to a directory with other files", "give a new or empty directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not is_ours(directory):
            (directory / ".gitignore").write_text("*\n", encoding="utf-8")  # inside a checkout it stays out of git
            (directory / MARKER).write_text("made by kvbuild; `build.py clean` may remove it\n", encoding="utf-8")
    except (PermissionError, FileExistsError, NotADirectoryError) as exc:
        msg = f"{directory}: {exc.strerror}"
        raise EnvironmentProblem(msg, todo="give a --work-dir that this user can write to") from exc


def is_ours(directory: Path) -> bool:
    return (directory / MARKER).is_file()


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. The kernel releases it when the process ends, however it ends: no lock goes stale."""
    path = directory / ".lock"
    with path.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            stream.seek(0)
            msg = f"another run works in {directory}"
            raise EnvironmentProblem(
                msg,
                stream.read().strip() or "it has just started",
                "wait for it to end, or use another --work-dir",
            ) from exc
        stream.truncate(0)
        stream.write(f"process {os.getpid()} since {time.strftime('%H:%M:%S')}: {shlex.join(sys.argv)}\n")
        stream.flush()
        yield
        stream.truncate(0)
