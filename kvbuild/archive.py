"""Unpacks what registries serve: tarballs, zip files and wheels, Debian packages."""

from __future__ import annotations

import copy
import gzip
import io
import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from kvbuild.errors import SourceError

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER = 60
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    ValueError,
)


def unpack(archive: Path, target: Path, *, strip: int = 0, keep: tuple[str, ...] = ()) -> None:
    """Unpack into the new directory `target`.

    `strip` drops that many leading folders; `keep` limits the result to these paths (after stripping).
    Members that would land outside `target` are refused by SourceError, as is a damaged archive.
    """
    target.mkdir(parents=True)
    try:
        if archive.suffix in (".zip", ".whl"):
            _unpack_zip(archive, target, strip, keep)
        elif archive.suffix == ".deb":
            name, data = _data_member(archive)
            with tarfile.open(name, fileobj=io.BytesIO(data)) as tar:
                _unpack_tar(tar, target, strip, keep)
        else:
            with tarfile.open(archive) as tar:
                _unpack_tar(tar, target, strip, keep)
    except _DAMAGED as exc:
        msg = f"{archive} cannot be unpacked: {exc}"
        raise SourceError(msg, "the file is damaged or of a kind that is not known here") from exc


def _unpack_tar(tar: tarfile.TarFile, target: Path, strip: int, keep: tuple[str, ...]) -> None:
    # The standard library's data filter came with 3.11.4, so the same rules are kept here for every version.
    tar.extraction_filter = lambda member, _path: member
    for original in tar:
        name = _placed(original.name, strip, keep)
        if not name:
            continue
        member = copy.copy(original)
        member.name = name
        if member.islnk():
            member.linkname = _placed(member.linkname, strip, ())
        _check_inside(target, name)
        if member.issym() or member.islnk():
            _check_inside(target, f"{PurePosixPath(name).parent if member.issym() else '.'}/{member.linkname}")
        elif not (member.isfile() or member.isdir()):
            msg = f"member {original.name} is neither a file, a folder nor a link"
            raise ValueError(msg)
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        tar.extract(member, target)


def _unpack_zip(archive: Path, target: Path, strip: int, keep: tuple[str, ...]) -> None:
    with zipfile.ZipFile(archive) as source:
        for member in source.infolist():
            name = _placed(member.filename, strip, keep)
            if not name or member.is_dir():
                continue
            _check_inside(target, name)
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with source.open(member) as stream, path.open("wb") as copy_to:
                shutil.copyfileobj(stream, copy_to)
            path.chmod(0o755 if member.external_attr >> 16 & 0o100 else 0o644)


def _check_inside(target: Path, name: str) -> None:
    if not (target / name).resolve().is_relative_to(target.resolve()):
        msg = f"member {name} leads out of the target folder"
        raise ValueError(msg)


def _placed(name: str, strip: int, keep: tuple[str, ...]) -> str:
    """The member's path below the target; empty when it is left out."""
    parts = [part for part in PurePosixPath(name).parts if part != "."][strip:]
    path = "/".join(parts)
    if keep and not any(path == kept or path.startswith(kept + "/") for kept in keep):
        return ""
    return path


def _data_member(package: Path) -> tuple[str, bytes]:
    """Name and bytes of a Debian package's data.tar.*: an ar archive, for which Python has no reader."""
    with package.open("rb") as stream:
        if stream.read(len(_AR_MAGIC)) != _AR_MAGIC:
            msg = "not a Debian package"
            raise ValueError(msg)
        for name, size in _ar_members(stream):
            if name.startswith("data.tar"):
                if name.endswith(".zst"):
                    msg = "its data is compressed with zstd, which Python's standard library cannot read"
                    raise ValueError(msg)
                return name, stream.read(size)
            stream.seek(size + size % 2, io.SEEK_CUR)
    msg = "no data.tar in the Debian package"
    raise ValueError(msg)


def _ar_members(stream: IO[bytes]) -> Iterator[tuple[str, int]]:
    """Yield (name, size) with the stream at the member's first byte; the caller moves past it."""
    while len(header := stream.read(_AR_HEADER)) == _AR_HEADER:
        yield header[:16].decode("ascii").rstrip(" /"), int(header[48:58])
