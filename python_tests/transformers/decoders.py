"""Small decoders with random weights, as model files, and sessions over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from onnx import TensorProto
from onnxruntime.transformers.kv_cache_decoder import DecodeSession

from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.transformers.small_decoder.export import CacheKind, export, largest_values, static_scales
from python_tests.transformers.small_decoder.network import Shape, Weights, initial_weights

TINY = Shape(width=32, layers=2, heads=4, kv_heads=1, head_size=16, hidden=48)
PER_TOKEN, PER_CHANNEL, PER_TENSOR = Granularity.PER_TOKEN, Granularity.PER_CHANNEL, Granularity.PER_TENSOR
INT8 = CacheKind(CacheDtype.INT8)
KINDS: dict[str, CacheKind | Sequence[CacheKind | None] | None] = {
    "float": None,
    "int8": INT8,
    "fp8": CacheKind(CacheDtype.FP8),
    "int4": CacheKind(CacheDtype.INT4),
    "int8-channel-token": CacheKind(CacheDtype.INT8, PER_CHANNEL, PER_TOKEN),
    "int4-tensor": CacheKind(CacheDtype.INT4, PER_TENSOR, PER_TENSOR),
    "int8-and-float": (INT8, None),
}
QUANTIZED = [name for name in KINDS if "float" not in name]


@lru_cache(maxsize=1)
def tiny_weights() -> Weights:
    """Random weights whose layers all contribute to the logits."""
    weights, rng = initial_weights(TINY), np.random.default_rng(7)
    for name, w in weights.items():
        if name.endswith((".o", ".down")):
            w[:] = rng.standard_normal(w.shape) / np.sqrt(w.shape[0])
    weights["embedding"] *= 8
    return weights


@lru_cache(maxsize=1)
def _tiny_largest() -> dict[tuple[int, str], Array]:
    return largest_values(tiny_weights(), TINY, 64)


def write_tiny(folder: Path, kind: str = "float", *, half: bool = False, positions: int = 256) -> Path:
    """The model file of a kind."""
    cache = KINDS[kind]
    scales = static_scales(_tiny_largest(), cache) if isinstance(cache, CacheKind) else None
    activation = int(TensorProto.FLOAT16 if half else TensorProto.FLOAT)
    path = folder / f"{kind}{'-half' if half else ''}.onnx"
    path.write_bytes(
        export(tiny_weights(), TINY, activation, cache, scales=scales, positions=positions).SerializeToString()
    )
    return path


def open_tiny(folder: Path, kind: str = "float", *, half: bool = False, **options: object) -> DecodeSession:
    """A session of one thread over the model file of a kind. options: of DecodeSession."""
    path = write_tiny(folder, kind, half=half)
    return DecodeSession(path, **{"capacity": 48, "threads": 1, **options})


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids."""
    return [int(n) for n in np.random.default_rng(seed).integers(0, TINY.vocabulary, count)]
