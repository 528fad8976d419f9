"""Compiles the kernels into one library and calls them on NumPy arrays."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from python_tests.reference.format import F32, U8, Array, CacheDtype, row_bytes

NATIVE = Path(__file__).parent / "native"
MLAS = Path(__file__).resolve().parents[2] / "patches" / "overlay" / "onnxruntime" / "core" / "mlas"
CODECS = {CacheDtype.INT8: 0, CacheDtype.FP8: 1, CacheDtype.INT4: 2}
# Flags under which ONNX Runtime's cmake/onnxruntime_mlas.cmake compiles each file, and what /proc/cpuinfo must list.
SETS: dict[str, tuple[int, tuple[str, ...], frozenset[str]]] = {
    "portable": (0, (), frozenset()),
    "avx2": (1, ("-mavx2", "-mfma", "-mf16c"), frozenset({"avx2", "fma", "f16c"})),
    "avx512": (
        2,
        ("-mfma", "-mavx512vnni", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ),
}
_SOURCES = {
    MLAS / "lib" / "kv_cache_quant.cpp": "portable",
    MLAS / "lib" / "kv_cache_quant_kernel_avx2.cpp": "avx2",
    MLAS / "lib" / "kv_cache_quant_kernel_avx512.cpp": "avx512",
    NATIVE / "shim.cpp": "portable",
}
# ONNX Runtime turns it off as well: GCC 12 sees uninitialized registers in its own AVX-512 header.
_NO_WARNING = ("-Wno-maybe-uninitialized",)


def compile_library(folder: Path) -> Path:
    """All kernels as one shared library in `folder`, with warnings as errors. Raises CalledProcessError."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "c++"
    includes = [f"-I{NATIVE}", f"-I{MLAS / 'inc'}", f"-I{MLAS / 'lib'}"]
    common = ["-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-Werror", *_NO_WARNING, *includes]
    objects = []
    for source, name in _SOURCES.items():
        objects.append(folder / f"{source.stem}.o")
        cmd = [compiler, *common, *SETS[name][1], "-c", str(source), "-o", str(objects[-1])]
        subprocess.run(cmd, check=True)
    library = folder / "kernels.so"
    subprocess.run([compiler, "-shared", *map(str, objects), "-o", str(library)], check=True)
    return library


def processor_flags() -> frozenset[str]:
    """Instruction sets of this processor, as Linux names them."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def at_end_of_page(data: Array) -> Array:
    """A copy whose last byte is followed by a page that must not be read: an overrun ends the process."""
    page = mmap.PAGESIZE
    span = -(-data.nbytes // page) * page
    memory = mmap.mmap(-1, span + page)
    whole = np.frombuffer(memory, np.uint8)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + span), ctypes.c_size_t(page), 0) != 0:
        msg = "mprotect failed"
        raise OSError(msg)
    copy = whole[span - data.nbytes : span].view(data.dtype).reshape(data.shape)
    copy[...] = data
    return copy


class Kernels:
    """One instruction set's kernels. Shapes: rows (R, D), cache rows (tokens, row bytes), weights (R, tokens)."""

    def __init__(self, library: Path, name: str) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.kv_select.restype = ctypes.c_char_p
        self._lib.kv_amax.restype = ctypes.c_float
        self._lib.kv_softmax.restype = ctypes.c_float
        self._lib.kv_prepared_size.restype = ctypes.c_size_t
        self.name = self._lib.kv_select(SETS[name][0]).decode()

    def amax(self, row: F32) -> float:
        return float(self._lib.kv_amax(_pointer(row), ctypes.c_size_t(row.size)))

    def encode(self, dtype: CacheDtype, row: F32, scale: F32, *, symmetric: bool) -> U8:
        """Codes of one row; scale has one value or one per element."""
        codes = np.full(row_bytes(dtype, row.size), 0xEE, np.uint8)
        self._lib.kv_encode(
            CODECS[dtype], _pointer(row), _pointer(scale), int(scale.size > 1), int(symmetric),
            ctypes.c_size_t(row.size), _pointer(codes),
        )  # fmt: skip
        return codes

    def prepare(self, dtype: CacheDtype, rows: F32) -> F32:
        size = int(self._lib.kv_prepared_size(ctypes.c_size_t(rows.shape[1])))
        prepared = np.full((rows.shape[0], size), np.nan, np.float32)
        self._lib.kv_prepare(CODECS[dtype], _pointer(rows), *_sizes(rows.shape), _pointer(prepared))
        return prepared

    def score(self, dtype: CacheDtype, rows: F32, cache: Array, token_scale: F32 | None) -> F32:
        """(R, tokens), from a buffer with a longer stride, of which the rest must stay as it is."""
        prepared = at_end_of_page(self.prepare(dtype, rows))
        tokens = cache.shape[0]
        scores = np.full((rows.shape[0], tokens + 3), 77, np.float32)
        self._lib.kv_score(
            CODECS[dtype], _pointer(prepared), ctypes.c_size_t(rows.shape[0]), _pointer(cache),
            *_sizes((tokens, rows.shape[1])), _pointer(token_scale), _pointer(scores), ctypes.c_size_t(tokens + 3),
        )  # fmt: skip
        assert (scores[:, tokens:] == 77).all(), "scores beyond the tile were written"
        return scores[:, :tokens]

    def mix(self, dtype: CacheDtype, weights: F32, cache: Array, head_size: int, passes: int = 1) -> F32:
        """weights @ codes, (R, D), accumulated `passes` times."""
        rows, tokens = weights.shape
        size = int(self._lib.kv_prepared_size(ctypes.c_size_t(head_size)))
        accumulator = np.zeros((rows, size), np.float32)
        for _ in range(passes):
            self._lib.kv_mix(
                CODECS[dtype], _pointer(weights), *_sizes((tokens, rows)), _pointer(cache),
                *_sizes((tokens, head_size)), _pointer(accumulator),
            )  # fmt: skip
        out = np.full((rows, head_size), np.nan, np.float32)
        self._lib.kv_finish(CODECS[dtype], _pointer(accumulator), *_sizes((rows, head_size)), _pointer(out))
        return out

    def decode(self, dtype: CacheDtype, cache: Array, head_size: int, token_scale: F32 | None) -> F32:
        """(tokens, D), written to the end of a page."""
        tokens = cache.shape[0]
        out = at_end_of_page(np.full((tokens, head_size), np.nan, np.float32))
        sizes = _sizes((tokens, head_size))
        self._lib.kv_decode(CODECS[dtype], _pointer(cache), *sizes, _pointer(token_scale), _pointer(out))
        return out

    def softmax(self, scores: F32, maximum: F32, total: F32) -> float:
        """In place; returns the factor for what was accumulated before."""
        count = ctypes.c_size_t(scores.size)
        return float(self._lib.kv_softmax(_pointer(scores), count, _pointer(maximum), _pointer(total)))


def _pointer(array: Array | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _sizes(shape: tuple[int, ...]) -> list[ctypes.c_size_t]:
    return [ctypes.c_size_t(n) for n in shape]
