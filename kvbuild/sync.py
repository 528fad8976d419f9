"""What the build tree and patches/ last agreed on, so that neither side's later edits are overwritten."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvbuild.git import Git

SYNCED = "refs/kvq/synced"
"""The commit of the build tree that the files of patches/ stood for after the last apply or export."""

_FILE = "kvq-synced.json"


def record(store: Git, commit: str, series_dir: Path) -> None:
    """Note that `commit` and the files of `series_dir` say the same."""
    store.set_ref(SYNCED, commit)
    write_atomically(store.git_dir / _FILE, json.dumps(series_digests(series_dir), indent=1).encode())


def recorded(store: Git) -> dict[str, str]:
    """SHA-256 of each patch and of the series at the last apply or export, by file name."""
    path = store.git_dir / _FILE
    if not path.exists():
        return {}
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def series_digests(series_dir: Path) -> dict[str, str]:
    files = sorted([*series_dir.glob("*.patch"), *series_dir.glob("series")])
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_atomically(path: Path, data: bytes, mode: int | None = None) -> None:
    """Put `data` at `path` so that a reader, or a run after a kill, sees the old bytes or all of the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.kvq-tmp")
    try:
        aside.write_bytes(data)
        if mode is not None:
            aside.chmod(mode)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
