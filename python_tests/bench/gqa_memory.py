"""Memory of the provider under test, and random contents for caches of any size."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np

from python_tests.bench.gqa_case import QUANTIZED, Case
from python_tests.op.cuda_runtime import DeviceMemory, Stream
from python_tests.op.host_memory import HostMemory, Memory
from python_tests.reference.bfloat16 import pack_bfloat16, unpack_bfloat16
from python_tests.reference.format import U8, Array

# Contents repeat after this many bytes: caches in DRAM do not compress, and making more would take longer than timing.
POOL_BYTES = {"cuda": 32 * 2**20, "cpu": 4 * 2**20}
_STEP = 4096 * 67
ANGLE_ROWS = 8192


def as_stored(values: Array, kind: str) -> Array:
    """Values in the bytes that a tensor of this type holds: fp32, fp16 or bf16 (as uint16)."""
    if kind == "bf16":
        return pack_bfloat16(values)
    return np.asarray(values, {"fp32": np.float32, "fp16": np.float16}[kind])


def from_stored(raw: U8, kind: str) -> Array:
    """Values of such bytes: float16 for fp16, float32 for the others."""
    if kind == "bf16":
        return unpack_bfloat16(raw.view(np.uint16))
    return raw.view({"fp32": np.float32, "fp16": np.float16}[kind])


@lru_cache(maxsize=8)
def _pool(kind: str, top: float, size: int) -> U8:
    """Random bytes of a kind: codes, fp8 (without its NaN), scale-fp32 and scale-fp16 (around 1 / top), or normal."""
    rng = np.random.default_rng(len(kind) + int(top))
    if kind == "codes":
        return rng.integers(0, 256, size, np.uint8)
    if kind == "fp8":
        raw = rng.integers(0, 256, size, np.uint8)
        return np.where((raw & 0x7F) == 0x7F, np.uint8(0), raw)
    if kind.startswith("scale-"):
        stored = kind.removeprefix("scale-")
        values = rng.uniform(0.5 / top, 2 / top, size // (4 if stored == "fp32" else 2))
        return as_stored(values.astype(np.float32), stored).view(np.uint8)
    normal = rng.standard_normal(size // (4 if kind == "fp32" else 2), np.float32)
    return as_stored(normal, kind).view(np.uint8)


class Allocator:
    """Makes and fills memory where the provider reads it."""

    def __init__(self, provider: str, stream: Stream | None) -> None:
        self.provider, self._stream = provider, stream
        self._on_device: dict[tuple[str, float], DeviceMemory] = {}

    def make(self, size: int) -> Memory:
        """Memory whose contents are not defined."""
        return HostMemory(size) if self._stream is None else DeviceMemory(size)

    def holding(self, array: Array) -> Memory:
        """A copy of an array."""
        memory = self.make(array.nbytes)
        memory.write(array)
        return memory

    def fill(self, memory: Memory, size: int, kind: str, top: float, seed: int) -> None:
        """Random contents; another seed begins elsewhere in the same pool."""
        pool = _pool(kind, top, POOL_BYTES[self.provider])
        source = pool.ctypes.data
        if self._stream is not None:
            if (kind, top) not in self._on_device:
                self._on_device[kind, top] = DeviceMemory(pool.nbytes)
                self._on_device[kind, top].write(pool)
            source = self._on_device[kind, top].pointer
        done, start = 0, seed * _STEP % pool.nbytes
        while done < size:
            count = min(pool.nbytes - start, size - done)
            self._copy(memory.pointer + done, source + start, count)
            done, start = done + count, 0

    def _copy(self, target: int, source: int, size: int) -> None:
        if self._stream is None:
            ctypes.memmove(target, source, size)
        else:
            self._stream.copy(target, source, size)

    def settle(self) -> None:
        """Wait for copies."""
        if self._stream is not None:
            self._stream.synchronize()


def state_kind(case: Case, name: str) -> tuple[str, float]:
    """What a state tensor of a layer is filled with."""
    top = QUANTIZED[case.cache][2] if case.quantized else 1.0
    if name.endswith("_scale"):
        return f"scale-{case.scale_type or 'fp32'}", top
    if not case.quantized:
        return case.cache, 1.0
    return ("fp8" if case.cache == "fp8" else "codes"), 1.0


@lru_cache(maxsize=4)
def _angles(name: str, half: int) -> Array:
    """The table of a head size for the positions before it repeats."""
    angles = np.arange(ANGLE_ROWS)[:, None] * 10000.0 ** (-np.arange(half)[None, :] / half)
    return np.asarray((np.cos if name == "cos_cache" else np.sin)(angles), np.float32)


def activation_values(case: Case) -> dict[str, Array]:
    """Values of the inputs that layers share, as their type has them: float32 for bf16, int32 for lengths.

    Angles repeat after ANGLE_ROWS positions: they are a table to the kernel.
    """
    rng, values = np.random.default_rng(case.tokens + case.seq), {}
    for name, tensor in case.activations().items():
        if name in ("cos_cache", "sin_cache"):
            exact = np.resize(_angles(name, tensor.shape[1]), tensor.shape)
        elif name == "head_sink":
            exact = rng.normal(0, 2, tensor.shape).astype(np.float32)
        else:
            exact = rng.standard_normal(tensor.shape, np.float32)
        stored = as_stored(exact, case.activation)
        values[name] = from_stored(stored.view(np.uint8), case.activation).reshape(tensor.shape)
    for name, tensor in case.static_scales().items():
        top = QUANTIZED[case.cache][2]
        values[name] = rng.uniform(3 / top, 4 / top, tensor.shape).astype(np.float32)
    values["seqlens_k"] = np.full(case.batch, case.tokens - 1, np.int32)
    values["total_sequence_length"] = np.array([case.total], np.int32)
    return values
