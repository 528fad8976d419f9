"""The Debian route: archives of the apt configuration, pool paths, apt's own words. apt itself is a script here."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvbuild import debian
from kvbuild.errors import DigestMismatch, SourceError
from python_tests.tool.engine import executable

REAL_ARCHIVES = debian.archives
"""Kept from before the fixture that takes the network away replaces it."""
DATA = b"the package"
SHA256 = hashlib.sha256(DATA).hexdigest()

LISTED = """
echo "'http://mirror.invalid/debian/dists/stable/InRelease' a 0"
echo "'http://mirror.invalid/debian/dists/stable-updates/InRelease' b 0"
echo "'http://other.invalid/debian-security/dists/stable-security/InRelease' c 0"
echo "'http://vendor.invalid/apt/dists/stable/InRelease' d 0"
echo "'http://second.invalid/debian/dists/stable/InRelease' e 0"
"""


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts for apt-get and apt-helper; the latter's body is replaced by the tests."""
    executable(tmp_path / "bin" / "apt-get", LISTED)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(debian, "APT_HELPER", executable(tmp_path / "bin" / "apt-helper", "exit 1"))
    REAL_ARCHIVES.cache_clear()
    monkeypatch.setattr(debian, "archives", REAL_ARCHIVES)
    return tmp_path


def helper(apt: Path, body: str) -> None:
    """The script sees the address as $url and the target as $target."""
    executable(apt / "bin" / "apt-helper", f'while [ "$1" != download-file ]; do shift; done\nurl=$2 target=$3\n{body}')


def test_archives_are_those_of_debian_itself(apt: Path) -> None:
    assert debian.archives() == ("http://mirror.invalid/debian", "http://second.invalid/debian")
    assert debian.unavailable() == ""


def test_other_distribution_has_no_such_route(apt: Path) -> None:
    executable(apt / "bin" / "apt-get", "echo \"'http://mirror.invalid/ubuntu/dists/noble/InRelease' a 0\"")
    assert debian.archives() == ()
    assert "not configured with a Debian archive" in debian.unavailable()
    with pytest.raises(SourceError, match="not configured"):
        debian.download("re2", "re2.tar.gz", SHA256, apt / "target")


def test_machine_without_apt(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "APT_HELPER", apt / "absent")
    assert debian.archives() == ()


@pytest.mark.parametrize(
    ("package", "file", "expected"),
    [
        ("re2", "re2_1.orig.tar.gz", "pool/main/r/re2/re2_1.orig.tar.gz"),
        ("libfoo", "libfoo_1+b1_all.deb", "pool/main/libf/libfoo/libfoo_1+b1_all.deb"),
        ("cpuinfo", "cpuinfo_0~git1 x.tar.xz", "pool/main/c/cpuinfo/cpuinfo_0~git1%20x.tar.xz"),
    ],
)
def test_pool_path(package: str, file: str, expected: str) -> None:
    assert debian.pool_path(package, file) == expected


def test_second_archive_serves_after_the_first_fails(apt: Path) -> None:
    helper(apt, f'case $url in *second*) printf "{DATA.decode()}" > "$target" ;; *) echo "E: 404"; exit 100 ;; esac')
    debian.download("re2", "re2.tar.gz", SHA256, apt / "the target")
    assert (apt / "the target").read_bytes() == DATA


def test_failure_tells_what_apt_said_of_each_archive(apt: Path) -> None:
    helper(apt, 'echo "E: Failed to fetch: 404  Not Found"; exit 100')
    with pytest.raises(SourceError) as caught:
        debian.download("re2", "re2.tar.gz", SHA256, apt / "target")
    assert caught.value.what.count("404  Not Found") == 2
    assert "second.invalid" in caught.value.what


def test_digest_mismatch_stops_with_both_digests(apt: Path) -> None:
    other = "1" * 64
    helper(
        apt,
        f'touch "$target.FAILED"; echo "Err:1 Hash Sum mismatch"; echo " - SHA256:{SHA256}"; echo " - SHA256:{other}";'
        'echo "E: Failed to fetch $url  Hash Sum mismatch"; exit 100',
    )
    with pytest.raises(DigestMismatch) as caught:
        debian.download("re2", "re2.tar.gz", SHA256, apt / "target")
    assert f"expected {SHA256}" in caught.value.what
    assert f"got      {other}" in caught.value.what
    assert not (apt / "target.FAILED").exists()
