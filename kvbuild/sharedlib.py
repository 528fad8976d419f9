"""What a shared library needs, and which GPUs its code is for, read from the file: a bare toolkit lacks cuobjdump."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbuild.errors import BuildError

FATBIN_SECTION = ".nv_fatbin"
"""Device code that the CUDA runtime registers. (Relocatable code, before its link, is in __nv_relfatbin.)"""
_FATBIN_MAGIC = 0xBA55ED50
_FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, header size, size of the entries
_FATBIN_ENTRY = struct.Struct("<HHIQ12xI")  # kind, flags, header size, payload size, ..., architecture
_KINDS = {1: "compute", 2: "sm"}
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29


@dataclass(frozen=True, kw_only=True)
class SharedLibrary:
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    device_code: frozenset[str]
    """such as sm_90 for machine code, compute_90 for PTX; without the letter of 90a"""


def inspect(path: Path) -> SharedLibrary:
    """Raises BuildError where the file is not a 64-bit little-endian ELF library."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _inspect(data)
    except (struct.error, ValueError, KeyError) as exc:
        msg = f"{path.name} cannot be read as a shared library: {exc}"
        raise BuildError(msg, todo="build again; a full disk may have cut it short") from exc


def requested_code(architectures: str) -> frozenset[str]:
    """The device code that CMAKE_CUDA_ARCHITECTURES asks for: both kinds where an entry names none."""
    wanted = set()
    for entry in architectures.split(";"):
        number, _, kind = entry.partition("-")
        digits = re.sub(r"\D", "", number)
        wanted |= {f"sm_{digits}"} if kind != "virtual" else set()
        wanted |= {f"compute_{digits}"} if kind != "real" else set()
    return frozenset(wanted)


def _inspect(data: mmap.mmap) -> SharedLibrary:
    if data[:6] != b"\x7fELF\x02\x01":
        msg = "it is no 64-bit little-endian ELF file"
        raise ValueError(msg)
    sections = _sections(data)
    dynamic, strings = sections[".dynamic"], sections[".dynstr"]
    entries = list(struct.iter_unpack("<qQ", data[slice(*dynamic)]))

    def texts(*tags: int) -> Iterator[str]:
        for tag, value in entries:
            if tag in tags:
                start = strings[0] + value
                yield data[start : data.find(b"\0", start)].decode()

    paths = [part for text in texts(_DT_RPATH, _DT_RUNPATH) for part in text.split(":")]
    fatbin = sections.get(FATBIN_SECTION)
    code = frozenset(_device_code(data, *fatbin)) if fatbin else frozenset()
    return SharedLibrary(needed=tuple(texts(_DT_NEEDED)), runpath=tuple(paths), device_code=code)


def _sections(data: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Name -> first and last + 1 byte in the file."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<I20xQQ", data, table + index * size) for index in range(count)]
    names = rows[names_at][1]

    def name(offset: int) -> str:
        return data[names + offset : data.find(b"\0", names + offset)].decode()

    return {name(offset): (start, start + length) for offset, start, length in rows}


def _device_code(data: mmap.mmap, start: int, end: int) -> Iterator[str]:
    """One name per entry of the section's fat binaries, which lie one after the other with padding between."""
    magic = struct.pack("<I", _FATBIN_MAGIC)
    at = data.find(magic, start, end)
    while at >= 0:
        _, _, header, size = _FATBIN_HEADER.unpack_from(data, at)
        at += header
        stop = at + size
        while at < stop:
            kind, _, header, payload, arch = _FATBIN_ENTRY.unpack_from(data, at)
            if not header:
                msg = f"an entry of {FATBIN_SECTION} has no header"
                raise ValueError(msg)
            yield f"{_KINDS.get(kind, f'kind{kind}')}_{arch}"
            at += header + payload
        at = data.find(magic, stop, end)
