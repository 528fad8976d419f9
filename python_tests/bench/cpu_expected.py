"""What a benchmark call must give: float64 attention with matrix products, head by head, since the caches are long."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from python_tests.bench.cpu_case import HEAD_SIZE, HEADS, KV_HEADS, Array, Setup, tensors
from python_tests.reference import format as kv
from python_tests.reference.format import CacheDtype

FORMATS = {"int8": CacheDtype.INT8, "fp8": CacheDtype.FP8, "int4": CacheDtype.INT4}


def head_values(setup: Setup, arrays: dict[str, Array], side: str, head: int) -> NDArray[np.float64]:
    """K or V of one KV head (tokens, D), its last row replaced by the new token as the cache stores it."""
    rows = arrays[f"past_{side}"][0, head]
    token = arrays[side].reshape(KV_HEADS, HEAD_SIZE)[head : head + 1].astype(np.float32)
    if not setup.quantized:
        return np.asarray(np.concatenate([rows[:-1], token.astype(rows.dtype)]), np.float64)
    dtype, scale = FORMATS[setup.cache], arrays[f"{side[0]}_scale"]
    own = scale[0, head] if setup.mode != "PER_TENSOR" else scale
    if setup.mode == "PER_TOKEN":
        code, stored = kv.quantize_per_token(token, dtype, np.float32)
        own = np.concatenate([own[:-1], stored])
    else:
        code = kv.quantize_static(token, own, dtype)
    return np.asarray(kv.dequantize(np.concatenate([rows[:-1], code]), own, dtype, HEAD_SIZE), np.float64)


def expected_output(setup: Setup, tokens: int) -> NDArray[np.float64]:
    """The output (N * D,) for the tensors that the workers make."""
    arrays = tensors(setup, tokens)
    query: NDArray[Any] = arrays["query"].reshape(KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE).astype(np.float64)
    output = np.empty_like(query)
    for head in range(KV_HEADS):
        scores = query[head] @ head_values(setup, arrays, "key", head).T / np.sqrt(HEAD_SIZE)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        output[head] = weights @ head_values(setup, arrays, "value", head)
    return np.asarray(output.ravel(), np.float64)
