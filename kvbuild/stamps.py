"""What each stage left behind: a digest of its inputs, and its results. Written last, in one step."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvbuild.sync import write_atomically


@dataclass(frozen=True, kw_only=True)
class Stamp:
    digest: str
    seconds: float
    finished: str = ""
    """local time, for people"""
    outputs: dict[str, Any] = field(default_factory=dict)
    """results that later stages read; JSON values only"""


def load(path: Path) -> Stamp | None:
    """The stamp, or None where there is none that can be read: then the stage runs again."""
    try:
        return Stamp(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def save(path: Path, stamp: Stamp) -> None:
    values = asdict(stamp) | {"finished": time.strftime("%Y-%m-%d %H:%M:%S")}
    # Keys stay in order: a command line made from loaded outputs must equal the one made from fresh ones.
    write_atomically(path, json.dumps(values, indent=1).encode() + b"\n")


def digest_of(values: object) -> str:
    """SHA-256 of plain (JSON) values: the same values give the same digest in every run."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def digest_files(root: Path, paths: Iterable[Path]) -> str:
    """SHA-256 over names (relative to `root`) and contents, whatever the order."""
    known = hashlib.sha256()
    for path in sorted(paths):
        known.update(f"{path.relative_to(root)}\0".encode())
        known.update(hashlib.sha256(path.read_bytes()).digest())
    return known.hexdigest()


def file_id(path: Path) -> list[int]:
    """Size and mtime in ns: enough to know a large file again without reading it. [0, 0] where it is missing."""
    try:
        stat = path.stat()
    except OSError:
        return [0, 0]
    return [stat.st_size, stat.st_mtime_ns]
