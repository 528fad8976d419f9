"""Support for tests of the engine: a Config on a scratch folder, and an HTTP server that misbehaves on request."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbuild.config import Base, Config, DebianSource, GitSource

REPO = Path(__file__).resolve().parents[2]


def make_cfg(root: Path, **changes: Any) -> Config:  # noqa: ANN401 - any field of Config
    """A Config whose paths have spaces and lie below `root`; the repository is the real one unless changed."""
    settings: dict[str, Any] = {
        "repo": REPO,
        "base": "v1.21.0",
        "work_dir": root / "work dir",
        "cache_dir": root / "cache dir",
    }
    return Config(**settings | changes)


def make_base(**changes: Any) -> Base:  # noqa: ANN401 - any field of Base
    git = GitSource(url="https://example.invalid/x.git", tag="v1", commit="0" * 40, upstream_tree="", patched_tree="")
    debian = DebianSource(
        package="x", version="1", suite="s", archive="x.tar.xz", sha256="0" * 64, upstream_tree="", patched_tree=""
    )
    settings: dict[str, Any] = {
        "name": "v1.21.0",
        "version": "1.21.0",
        "revision": 7,
        "git": git,
        "debian": debian,
        "cuda_min": "12.0",
        "cuda_max": "13.0",
        "python_min": "3.11",
        "python_max": "3.13",
    }
    return Base(**settings | changes)


def executable(path: Path, script: str) -> Path:
    """A shell script that stands for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@dataclass
class Served:
    """What the server gives, and what it was asked for."""

    body: bytes
    url: str = ""
    failures: list[int] = field(default_factory=list)
    """HTTP codes for the first requests; 0 cuts the connection in the middle of the body"""
    ranges: bool = True
    requests: list[str] = field(default_factory=list)
    """the Range header of each request, empty without one"""


@contextmanager
def serve(body: bytes) -> Iterator[Served]:
    """A server on the loopback interface, with `body` at every path."""
    served = Served(body)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append(self.headers.get("Range", ""))
            failure = served.failures.pop(0) if served.failures else None
            if failure:
                self.send_error(failure)
                return
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if self._partial() else 0
            if start >= len(served.body) > 0 and self._partial():
                self.send_error(416)
                return
            rest = served.body[start:]
            self.send_response(206 if self._partial() else 200)
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self.wfile.write(rest if failure is None else rest[: len(rest) // 2])

        def _partial(self) -> bool:
            return served.ranges and "Range" in self.headers

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_port}/file.bin"
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
