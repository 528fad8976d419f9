"""A folder, an archive or a commit elsewhere becomes one commit of our repository: bytes and modes, nothing else.

The files are streamed into `git fast-import`. Nothing is unpacked, so nothing half-unpacked can stay behind, and
neither the file system nor an attribute of the tree can change what is stored.
"""

from __future__ import annotations

import lzma
import os
import stat
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbuild import log
from kvbuild.errors import EnvironmentProblem, SourceError
from kvbuild.git import Git

INCOMING = "refs/kvq/incoming"
_COMMITTER = b"committer kvbuild <kvbuild@localhost> 1735689600 +0000\n"
_SUBMODULE = "160000"
_UNSAFE = {"", ".", "..", ".git"}


@dataclass(frozen=True)
class Member:
    """One file: its path in the tree, git's mode, and its bytes (for a submodule the commit id)."""

    path: str
    mode: str
    data: bytes


def import_tree(store: Git, members: Iterable[Member], message: str) -> str:
    """Write `members` as one commit without parents; the same members give the same id everywhere.

    Leaves INCOMING at the commit. Raises EnvironmentProblem where git cannot write; errors of `members` pass through.
    """
    _remove_leftovers(store)
    env = {**os.environ, **store.environment()}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            ["git", "fast-import", "--quiet", "--force", "--done"],
            env={key: value for key, value in env.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        assert process.stdin is not None
        count = 0
        try:
            text = message.encode()
            process.stdin.write(b"commit %s\n%sdata %d\n%s\n" % (INCOMING.encode(), _COMMITTER, len(text), text))
            for count, member in enumerate(members, 1):
                process.stdin.write(_command(member))
                if count % 500 == 0:
                    log.progress(f"  importing: {count} files")
            process.stdin.write(b"done\n")
            process.stdin.close()
            returncode = process.wait()
        except BrokenPipeError:
            returncode = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            _remove_leftovers(store)
            raise
        errors.seek(0)
        told = errors.read().decode("utf-8", "replace").strip()
    if returncode != 0:
        _remove_leftovers(store)
        msg = f"the source could not be stored in {store.git_dir}: git fast-import failed ({returncode})"
        raise EnvironmentProblem(
            msg, told or "the disk is full or a limit on file sizes is set", "make room, run again"
        )
    log.debug(f"imported {count} files")
    return store.text("rev-parse", INCOMING)


def _command(member: Member) -> bytes:
    if _UNSAFE.intersection(member.path.lower().split("/")):
        msg = f"the source holds a file at {member.path!r}"
        raise SourceError(msg, "such a path leads out of the tree, or into git's own folder")
    quoted = os.fsencode(member.path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    if member.mode == _SUBMODULE:
        return b'M 160000 %s "%s"\n' % (member.data, quoted)
    return b'M %s inline "%s"\ndata %d\n%s\n' % (member.mode.encode(), quoted, len(member.data), member.data)


def _remove_leftovers(store: Git) -> None:
    """What a killed import leaves: a pack without an index, and git's crash report."""
    for pattern in ("objects/pack/tmp_*", "fast_import_crash_*"):
        for path in store.git_dir.glob(pattern):
            path.unlink(missing_ok=True)


def members_of_commit(repository: Git, commit: str) -> Iterator[Member]:
    """The files of a commit in another repository, as stored there."""
    entries = repository.entries(commit)
    plain = {path: entry for path, entry in entries.items() if entry.mode != _SUBMODULE}
    contents = repository.blobs([entry.oid for entry in plain.values()])
    for (path, entry), data in zip(plain.items(), contents, strict=True):
        yield Member(path, entry.mode, data)
    for path, entry in entries.items():
        if entry.mode == _SUBMODULE:
            yield Member(path, entry.mode, entry.oid.encode())


def members_of_folder(folder: Path) -> Iterator[Member]:
    """All files below `folder`, sorted; git's own files are left out."""
    for here, subfolders, names in os.walk(folder):
        links = [name for name in subfolders if Path(here, name).is_symlink()]
        subfolders[:] = sorted(name for name in subfolders if name != ".git" and name not in links)
        for name in sorted([*names, *links]):
            path = Path(here, name)
            if name != ".git":
                yield _member_of_file(path.relative_to(folder).as_posix(), path)


def _member_of_file(rel: str, path: Path) -> Member:
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return Member(rel, "120000", os.fsencode(path.readlink()))
        if stat.S_ISREG(mode):
            return Member(rel, "100755" if mode & 0o100 else "100644", path.read_bytes())
    except OSError as exc:
        msg = f"--source: {path}: {exc.strerror}"
        raise SourceError(msg, todo="make the whole tree readable, and leave it alone while it is imported") from exc
    msg = f"--source: {path} is neither a file nor a link"
    raise SourceError(msg, "it is no source tree as upstream ships it")


def members_of_archive(archive: Path) -> Iterator[Member]:
    """The files of a tarball or zip file below its one top folder. SourceError where it is damaged or has none."""
    try:
        if zipfile.is_zipfile(archive):
            yield from _below_top_folder(archive, _members_of_zip(archive))
        else:
            yield from _below_top_folder(archive, _members_of_tar(archive))
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError) as exc:
        if isinstance(exc, BrokenPipeError):
            raise
        msg = f"{archive} cannot be read: {exc}"
        raise SourceError(msg, "the file is damaged, incomplete or no archive", "get it again") from exc


def _members_of_tar(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as tar:
        for item in tar:
            if item.issym():
                yield Member(item.name, "120000", os.fsencode(item.linkname))
            elif item.isreg() or item.islnk():
                stream = tar.extractfile(item)
                assert stream is not None
                yield Member(item.name, "100755" if item.mode & 0o100 else "100644", stream.read())
            elif not item.isdir():
                msg = f"{archive}: member {item.name} is neither a file, a folder nor a link"
                raise SourceError(msg)


def _members_of_zip(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as source:
        for item in source.infolist():
            mode = item.external_attr >> 16
            if not item.is_dir():
                kind = "120000" if stat.S_ISLNK(mode) else "100755" if mode & 0o100 else "100644"
                yield Member(item.filename, kind, source.read(item))


def _below_top_folder(archive: Path, members: Iterable[Member]) -> Iterator[Member]:
    top = ""
    for member in members:
        first, _, rest = member.path.removeprefix("./").partition("/")
        top = top or first
        if first != top or not rest:
            msg = f"{archive}: {member.path} lies outside of one top folder"
            raise SourceError(msg, "it is not an archive as upstream or Debian ships it", "give the unpacked tree")
        yield Member(rest, member.mode, member.data)
