"""Causal grouped-query attention over explicit key and value rows, in float64 or in the kernel's own float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from python_tests.reference.format import F64, Array

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Attributes that change the scores. scale 0 means 1 / sqrt(D); window -1 means none."""

    scale: float = 0.0
    softcap: float = 0.0
    local_window_size: int = -1
    smooth_softmax: bool = False


@dataclass(frozen=True)
class Attended:
    """Result for one batch entry.

    output: (S, N, D). magnitude: (S, N, 1), the largest sum of probability * |value| over D, to which rounding errors
    of the output are proportional. terms: (S, N, 1), an upper bound of the sum of the magnitudes of a score's terms, to
    which rounding errors of the score are: the exponential turns them into relative errors of a probability.
    """

    output: Array
    magnitude: F64
    terms: F64


def visible(positions: Array, tokens: int, local_window_size: int) -> Array:
    """Mask (S, tokens): query at position p sees keys p - local_window_size .. p, both included."""
    keys = np.arange(tokens)
    mask: Array = keys[None, :] <= positions[:, None]
    if 0 <= local_window_size < NO_LIMIT:
        mask &= keys[None, :] >= positions[:, None] - local_window_size
    return mask


def attend(
    query: Array,
    key: Array,
    value: Array,
    positions: Array,
    options: AttentionOptions,
    head_sink: Array | None = None,
    precision: type[Any] = np.float64,
) -> Attended:
    """Attention of one batch entry.

    query (S, N, D), key and value (Hkv, tokens, D), positions (S,), head_sink (N,) or None. Every operation is done
    in `precision`; einsum is kept from calling BLAS, so that float32 sums have the plain order a kernel may have.
    """
    seq, heads, head_size = query.shape
    kv_heads, tokens, _ = key.shape
    group = heads // kv_heads
    q = query.astype(precision).reshape(seq, kv_heads, group, head_size)
    k, v = key.astype(precision), value.astype(precision)
    scale = precision(options.scale or 1.0 / np.sqrt(head_size))
    mask = visible(positions, tokens, options.local_window_size)[:, None, None, :]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        scores = np.einsum("shgd,htd->shgt", q, k) * scale
        if options.softcap > 0:
            scores = precision(options.softcap) * np.tanh(scores / precision(options.softcap))
        sink = sink_logits(head_sink, options, kv_heads, group, precision)
        numerators, total = softmax_parts(scores, mask, sink)
        weights = numerators / total
        output = weighted(weights, mask, v, absolute=False)
        magnitude = weighted(weights.astype(np.float64), mask, np.abs(value.astype(np.float64)), absolute=True)
    shape = (seq, heads, head_size)
    peak = magnitude.reshape(shape).max(axis=-1, keepdims=True)
    return Attended(output.reshape(shape), peak, score_terms(query, key, scale))


def score_terms(query: Array, key: Array, scale: float) -> F64:
    """Sum over D of |query| times the largest finite |key| of the head, scaled: (S, N, 1)."""
    group = query.shape[1] // key.shape[0]
    bounded = np.abs(np.where(np.isfinite(key), key, 0).astype(np.float64)).max(axis=1).repeat(group, axis=0)
    sizes = np.abs(np.nan_to_num(query.astype(np.float64), posinf=0.0, neginf=0.0))
    return np.asarray((sizes * bounded[None]).sum(axis=-1, keepdims=True) * abs(scale), np.float64)


def sink_logits(
    head_sink: Array | None, options: AttentionOptions, kv_heads: int, group: int, precision: type[Any]
) -> Array | None:
    """The extra logit of each head (Hkv, group, 1): not scaled, not capped. head_sink replaces smooth softmax's 0."""
    if head_sink is not None:
        return head_sink.astype(precision).reshape(kv_heads, group, 1)
    return np.zeros((kv_heads, group, 1), precision) if options.smooth_softmax else None


def softmax_parts(scores: Array, mask: Array, sink: Array | None) -> tuple[Array, Array]:
    """Numerators (S, Hkv, group, tokens) and denominators (S, Hkv, group, 1) of the probabilities.

    The largest visible logit has numerator 1; masked tokens have 0 whatever their score is.
    """
    peak = np.max(np.where(mask, scores, -np.inf), axis=-1, keepdims=True)
    if sink is not None:
        peak = np.maximum(peak, sink)
    weights = np.where(mask, np.exp(scores - peak), scores.dtype.type(0))
    total = weights.sum(axis=-1, keepdims=True, dtype=scores.dtype)
    if sink is not None:
        total = total + np.exp(sink - peak)
    return weights, total


def weighted(weights: Array, mask: Array, value: Array, *, absolute: bool) -> Array:
    """Sum of weights * value over visible tokens only: 0 * NaN of an unseen token must not reach the output."""
    finite: Array = np.asarray(np.isfinite(value).all(axis=(0, 2)))
    clean: Array = np.einsum("shgt,htd->shgd", weights, np.where(finite[None, :, None], value, 0))
    if absolute:
        return np.nan_to_num(clean, nan=0.0, posinf=0.0)
    for token in np.flatnonzero(~finite):
        term = weights[..., token, None] * value[None, :, None, token, :]
        clean = clean + np.where(mask[..., token, None], term, 0)
    return clean
