"""One call of GroupQueryAttention: append the tokens to the cache, attend, and say what every buffer holds after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from python_tests.reference import format as kv
from python_tests.reference.attention import Attended, AttentionOptions, attend
from python_tests.reference.format import F32, F64, Array, CacheDtype, Granularity
from python_tests.reference.half_attention import HalfName, attend_half, round_half
from python_tests.reference.rotary import rotate


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Attributes of the node. dtype None: unquantized cache of the activation type.

    half: the type of activations and of the operands of matrix products, as on a GPU; bfloat16 values are kept in
    float32 arrays. None: float32 arithmetic on activations of the query's own type.
    """

    num_heads: int
    kv_num_heads: int
    head_size: int
    dtype: CacheDtype | None
    k_quant: Granularity = Granularity.PER_TOKEN
    v_quant: Granularity = Granularity.PER_TOKEN
    do_rotary: bool = False
    rotary_interleaved: bool = False
    half: HalfName | None = None
    attention: AttentionOptions = field(default_factory=AttentionOptions)


@dataclass(frozen=True)
class Cache:
    """key, value: (B, Hkv, C, row); scales as in the contract, None without quantization."""

    key: Array
    value: Array
    k_scale: Array | None = None
    v_scale: Array | None = None

    def copy(self) -> Cache:
        """A cache in memory of its own."""
        scales = [None if s is None else s.copy() for s in (self.k_scale, self.v_scale)]
        return Cache(self.key.copy(), self.value.copy(), *scales)

    @property
    def capacity(self) -> int:
        """Rows of one (batch entry, head)."""
        return int(self.key.shape[2])


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one call: query (B, S, N D), key and value (B, S, Hkv D) or None when packed into query."""

    query: Array
    key: Array | None
    value: Array | None
    seqlens_k: Array
    total_sequence_length: int
    cos_cache: Array | None = None
    sin_cache: Array | None = None
    head_sink: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the call must leave behind.

    output: (B, S, N, D) float64; same_precision: the same in float32 or 16-bit arithmetic, rounded to the activation
    type; magnitude and terms: (B, S, N, 1), as in Attended; k_rows, v_rows: the float32 values (B, S, Hkv, D) that
    were quantized; valid: (B,); half: the operator's.
    """

    output: F64
    same_precision: Array
    magnitude: F64
    terms: F64
    cache: Cache
    k_rows: F32
    v_rows: F32
    past_lengths: Array
    total_lengths: Array
    valid: Array
    half: HalfName | None = None


def to_activation(op: Operator, values: Array, kind: np.dtype[Any]) -> Array:
    """Values rounded to the activation type, in an array of type `kind`."""
    with np.errstate(over="ignore"):
        rounded: Array = (values if op.half is None else round_half(values, op.half)).astype(kind)
    return rounded


def split_heads(op: Operator, inputs: Inputs) -> tuple[Array, Array, Array]:
    """query, key, value as (B, S, heads, D), from separate tensors or from one packed tensor."""
    batch, seq = inputs.query.shape[:2]
    if inputs.key is None or inputs.value is None:
        heads = inputs.query.reshape(batch, seq, op.num_heads + 2 * op.kv_num_heads, op.head_size)
        query, key, value = np.split(heads, [op.num_heads, op.num_heads + op.kv_num_heads], axis=2)
        return query, key, value
    kv_shape = (batch, seq, op.kv_num_heads, op.head_size)
    return (
        inputs.query.reshape(batch, seq, op.num_heads, op.head_size),
        inputs.key.reshape(kv_shape),
        inputs.value.reshape(kv_shape),
    )


def run_step(op: Operator, inputs: Inputs, past: Cache, present: Cache | None = None) -> Expected:
    """Apply the operator. `present` is what a separate output buffer holds before the call; None: past is updated."""
    query, key, value = split_heads(op, inputs)
    batch, seq = query.shape[:2]
    prompt = seq == inputs.total_sequence_length
    target = (past if present is None else present).copy()
    totals = inputs.seqlens_k.astype(np.int64).reshape(-1) + 1
    pasts = np.zeros_like(totals) if prompt else totals - seq
    valid = _valid_entries(op, inputs, past, target, pasts, totals)
    q, k, v = _rotated(op, inputs, query, key, value, pasts)
    output = np.full(query.shape, np.nan)
    same = np.full(query.shape, np.nan, np.float32)
    magnitude, terms = (np.zeros((batch, seq, op.num_heads, 1)) for _ in range(2))
    for b in map(int, np.flatnonzero(valid)):
        p, rows = int(pasts[b]), int(min(totals[b], seq)) if prompt else seq
        if present is not None and p:
            _copy_rows(op, past, target, b, p)
        _append(op, target, b, p, k[b, :rows].swapaxes(0, 1), v[b, :rows].swapaxes(0, 1))
        exact = (k[b, :rows].swapaxes(0, 1), v[b, :rows].swapaxes(0, 1)) if prompt else None
        output[b, rows:] = same[b, rows:] = 0
        if rows:
            wide, narrow = _attend_entry(op, inputs, target, b, q[b, :rows], p, exact)
            output[b, :rows], same[b, :rows] = wide.output, narrow.output
            magnitude[b, :rows], terms[b, :rows] = wide.magnitude, wide.terms
    return Expected(
        output=output, same_precision=to_activation(op, same, query.dtype), magnitude=magnitude, terms=terms,
        cache=target, k_rows=k, v_rows=v, past_lengths=pasts, total_lengths=totals, valid=valid, half=op.half,
    )  # fmt: skip


def _valid_entries(op: Operator, inputs: Inputs, past: Cache, target: Cache, pasts: Array, totals: Array) -> Array:
    """Which batch entries have lengths that fit the buffers; the others get NaN and change nothing."""
    seq = inputs.query.shape[1]
    valid: Array
    if seq == inputs.total_sequence_length:
        valid = (totals >= 0) & (totals <= seq)
    else:
        valid = (pasts >= 0) & (totals <= target.capacity) & (pasts <= past.capacity)
    if op.do_rotary and inputs.cos_cache is not None:
        valid &= totals <= inputs.cos_cache.shape[0]
    return valid


def _rotated(
    op: Operator, inputs: Inputs, query: Array, key: Array, value: Array, pasts: Array
) -> tuple[F32, F32, F32]:
    """float32 values that the cache and the scores are made of. An unquantized cache rounds them to its own type."""
    seq = query.shape[1]
    q, k, v = (np.asarray(x, np.float32) for x in (query, key, value))
    if op.do_rotary and inputs.cos_cache is not None and inputs.sin_cache is not None:
        positions = pasts[:, None] + np.arange(seq)[None, :]
        q, k = (
            rotate(x, inputs.cos_cache, inputs.sin_cache, positions, interleaved=op.rotary_interleaved) for x in (q, k)
        )
    if op.dtype is None:
        q, k = (to_activation(op, x, query.dtype).astype(np.float32) for x in (q, k))
    return q, k, v


def _copy_rows(op: Operator, past: Cache, target: Cache, b: int, rows: int) -> None:
    target.key[b, :, :rows] = past.key[b, :, :rows]
    target.value[b, :, :rows] = past.value[b, :, :rows]
    sides = ((past.k_scale, target.k_scale, op.k_quant), (past.v_scale, target.v_scale, op.v_quant))
    for old, kept, granularity in sides:
        if old is not None and kept is not None and granularity is Granularity.PER_TOKEN:
            kept[b, :, :rows] = old[b, :, :rows]


def _append(op: Operator, target: Cache, b: int, start: int, k: Array, v: Array) -> None:
    """Write rows (Hkv, n, D) at `start` of entry b."""
    rows = slice(start, start + k.shape[1])
    sides = ((k, target.key, target.k_scale, op.k_quant), (v, target.value, target.v_scale, op.v_quant))
    for values, cache, scale, granularity in sides:
        if op.dtype is None or scale is None:
            cache[b, :, rows] = to_activation(op, values, cache.dtype)
        elif granularity is Granularity.PER_TOKEN:
            codes, scales = kv.quantize_per_token(values, op.dtype, scale.dtype.type)
            cache[b, :, rows] = codes.view(cache.dtype)
            scale[b, :, rows] = scales
        else:
            cache[b, :, rows] = kv.quantize_static(values, _static(scale), op.dtype).view(cache.dtype)


def _static(scale: Array) -> Array:
    """A static scale as something that broadcasts to (Hkv, tokens, D)."""
    return scale[0] if scale.ndim == 4 else scale


def read_cache(
    op: Operator, cache: Cache, b: int, tokens: int, precision: type[Any] = np.float64
) -> tuple[Array, Array]:
    """The first `tokens` rows of entry b as values (Hkv, tokens, D)."""
    sides = []
    for rows, scale, granularity in ((cache.key, cache.k_scale, op.k_quant), (cache.value, cache.v_scale, op.v_quant)):
        if op.dtype is None or scale is None:
            sides.append(rows[b, :, :tokens].astype(precision))
            continue
        used = scale[b, :, :tokens] if granularity is Granularity.PER_TOKEN else _static(scale)
        sides.append(kv.dequantize(rows[b, :, :tokens], used, op.dtype, op.head_size, precision))
    return sides[0], sides[1]


def _attend_entry(
    op: Operator, inputs: Inputs, cache: Cache, b: int, query: Array, past: int, exact: tuple[Array, Array] | None
) -> tuple[Attended, Attended]:
    """Attention of entry b in float64 and in the kernel's precision: over a prompt's exact rows, else the cache."""
    rows = query.shape[0]
    positions = past + np.arange(rows)
    key, value = exact or read_cache(op, cache, b, past + rows)
    wide = attend(query, key, value, positions, op.attention, inputs.head_sink)
    key, value = exact or read_cache(op, cache, b, past + rows, np.float32)
    if op.half is None:
        return wide, attend(query, key, value, positions, op.attention, inputs.head_sink, np.float32)
    return wide, attend_half(query, key, value, positions, op.attention, inputs.head_sink, op.half)
