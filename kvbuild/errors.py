"""Failures that a user can act on: one class per kind, each with its own exit code.

Every message answers three questions: what happened, why most likely, what to do.
"""

from __future__ import annotations

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports SIGINT."""


class KvBuildError(Exception):
    """A failure with a way out. `exit_code` becomes the exit code of build.py."""

    exit_code = 1
    kind = "error"

    def __init__(self, what: str, why: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.todo = todo

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"why: {self.why}")
        if self.todo:
            lines.append(f"do: {self.todo}")
        return "\n".join(lines)


class UsageError(KvBuildError):
    """The command line asks for something that does not exist or does not fit together."""

    exit_code = 2
    kind = "usage error"


class EnvironmentProblem(KvBuildError):
    """The machine lacks something: a tool, a header, memory, disk, a readable path."""

    exit_code = 3
    kind = "environment error"


class SourceError(KvBuildError):
    """A download or a source tree is missing, unreachable or not what was pinned."""

    exit_code = 4
    kind = "source error"


class DigestMismatch(SourceError):
    """A file is not the pinned one. No other route is tried: somebody should look first."""


class PatchError(KvBuildError):
    """The patch set does not fit the source, or local edits stand in the way."""

    exit_code = 5
    kind = "patch error"


class BuildError(KvBuildError):
    """CMake, the compiler or the packaging failed."""

    exit_code = 6
    kind = "build error"


class TestFailure(KvBuildError):
    """The wheel was built, but its tests fail or did not run."""

    __test__ = False  # pytest collects classes named Test*
    exit_code = 7
    kind = "test failure"
