# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""The file that holds a prefix of a KV cache.

| bytes | what |
|---|---|
| 8 | `KVPREFIX` |
| 4 | version, little endian: 1 |
| 4 | length of the header, little endian |
| header | JSON, UTF-8: `tensors` (name and byte shape of each, in order) and what the writer adds |
| tensors | their bytes, one after another, C order |
| 32 | sha256 of everything before |

A reader checks all of it before it hands out a byte of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
MAGIC, VERSION = b"KVPREFIX", 1
_FIXED, _DIGEST_BYTES, _PIECE = struct.Struct("<8sII"), 32, 1 << 22


class CacheFileError(ValueError):
    """A file that is not what it should be: foreign, of another version, truncated, damaged, or of another model."""


@dataclass(frozen=True)
class CacheFile:
    """A checked file. header: as written, `tensors` included."""

    path: Path
    header: dict[str, Any]
    start: int

    def tensors(self) -> Iterator[tuple[str, U8]]:
        """Names and bytes, one tensor in memory at a time, shapes as written."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for name, shape in self.header["tensors"]:
                yield name, np.frombuffer(file.read(math.prod(shape)), np.uint8).reshape(shape)


def write(path: Path, header: dict[str, Any], tensors: Sequence[tuple[str, Sequence[int], Callable[[], U8]]]) -> None:
    """Write a file; it appears under its name when it is complete. tensors: name, byte shape, and what makes the bytes.

    Raises OSError where the folder cannot be written.
    """
    described = [[name, [int(n) for n in shape]] for name, shape, _ in tensors]
    text = json.dumps({**header, "tensors": described}).encode()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    digest = hashlib.sha256()
    try:
        with part.open("wb") as file:
            for piece in (_FIXED.pack(MAGIC, VERSION, len(text)), text):
                digest.update(piece)
                file.write(piece)
            for name, shape, make in tensors:
                array = np.ascontiguousarray(make(), np.uint8)
                if array.shape != tuple(shape):
                    msg = f"{name}: shape {array.shape}, announced as {tuple(shape)}"
                    raise ValueError(msg)
                digest.update(array.reshape(-1).data)
                file.write(array.reshape(-1).data)
            file.write(digest.digest())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read(path: Path) -> CacheFile:
    """Check a file and read its header. Raises CacheFileError, FileNotFoundError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        fixed = file.read(_FIXED.size)
        if fixed[: len(MAGIC)] != MAGIC[: len(fixed)] or not fixed:
            msg = f"{path}: not a saved KV cache: it does not begin with {MAGIC.decode()}"
            raise CacheFileError(msg)
        if len(fixed) < _FIXED.size:
            raise _truncated(path, size, _FIXED.size + _DIGEST_BYTES)
        _, version, length = _FIXED.unpack(fixed)
        if version != VERSION:
            msg = f"{path}: version {version} of the format; this reader knows {VERSION}. Save it again"
            raise CacheFileError(msg)
        start = _FIXED.size + length
        if size < start + _DIGEST_BYTES:
            raise _truncated(path, size, start + _DIGEST_BYTES)
        text = file.read(length)
        header = _header(path, text)
        wanted = start + sum(math.prod(shape) for _, shape in header["tensors"]) + _DIGEST_BYTES
        if size < wanted:
            raise _truncated(path, size, wanted)
        if size > wanted:
            msg = f"{path}: {size - wanted:,} bytes more than its header announces; it was not written by this tool"
            raise CacheFileError(msg)
        digest = hashlib.sha256(fixed + text)
        left = wanted - start - _DIGEST_BYTES
        while left:
            piece = file.read(min(left, _PIECE))
            digest.update(piece)
            left -= len(piece)
        if digest.digest() != file.read(_DIGEST_BYTES):
            msg = f"{path}: its sha256 does not fit its content: the file is damaged. Save it again"
            raise CacheFileError(msg)
    return CacheFile(path, header, start)


def _truncated(path: Path, size: int, wanted: int) -> CacheFileError:
    return CacheFileError(f"{path}: truncated: {size:,} bytes, at least {wanted:,} wanted. Copy or save it again")


def _header(path: Path, text: bytes) -> dict[str, Any]:
    """The header; damage may have made it anything."""
    try:
        header = json.loads(text)
        for _, shape in header["tensors"]:
            if not all(isinstance(n, int) and n >= 0 for n in shape):
                raise TypeError
    except (ValueError, TypeError, KeyError) as exc:
        msg = f"{path}: its header cannot be read: the file is damaged. Save it again"
        raise CacheFileError(msg) from exc
    return dict(header)
