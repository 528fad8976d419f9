"""Shared libraries with the few parts that the build tool reads."""

from __future__ import annotations

import struct
from collections.abc import Sequence

NEEDED, RUNPATH = 1, 29
PTX, MACHINE_CODE = 1, 2


def fatbin(*entries: tuple[int, int]) -> bytes:
    """One fat binary of (kind, architecture) pairs, with payloads of different sizes."""
    body = b""
    for number, (kind, arch) in enumerate(entries):
        payload = b"x" * (8 * (number + 1))
        body += struct.pack("<HHIQ12xI", kind, 0x101, 64, len(payload), arch).ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*, needed: Sequence[str] = (), runpath: str | None = None, fatbins: Sequence[bytes] | None = None) -> bytes:
    """A 64-bit ELF file; without `fatbins` it has no section for device code."""
    strings = b"\0"
    dynamic = b""
    for tag, text in [*((NEEDED, name) for name in needed), *([(RUNPATH, runpath)] if runpath is not None else [])]:
        dynamic += struct.pack("<qQ", tag, len(strings))
        strings += text.encode() + b"\0"
    dynamic += struct.pack("<qQ", 0, 0)
    sections = {"": b"", ".dynstr": strings, ".dynamic": dynamic}
    if fatbins is not None:
        sections[".nv_fatbin"] = b"".join(part.ljust(-len(part) % 8 + len(part) + 8, b"\0") for part in fatbins)
    sections[".shstrtab"] = b"\0".join(name.encode() for name in [*sections, ".shstrtab"]) + b"\0"
    body, table, names = b"", b"", sections[".shstrtab"]
    for name, data in sections.items():
        offset = 0 if not name else names.index(name.encode() + b"\0")
        table += struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0)
        body += data
    start = 64 + len(body)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, start, 0, 64, 0, 0, 64, 0, 0)
    header = header[:60] + struct.pack("<HH", len(sections), len(sections) - 1)
    return header + body + table
