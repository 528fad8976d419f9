"""What each cache kind does to attention where K has outlier channels: `python -m ...small_decoder.outlier_study`.

Keys of real decoders have a few channels, the same for all tokens, that are many times larger than the others and lie
around a mean of their own; values have none. Here such keys are drawn, quantized as the specification says
(python_tests/reference/format.py) and attended to in float64. Nothing runs in ONNX Runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from python_tests.reference.format import (
    QMAX,
    Array,
    CacheDtype,
    Granularity,
    dequantize,
    quantize_per_token,
    quantize_static,
)

SIDES = (
    (Granularity.PER_TOKEN, Granularity.PER_TOKEN),
    (Granularity.PER_CHANNEL, Granularity.PER_TOKEN),
    (Granularity.PER_CHANNEL, Granularity.PER_CHANNEL),
    (Granularity.PER_TENSOR, Granularity.PER_TENSOR),
)
MAGNITUDES = (1.0, 4.0, 16.0)


@dataclass(frozen=True)
class Caches:
    """query (Q, D), keys and values (T, D), float32, of one KV head."""

    query: Array
    keys: Array
    values: Array


def make_caches(
    magnitude: float, *, tokens: int = 1024, queries: int = 64, head_size: int = 128, outliers: int = 4, seed: int = 0
) -> Caches:
    """Keys whose outlier channels have `magnitude` times the others' mean square root, most of it a constant offset.

    The queries are small there by the same factor, as trained ones are: scores stay of order 1, so that what is
    compared is the same attention at every magnitude.
    """
    rng = np.random.default_rng(seed)
    keys, values = (rng.standard_normal((tokens, head_size)) for _ in range(2))
    query = rng.standard_normal((queries, head_size)) * 2
    channels = rng.permutation(head_size)[:outliers]
    sign = rng.choice([-1.0, 1.0], outliers)
    if magnitude > 1:
        keys[:, channels] = magnitude * (0.95 * sign + 0.3 * keys[:, channels])
        query[:, channels] /= magnitude
    return Caches(*(x.astype(np.float32) for x in (query, keys, values)))


def attend(query: Array, keys: Array, values: Array) -> Array:
    """softmax(q k / sqrt(D)) v in float64: (Q, D)."""
    scores = query.astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(keys.shape[1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ values.astype(np.float64))


def through_cache(x: Array, dtype: CacheDtype, granularity: Granularity) -> Array:
    """Values (T, D) as the cache gives them back, float64. Static scales come from the values' own maximum."""
    rows = x[None]
    if granularity is Granularity.PER_TOKEN:
        codes, scales = quantize_per_token(rows, dtype, np.float32)
    else:
        largest = np.abs(x).max(0) if granularity is Granularity.PER_CHANNEL else np.abs(x).max().reshape(1)
        scales = np.asarray(largest / np.float32(QMAX[dtype]), np.float32)
        codes = quantize_static(rows, scales, dtype)
    return np.asarray(dequantize(codes, scales, dtype, x.shape[1])[0])


def output_error(caches: Caches, dtype: CacheDtype, k: Granularity, v: Granularity) -> float:
    """Norm of the attention output's change, relative to the output's norm."""
    exact = attend(caches.query, caches.keys, caches.values)
    keys, values = through_cache(caches.keys, dtype, k), through_cache(caches.values, dtype, v)
    return float(np.linalg.norm(attend(caches.query, keys, values) - exact) / np.linalg.norm(exact))


def table() -> list[str]:
    """A Markdown table over formats, granularities and magnitudes."""
    lines = [
        "| cache | K / V | " + " | ".join(f"outliers x {m:g}" for m in MAGNITUDES) + " |",
        "|---|---|" + "---:|" * len(MAGNITUDES),
    ]
    drawn = [make_caches(m) for m in MAGNITUDES]
    for dtype in CacheDtype:
        for k, v in SIDES:
            errors = " | ".join(f"{output_error(c, dtype, k, v):.4f}" for c in drawn)
            lines.append(f"| {dtype} | {k} / {v} | {errors} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
