"""Downloads: verified, cached by digest, resumed, retried; mirrors first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbuild import download
from kvbuild.config import Config
from kvbuild.download import Pin, at_hand, cached, obtain, url_route
from kvbuild.errors import DigestMismatch, SourceError
from python_tests.tool.engine import Served, make_cfg, serve

BODY = bytes(range(256)) * 512
OTHER = b"not the pinned bytes"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "RETRY_PAUSE_SECONDS", 0.01)
    with serve(BODY) as served:
        yield served


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return make_cfg(tmp_path)


PIN = Pin(file="file.bin", digest=hashlib.sha256(BODY).hexdigest())


def test_fetched_once_then_taken_from_the_cache(cfg: Config, server: Served) -> None:
    first = obtain(cfg, PIN, [url_route(server.url)])
    again = obtain(cfg, PIN, [url_route(server.url)])
    assert first == again == cached(cfg, PIN)
    assert first.read_bytes() == BODY
    assert len(server.requests) == 1
    assert at_hand(cfg, PIN)


def test_mismatch_names_both_digests_and_stores_nothing(cfg: Config, server: Served) -> None:
    server.body = OTHER
    with pytest.raises(SourceError) as caught:
        obtain(cfg, PIN, [url_route(server.url)])
    told = str(caught.value)
    assert f"expected {PIN.digest}" in told
    assert f"got      {hashlib.sha256(OTHER).hexdigest()}" in told
    assert [path for path in cfg.cache_dir.rglob("*") if path.is_file()] == []


def test_sha1_pin_is_verified_too(cfg: Config, server: Served) -> None:
    good = Pin(file="f", digest=hashlib.sha1(BODY).hexdigest(), algorithm="sha1")
    assert obtain(cfg, good, [url_route(server.url)]).read_bytes() == BODY
    bad = Pin(file="f", digest="0" * 40, algorithm="sha1")
    with pytest.raises(SourceError, match="sha1 mismatch"):
        obtain(cfg, bad, [url_route(server.url)])


def test_partial_file_is_resumed(cfg: Config, server: Served) -> None:
    part = cached(cfg, PIN).with_name("file.bin.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(BODY[:1000])
    assert obtain(cfg, PIN, [url_route(server.url)]).read_bytes() == BODY
    assert server.requests == ["bytes=1000-"]
    assert not part.exists()


def test_server_without_ranges_starts_over(cfg: Config, server: Served) -> None:
    server.ranges = False
    part = cached(cfg, PIN).with_name("file.bin.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(BODY[:1000])
    assert obtain(cfg, PIN, [url_route(server.url)]).read_bytes() == BODY


def test_wrong_start_is_thrown_away_once(cfg: Config, server: Served) -> None:
    part = cached(cfg, PIN).with_name("file.bin.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    assert obtain(cfg, PIN, [url_route(server.url)]).read_bytes() == BODY
    assert server.requests == ["bytes=1000-", ""]


def test_route_that_verifies_for_itself_starts_over_too(cfg: Config) -> None:
    """As apt does, which removes the file when its digest is wrong."""
    part = cached(cfg, PIN).with_name("file.bin.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)

    def fetch(target: Path) -> None:
        if target.exists():
            target.unlink()
            raise DigestMismatch(target.name)
        target.write_bytes(BODY)

    assert obtain(cfg, PIN, [("apt", fetch)]).read_bytes() == BODY


def test_complete_partial_file_needs_no_body(cfg: Config, server: Served) -> None:
    part = cached(cfg, PIN).with_name("file.bin.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(BODY)
    assert obtain(cfg, PIN, [url_route(server.url)]).read_bytes() == BODY
    assert server.requests == [f"bytes={len(BODY)}-"]


@pytest.mark.parametrize("failures", [[503], [503, 429], [0], [0, 500, 0]], ids=str)
def test_transient_failures_are_tried_again(cfg: Config, server: Served, failures: list[int]) -> None:
    server.failures = list(failures)
    assert obtain(cfg, PIN, [url_route(server.url)]).read_bytes() == BODY
    assert len(server.requests) == len(failures) + 1


def test_cut_connection_is_resumed_where_it_ended(cfg: Config, server: Served) -> None:
    server.failures = [0]
    obtain(cfg, PIN, [url_route(server.url)])
    assert server.requests == ["", f"bytes={len(BODY) // 2}-"]


def test_missing_file_is_not_tried_again(cfg: Config, server: Served) -> None:
    server.failures = [404] * 10
    with pytest.raises(SourceError, match="HTTP status 404"):
        obtain(cfg, PIN, [url_route(server.url)])
    assert len(server.requests) == 1


def test_endless_failure_gives_up(cfg: Config, server: Served) -> None:
    server.failures = [503] * 10
    with pytest.raises(SourceError, match="HTTP status 503"):
        obtain(cfg, PIN, [url_route(server.url)])
    assert len(server.requests) == download.ATTEMPTS


def test_dead_network_names_every_route(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRY_PAUSE_SECONDS", 0.01)
    routes = [url_route("http://127.0.0.1:9/a"), url_route("http://127.0.0.1:9/b")]
    with pytest.raises(SourceError) as caught:
        obtain(cfg, PIN, routes)
    assert "127.0.0.1:9/a" in caught.value.why
    assert "127.0.0.1:9/b" in caught.value.why
    assert "--mirror" in caught.value.todo


def test_mismatch_stops_before_the_next_route(cfg: Config, server: Served) -> None:
    server.body = OTHER
    with pytest.raises(DigestMismatch):
        obtain(cfg, PIN, [url_route(server.url), url_route(server.url + "?second")])
    assert len(server.requests) == 1


def test_second_route_serves_after_the_first_fails(cfg: Config, server: Served) -> None:
    server.failures = [404]
    routes = [url_route(server.url + "?first"), url_route(server.url + "?second")]
    assert obtain(cfg, PIN, routes).read_bytes() == BODY


def test_mirror_comes_before_everything(tmp_path: Path, server: Served) -> None:
    mirror = tmp_path / "a mirror"
    mirror.mkdir()
    (mirror / PIN.file).write_bytes(BODY)
    cfg = make_cfg(tmp_path, mirrors=(tmp_path / "absent", mirror))
    assert obtain(cfg, PIN, [url_route(server.url)]) == mirror / PIN.file
    assert server.requests == []


def test_wrong_file_in_a_mirror_is_an_error_not_a_miss(tmp_path: Path, server: Served) -> None:
    (tmp_path / PIN.file).write_bytes(OTHER)
    cfg = make_cfg(tmp_path, mirrors=(tmp_path,))
    with pytest.raises(SourceError, match="mismatch") as caught:
        obtain(cfg, PIN, [url_route(server.url)])
    assert str(tmp_path) in caught.value.what
    assert server.requests == []


def test_damaged_cache_is_fetched_again(cfg: Config, server: Served, capfd: pytest.CaptureFixture[str]) -> None:
    obtain(cfg, PIN, [url_route(server.url)]).write_bytes(OTHER)
    assert obtain(cfg, PIN, [url_route(server.url)]).read_bytes() == BODY
    assert "damaged" in capfd.readouterr().err


def test_full_disk_is_not_taken_for_a_network_fault(cfg: Config, server: Served) -> None:
    def no_space(part: Path) -> None:
        raise OSError(28, "No space left on device", str(part))

    with pytest.raises(OSError, match="No space left"):
        obtain(cfg, PIN, [("a full disk", no_space)])
