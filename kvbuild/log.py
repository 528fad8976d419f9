"""Progress on standard error. Standard output stays free for results that a script reads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET, NORMAL, VERBOSE = -1, 0, 1

_level = NORMAL
_transient = False
"""True while the last thing written is a progress line that the next message must erase."""


def set_level(verbosity: int) -> None:
    """-1 shows warnings only, 0 steps and notes, 1 every command."""
    global _level
    _level = verbosity


def is_terminal() -> bool:
    """True where a bar may be redrawn in place."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def format_seconds(seconds: float) -> str:
    """`3.2 s`, `4 min 05 s` or `1 h 02 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def info(msg: str) -> None:
    if _level >= NORMAL:
        _write(msg)


def debug(msg: str) -> None:
    if _level >= VERBOSE:
        _write(_paint(msg, "2"))


def warn(msg: str) -> None:
    _write(_paint("warning: ", "33") + msg)


def error(msg: str) -> None:
    _write(_paint("error: ", "31;1") + msg)


def progress(msg: str) -> None:
    """Redraw one line in place; does nothing where standard error is not a terminal."""
    global _transient
    if _level < NORMAL or not is_terminal():
        return
    columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    sys.stderr.write("\r\x1b[K" + msg[: columns - 1])
    sys.stderr.flush()
    _transient = True


@contextmanager
def step(name: str) -> Iterator[None]:
    """Announce a step, and at its end say how long it took and whether it worked."""
    start = time.monotonic()
    info(f"{_mark('▸', '->')} {name}")
    try:
        yield
    except BaseException as exc:
        verdict = "interrupted" if isinstance(exc, KeyboardInterrupt) else "failed"
        info(_paint(f"{_mark('✗', 'x')} {name}: {verdict} after {format_seconds(time.monotonic() - start)}", "31"))
        raise
    info(_paint(f"{_mark('✓', 'ok')} {name}: {format_seconds(time.monotonic() - start)}", "32"))


def _write(msg: str) -> None:
    global _transient
    if _transient:
        sys.stderr.write("\r\x1b[K")
        _transient = False
    sys.stderr.write(msg + "\n")
    sys.stderr.flush()


def _paint(msg: str, code: str) -> str:
    if not is_terminal() or "NO_COLOR" in os.environ:
        return msg
    return f"\x1b[{code}m{msg}\x1b[0m"


def _mark(sign: str, plain: str) -> str:
    encoding = (sys.stderr.encoding or "").lower()
    return sign if is_terminal() and encoding.startswith("utf") else plain
