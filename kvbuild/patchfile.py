"""Reading the series and its mailbox patches."""

from __future__ import annotations

import email
import email.policy
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvbuild.errors import PatchError
from kvbuild.git import ZERO_ID

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,49}")
TRAILER = re.compile(r"([A-Z][A-Za-z-]*): (.*)")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_ESCAPE = re.compile(rb"\\(?:([0-7]{3})|(.))")
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d+))?$")


@dataclass(frozen=True)
class FileEdit:
    """What a patch does to one file: full blob ids before and after, ZERO_ID for none."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Patch:
    """A mailbox file. `name` is the file name without `.patch`."""

    name: str
    raw: bytes
    subject: str
    message: str
    """the text between the mail header and the diff"""
    edits: tuple[FileEdit, ...]
    added: tuple[tuple[int, str], ...]
    """lines that the patch adds, with their line number in the patch file"""

    @property
    def trailers(self) -> dict[str, list[str]]:
        """`Key: value` lines of the message's last paragraph; a line that starts with a blank continues one."""
        found: dict[str, list[str]] = {}
        key = ""
        for line in self.message.strip().split("\n\n")[-1].splitlines():
            if match := TRAILER.fullmatch(line.rstrip()):
                key = match[1]
                found.setdefault(key, []).append(match[2])
            elif key and line[:1].isspace():
                found[key][-1] += " " + line.strip()
            else:
                return {}
        return found


def subject_name(subject: str) -> str:
    """The file name, without `.patch`, that a commit's subject gives. PatchError where it gives none."""
    name, colon, rest = subject.partition(": ")
    if not colon or not rest.strip() or not NAME_PATTERN.fullmatch(name):
        msg = f"commit subject {subject!r} does not name a patch file"
        todo = (
            "write it as `<area>-<what>: <sentence>`, the part before the colon in lower case, digits and hyphens, "
            "at most 50 characters"
        )
        raise PatchError(msg, todo=todo)
    return name


def read_series(directory: Path) -> list[str]:
    """Patch names in order, without `.patch`. Blank lines and lines that start with # are skipped."""
    path = directory / "series"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        msg = f"{path}: {exc.strerror}"
        raise PatchError(msg, "every base has a folder of patches with a series file") from exc
    names = []
    for line in lines:
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name = entry.removesuffix(".patch")
        if name == entry or not NAME_PATTERN.fullmatch(name):
            msg = f"{path}: {entry!r} is not the name of a patch file"
            raise PatchError(msg, todo="one `<area>-<what>.patch` a line, or a comment that starts with #")
        if name in names:
            msg = f"{path}: {entry} is listed twice"
            raise PatchError(msg)
        names.append(name)
    return names


def read_patches(directory: Path) -> list[Patch]:
    """The patches of the series, in order."""
    return [read_patch(directory / f"{name}.patch") for name in read_series(directory)]


def read_patch(path: Path) -> Patch:
    try:
        raw = path.read_bytes()
    except OSError as exc:
        msg = f"{path}: {exc.strerror}"
        raise PatchError(msg, "the series lists this patch", "restore the file or remove its line") from exc
    return parse_patch(path.name.removesuffix(".patch"), raw)


def parse_patch(name: str, raw: bytes) -> Patch:
    """Split a mailbox patch. PatchError where it is not one that `build.py export` writes."""
    head, blank, body = raw.partition(b"\n\n")
    if not raw.startswith(b"From ") or not blank:
        msg = f"{name}.patch is not a mailbox patch: it must start with a `From ` line and a mail header"
        raise PatchError(msg, "it was written by another tool", "commit the edit in the build tree, then export")
    mail = email.message_from_bytes(head.partition(b"\n")[2], policy=email.policy.default)
    text = body.decode("utf-8", "surrogateescape")
    first_line = raw[: len(head) + 2].count(b"\n") + 1
    message, edits, added = _parse_body(name, text, first_line)
    return Patch(name, raw, str(mail["Subject"] or ""), message, edits, added)


def _parse_body(name: str, text: str, first_line: int) -> tuple[str, tuple[FileEdit, ...], tuple[tuple[int, str], ...]]:
    """The message, the file edits and the added lines."""
    message: list[str] = []
    edits: list[FileEdit] = []
    added: list[tuple[int, str]] = []
    old_left = new_left = 0
    path = ""
    for number, line in enumerate(text.split("\n"), first_line):
        if old_left > 0 or new_left > 0:  # inside a hunk: only its line counts tell where it ends
            old_left -= line[:1] in (" ", "-", "")
            new_left -= line[:1] in (" ", "+", "")
            if line.startswith("+"):
                added.append((number, line[1:]))
        elif line.startswith("diff --git "):
            path = _edited_path(name, line)
        elif not path:
            message.append(line)
        elif match := _INDEX.match(line):
            if len(match[1]) != len(ZERO_ID) or len(match[2]) != len(ZERO_ID):
                msg = f"{name}.patch line {number}: abbreviated blob ids"
                raise PatchError(msg, "the source can only be checked against full ids", "run build.py export")
            edits.append(FileEdit(path, match[1], match[2]))
        elif match := _HUNK.match(line):
            old_left, new_left = int(match[1] or 1), int(match[2] or 1)
    if not path:
        msg = f"{name}.patch changes no file"
        raise PatchError(msg)
    return "\n".join(message), tuple(edits), tuple(added)


def _edited_path(name: str, line: str) -> str:
    """The path in `diff --git a/P b/P`; both sides are equal because exports detect no renames."""
    both = line.removeprefix("diff --git ")
    half = (len(both) - 1) // 2
    old, new = _unquoted(both[:half]), _unquoted(both[half + 1 :])
    if old[:2] != "a/" or new[:2] != "b/" or old[2:] != new[2:]:
        msg = f"{name}.patch: not the same path on both sides: {both}"
        raise PatchError(msg, "renames are written as a removal and a new file", "run build.py export")
    return old[2:]


def _unquoted(path: str) -> str:
    """The path behind git's quoting, which by default covers every byte beyond ASCII."""
    if not path.startswith('"'):
        return path
    plain = _ESCAPE.sub(
        lambda match: bytes([int(match[1], 8)]) if match[1] else _LETTERS.get(match[2], match[2]),
        os.fsencode(path[1:-1]),
    )
    return os.fsdecode(plain)
