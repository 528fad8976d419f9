"""Rotary position embedding in float32: each product is rounded, then the sum (no fused multiply-add)."""

from __future__ import annotations

import numpy as np

from python_tests.reference.format import F32, Array


def rotate(values: Array, cos_cache: Array, sin_cache: Array, positions: Array, *, interleaved: bool) -> F32:
    """Rotate values (B, S, N, D) at positions (B, S) with caches (rows, r / 2); elements from r on pass through.

    Half-split pairs are (i, i + r / 2), interleaved pairs (2 i, 2 i + 1). The result stays float32: it is quantized
    without being rounded to the activation type.
    """
    half = cos_cache.shape[1]
    # Positions beyond the cache belong to entries that the operator rejects; their values are never looked at.
    index = np.clip(positions, 0, cos_cache.shape[0] - 1)
    cos = cos_cache[index].astype(np.float32)[:, :, None, :]
    sin = sin_cache[index].astype(np.float32)[:, :, None, :]
    out: F32 = np.array(values, np.float32)
    step = 2 if interleaved else 1
    first = slice(0, step * half, step)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x, y = out[..., first].copy(), out[..., second].copy()
    with np.errstate(invalid="ignore", over="ignore"):
        out[..., first] = x * cos - y * sin
        out[..., second] = y * cos + x * sin
    return out
