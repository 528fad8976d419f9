"""Unpacking: stripped, filtered, and nothing outside the target."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbuild.archive import unpack
from kvbuild.errors import SourceError

FILES = {"top/a.txt": b"a", "top/sub/b.txt": b"b", "top/sub/deep/c.txt": b"c"}
Maker = Callable[[Path], Path]


def tar_bytes(mode: str, files: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = 0o4777
            if change:
                change(member)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def ar_member(name: str, data: bytes) -> bytes:
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)


def make_tar(path: Path) -> Path:
    path = path / "x.tar.xz"
    path.write_bytes(tar_bytes("w:xz", FILES))
    return path


def make_zip(path: Path) -> Path:
    path = path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in FILES.items():
            archive.writestr(name, data)
    return path


def make_deb(path: Path, compression: str = "xz") -> Path:
    path = path / "x.deb"
    control = ar_member("control.tar.xz", tar_bytes("w:xz", {"./control": b"odd"}))
    data = ar_member(f"data.tar.{compression}", tar_bytes("w:xz", {f"./{name}": text for name, text in FILES.items()}))
    path.write_bytes(b"!<arch>\n" + ar_member("debian-binary", b"2.0\n") + control + data)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make", [make_tar, make_zip, make_deb])
def test_every_kind_unpacks_alike(tmp_path: Path, make: Maker) -> None:
    archive, target = make(tmp_path), tmp_path / "out dir"
    unpack(archive, target)
    assert contents(target) == FILES


@pytest.mark.parametrize("make", [make_tar, make_zip, make_deb])
def test_strip_and_keep(tmp_path: Path, make: Maker) -> None:
    archive, target = make(tmp_path), tmp_path / "out"
    unpack(archive, target, strip=1, keep=("sub/deep", "a.txt"))
    assert contents(target) == {"a.txt": b"a", "sub/deep/c.txt": b"c"}


def test_modes_are_plain(tmp_path: Path) -> None:
    unpack(make_tar(tmp_path), tmp_path / "out", strip=1)
    assert (tmp_path / "out" / "a.txt").stat().st_mode & 0o7777 == 0o755


def test_hard_link_follows_the_strip(tmp_path: Path) -> None:
    def link(member: tarfile.TarInfo) -> None:
        if member.name == "top/z":
            member.type, member.linkname, member.size = tarfile.LNKTYPE, "top/a.txt", 0

    archive = tmp_path / "x.tar"
    archive.write_bytes(tar_bytes("w", {"top/a.txt": b"a", "top/z": b""}, link))
    unpack(archive, tmp_path / "out", strip=1)
    assert contents(tmp_path / "out") == {"a.txt": b"a", "z": b"a"}


@pytest.mark.parametrize("name", ["../evil", "top/../../evil", "/evil"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    tar, folder = tmp_path / "x.tar", tmp_path / "in" / "out"
    tar.write_bytes(tar_bytes("w", {name: b"evil"}))
    with pytest.raises(SourceError, match="leads out"):
        unpack(tar, folder)
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, b"evil")
    with pytest.raises(SourceError, match="leads out"):
        unpack(wheel, tmp_path / "in" / "out2")
    assert list(tmp_path.rglob("evil")) == []


@pytest.mark.parametrize(("kind", "target"), [(tarfile.SYMTYPE, "../../evil"), (tarfile.LNKTYPE, "../evil")])
def test_links_that_lead_out_are_refused(tmp_path: Path, kind: bytes, target: str) -> None:
    def link(member: tarfile.TarInfo) -> None:
        member.type, member.linkname, member.size = kind, target, 0

    tar = tmp_path / "x.tar"
    tar.write_bytes(tar_bytes("w", {"top/link": b""}, link))
    with pytest.raises(SourceError, match="leads out"):
        unpack(tar, tmp_path / "in" / "out")


def test_link_within_is_kept(tmp_path: Path) -> None:
    def link(member: tarfile.TarInfo) -> None:
        if member.name == "top/sub/link":
            member.type, member.linkname, member.size = tarfile.SYMTYPE, "../a.txt", 0

    tar = tmp_path / "x.tar"
    tar.write_bytes(tar_bytes("w", {"top/a.txt": b"a", "top/sub/link": b""}, link))
    unpack(tar, tmp_path / "out", strip=1)
    assert (tmp_path / "out" / "sub" / "link").read_bytes() == b"a"


def test_device_is_refused(tmp_path: Path) -> None:
    def device(member: tarfile.TarInfo) -> None:
        member.type, member.size = tarfile.FIFOTYPE, 0

    tar = tmp_path / "x.tar"
    tar.write_bytes(tar_bytes("w", {"pipe": b""}, device))
    with pytest.raises(SourceError, match="neither a file"):
        unpack(tar, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".tar.xz", ".zip", ".deb", ".tar.gz"])
def test_damaged_archive_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"this is no archive")
    with pytest.raises(SourceError, match="cannot be unpacked"):
        unpack(path, tmp_path / "out")


@pytest.mark.parametrize("mode", ["w:xz", "w:gz", "w:bz2"])
def test_truncated_archive_is_named(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "x.tar"
    data = tar_bytes(mode, {"big": random.Random(1).randbytes(1 << 16)})
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match="cannot be unpacked"):
        unpack(path, tmp_path / "out")


def test_zstd_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="zstd"):
        unpack(make_deb(tmp_path, "zst"), tmp_path / "out")
