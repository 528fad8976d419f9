"""Attention as a fused kernel on 16-bit matrix units computes it: the yardstick for the errors of the CUDA kernels.

Queries (after rotary), keys and values (dequantized) are rounded to float16 or bfloat16, and so are the numerators
exp(score - maximum) before they are multiplied with the values. Sums, scores, the denominator and the result are
float32: the caller rounds the output to the activation type.

Operands are brought to about 1 by powers of two before they are rounded, each query row and each head's keys and
values, and the products scaled back: a dequantized cache may hold values that float16 has not, and the yardstick must
not grow lenient where they are small.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from python_tests.reference import attention
from python_tests.reference.attention import Attended, AttentionOptions, visible
from python_tests.reference.bfloat16 import round_bfloat16
from python_tests.reference.format import F32, Array

HalfName: TypeAlias = Literal["float16", "bfloat16"]


def round_half(values: Array, half: HalfName) -> F32:
    """Values as the 16-bit type holds them, in float32."""
    if half == "bfloat16":
        return round_bfloat16(values)
    with np.errstate(over="ignore"):
        rounded: F32 = np.asarray(values).astype(np.float16).astype(np.float32)
    return rounded


def _near_one(values: Array, half: HalfName, axes: tuple[int, ...]) -> tuple[F32, F32]:
    """(rounded values, power of two): their product is the values, and the largest of each slice is in [1/2, 1)."""
    peak = np.abs(np.where(np.isfinite(values), values, 0)).max(axis=axes, keepdims=True)
    factor = np.ldexp(np.float32(1), np.frexp(peak)[1])
    return round_half(values / factor, half), np.asarray(factor, np.float32)


def attend_half(
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    options: AttentionOptions,
    head_sink: Array | None = None,
    half: HalfName = "float16",
) -> Attended:
    """attend() with 16-bit operands and float32 sums; arguments and result as there, output in float32."""
    seq, heads, head_size = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    q, q_factor = _near_one(query.reshape(seq, kv_heads, group, head_size), half, (3,))
    (k, k_factor), (v, v_factor) = (_near_one(x, half, (1, 2)) for x in (key, value))
    scale = np.float32(options.scale or 1.0 / np.sqrt(head_size))
    mask = visible(positions, key.shape[1], options.local_window_size)[:, None, None, :]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        scores = np.einsum("shgd,htd->shgt", q, k) * (q_factor * k_factor[None] * scale)
        if options.softcap > 0:
            scores = np.float32(options.softcap) * np.tanh(scores / np.float32(options.softcap))
        sink = attention.sink_logits(head_sink, options, kv_heads, group, np.float32)
        numerators, total = attention.softmax_parts(scores, mask, sink)
        sums = attention.weighted(round_half(numerators, half), mask, v, absolute=False)
        output = sums / total * v_factor[None]
        weights = (numerators / total).astype(np.float64)
        magnitude = attention.weighted(weights, mask, np.abs(value.astype(np.float64)), absolute=True)
    shape = (seq, heads, head_size)
    peak = magnitude.reshape(shape).max(axis=-1, keepdims=True)
    return Attended(output.reshape(shape), peak, attention.score_terms(query, key, float(scale)))
