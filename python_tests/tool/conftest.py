"""Fixtures: a fake upstream that is made once, and a fresh project on it for each test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbuild import debian, log
from kvbuild.patchset import apply
from kvbuild.source import fetch_source
from python_tests.tool.fake_upstream import Project, Upstream, make_project, make_upstream


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """A job in the background of a script inherits that SIGINT is ignored, and so would the programs under test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    return make_upstream(tmp_path_factory.mktemp("upstream"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach out: apt is not asked, and git's proxy is a port where nobody listens."""
    monkeypatch.setattr(debian, "archives", lambda: ())
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    log.set_level(log.NORMAL)


@pytest.fixture
def project(tmp_path: Path, upstream: Upstream) -> Project:
    return make_project(tmp_path, upstream)


@pytest.fixture
def applied(project: Project) -> Project:
    """A project whose patched source is checked out."""
    fetch_source(project.cfg, project.base)
    apply(project.cfg, project.base)
    return project
