"""Shapes, formats and tensors of the CPU decode benchmark. NumPy only: stock environments run it, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
# Numbers are ONNX element types.
FLOATS: dict[str, tuple[int, Any]] = {
    "fp32": (1, np.float32),
    "fp16": (10, np.float16),
}
# Element type of the cache, its NumPy type, bytes of a row, and qmax.
QUANTIZED: dict[str, tuple[int, Any, int, float]] = {
    "int8": (3, np.int8, HEAD_SIZE, 127.0),
    "fp8": (17, np.uint8, HEAD_SIZE, 448.0),
    "int4": (2, np.uint8, HEAD_SIZE // 2, 7.0),
}
MODES = ("PER_TOKEN", "PER_TENSOR", "PER_CHANNEL")


@dataclass(frozen=True)
class Setup:
    """One row of the table: activations fp32 or fp16; cache of the same type or quantized in a mode."""

    activation: str
    cache: str
    mode: str

    @property
    def label(self) -> str:
        """How the row is called."""
        return f"{self.cache} {self.mode}".strip() + (" (fp16 activations)" if self.activation == "fp16" else "")

    @property
    def quantized(self) -> bool:
        """Whether the cache is."""
        return self.cache in QUANTIZED


SETUPS = (
    Setup("fp32", "fp32", ""),
    Setup("fp16", "fp16", ""),
    *(Setup("fp32", cache, mode) for cache in QUANTIZED for mode in MODES),
    *(Setup("fp16", "int8", mode) for mode in ("PER_TOKEN", "PER_TENSOR")),
)
# What unpatched releases can run: 1.21.0 the first two, releases from 1.28 on also the static 8- and 4-bit ones.
PEER_SETUPS = tuple(s for s in SETUPS if not s.quantized or (s.cache != "fp8" and s.mode != "PER_TOKEN"))


def scale_shape(mode: str, tokens: int) -> list[int]:
    """Shape of one scale tensor."""
    return {
        "PER_TOKEN": [1, KV_HEADS, tokens, 1],
        "PER_TENSOR": [1],
        "PER_CHANNEL": [1, KV_HEADS, 1, HEAD_SIZE],
    }[mode]


def _repeated(block: Array, tokens: int) -> Array:
    """A block (1, Hkv, n, row) repeated along the tokens: contents do not change the time, their making would."""
    return np.ascontiguousarray(np.resize(block.swapaxes(1, 2), (1, tokens, KV_HEADS, block.shape[3])).swapaxes(1, 2))


def _rows(rng: np.random.Generator, setup: Setup, tokens: int) -> Array:
    """A full cache: normal values, or uniform codes; for fp8 every finite byte."""
    count = min(tokens, 4096)
    if not setup.quantized:
        block = rng.standard_normal((1, KV_HEADS, count, HEAD_SIZE), np.float32).astype(FLOATS[setup.activation][1])
        return _repeated(block, tokens)
    _, kind, row, _ = QUANTIZED[setup.cache]
    raw = rng.integers(0, 256, (1, KV_HEADS, count, row), dtype=np.uint8)
    if setup.cache == "fp8":
        raw = np.where((raw & 0x7F) == 0x7F, 0, raw).astype(np.uint8)
    return _repeated(raw, tokens).view(kind)


def tensors(setup: Setup, tokens: int) -> dict[str, Array]:
    """Activations of one new token behind tokens - 1 old ones, and the full cache."""
    rng = np.random.default_rng(tokens)
    _, kind = FLOATS[setup.activation]
    widths = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    arrays: dict[str, Array] = {
        name: rng.standard_normal((1, 1, heads * HEAD_SIZE), np.float32).astype(kind) for name, heads in widths.items()
    }
    arrays["seqlens_k"] = np.array([tokens - 1], np.int32)
    arrays["total_sequence_length"] = np.array([tokens], np.int32)
    for side in ("key", "value"):
        arrays[f"past_{side}"] = _rows(rng, setup, tokens)
        if setup.quantized:
            largest = 3.0 / QUANTIZED[setup.cache][3]
            shape = scale_shape(setup.mode, tokens)
            arrays[f"{side[0]}_scale"] = rng.uniform(largest / 2, largest, shape).astype(np.float32)
    return arrays


def state_bytes(arrays: dict[str, Array]) -> int:
    """Bytes of cache and scales, which a step reads once."""
    names = ("past_key", "past_value", "k_scale", "v_scale")
    return sum(arrays[name].nbytes for name in names if name in arrays)
