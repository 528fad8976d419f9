# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Where the weights of a converted model are: external data files are found, placed and never read into memory.

A location in an ONNX file is relative to the folder of that file and may not leave it. So, by the output's folder:

    the input's own folder       the locations stay as they are; nothing is written
    a folder above the data      the locations get a longer prefix; nothing is written
    anywhere else, data="auto"   the file is cloned where the file system shares blocks, else copied; holes stay holes
                   data="link"   a hard link: no bytes, but later releases of onnx (1.23 does) refuse files that have
                                 several links, and that includes the input's from then on
                   data="copy"   copied
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onnx import AttributeProto, GraphProto, ModelProto, TensorProto

from .kv_cache_layers import CacheModelError, Problem

DATA_RULES = ("auto", "copy", "link")
_CLONE = 0x40049409  # ioctl FICLONE of Linux
_CHUNK = 1 << 24


@dataclass(frozen=True)
class DataFile:
    """An external data file of the output. how: kept, referenced, cloned, linked or copied. size: bytes."""

    path: Path
    how: str
    size: int

    @property
    def written(self) -> bool:
        """Whether the file was made for the output."""
        return self.how in ("cloned", "linked", "copied")


def tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Every stored tensor: initializers and constants, of nested graphs too."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == AttributeProto.GRAPH:
                yield from tensors(attribute.g)
            elif attribute.type == AttributeProto.GRAPHS:
                for body in attribute.graphs:
                    yield from tensors(body)


def external(model: ModelProto) -> Iterator[tuple[TensorProto, str]]:
    """Tensors whose values lie in another file, with its location."""
    for tensor in tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield tensor, next((e.value for e in tensor.external_data if e.key == "location"), "")


def place_data(model: ModelProto, source: Path, target: Path, rule: str = "auto") -> list[DataFile]:
    """Make the external data of the model at `source` valid for a file at `target`; locations are edited in place.

    Raises CacheModelError for data that is missing, lies outside the model's folder, or would replace a file. What was
    written before an error is removed.
    """
    # Not the folder of what a link points to: caches of downloads link each file to a blob of another name.
    here, there = source.parent.resolve(), target.parent.resolve()
    locations = sorted({location for _, location in external(model)})
    _require_inside(here, locations)
    if here == there:
        return [DataFile(here / name, "kept", (here / name).stat().st_size) for name in locations]
    if here.is_relative_to(there):
        prefix = PurePosixPath(here.relative_to(there).as_posix())
        for tensor, location in external(model):
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = str(prefix / PurePosixPath(location))
        return [DataFile(here / name, "referenced", (here / name).stat().st_size) for name in locations]
    done: list[DataFile] = []
    try:
        for name in locations:
            done.append(_bring(here / name, there / name, rule))
    except BaseException:
        remove(done)
        raise
    return done


def _require_inside(folder: Path, locations: list[str]) -> None:
    problems = []
    for name in locations:
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts:
            problems.append(
                Problem(name or "(no location)", "external data outside the model's folder; move it there first")
            )
        elif not (folder / name).is_file():
            problems.append(Problem(name, f"the model's external data is missing: {folder / name}"))
    if problems:
        raise CacheModelError(problems)


def _bring(old: Path, new: Path, rule: str) -> DataFile:
    if new.exists() or new.is_symlink():
        raise CacheModelError([Problem(str(new), "is there already and would be replaced; write to an empty folder")])
    new.parent.mkdir(parents=True, exist_ok=True)
    size = old.stat().st_size
    if rule == "link":
        try:
            os.link(old, new)
        except OSError as exc:
            reason = (
                f"cannot be linked to {new.parent} ({exc.strerror}), most likely another file system; use --data copy"
            )
            raise CacheModelError([Problem(str(old), reason)]) from exc
        return DataFile(new, "linked", size)
    try:
        if rule == "auto" and _clone(old, new):
            return DataFile(new, "cloned", size)
        copy_with_holes(old, new)
    except OSError as exc:
        new.unlink(missing_ok=True)
        free = shutil.disk_usage(new.parent).free
        reason = f"{size:,} bytes could not be copied to {new.parent} ({exc.strerror}; {free:,} bytes free there)"
        raise CacheModelError(
            [Problem(str(old), f"{reason}; write the output beside the input to copy nothing")]
        ) from exc
    return DataFile(new, "copied", size)


def _clone(old: Path, new: Path) -> bool:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return False
    with old.open("rb") as source, new.open("xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), _CLONE, source.fileno())
        except OSError:
            cloned = False
        else:
            cloned = True
    if not cloned:
        new.unlink()
    return cloned


def copy_with_holes(old: Path, new: Path) -> None:
    """Copy in pieces of at most 16 MiB; holes stay holes. Raises FileExistsError, OSError."""
    with old.open("rb", buffering=0) as source, new.open("xb", buffering=0) as copy:
        size = os.fstat(source.fileno()).st_size
        copy.truncate(size)
        at = 0
        while at < size:
            start, end = _next_data(source.fileno(), at, size)
            source.seek(start)
            copy.seek(start)
            while start < end:
                piece = source.read(min(_CHUNK, end - start))
                if not piece:
                    msg = "the file became shorter"
                    raise OSError(0, msg)
                view = memoryview(piece)
                while view:
                    view = view[copy.write(view) :]
                start += len(piece)
            at = end


def _next_data(descriptor: int, at: int, size: int) -> tuple[int, int]:
    """Start and end of the next part of the file that is not a hole."""
    if not hasattr(os, "SEEK_DATA"):
        return at, size
    try:
        start = os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError:  # only a hole is left
        return size, size
    return start, min(size, os.lseek(descriptor, start, os.SEEK_HOLE))


def remove(files: list[DataFile]) -> None:
    """Take back what place_data wrote."""
    for file in files:
        if file.written:
            with contextlib.suppress(OSError):
                file.path.unlink()
