"""Calls whose tokens are given, from the first to the last: what lies in the past is quantized into the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from python_tests.kernel.case import KernelCase
from python_tests.op.gqa_case import as_type, fill_rows, make_inputs, poisoned_cache
from python_tests.reference.format import F32, Array, Granularity
from python_tests.reference.step import Cache, Inputs


def plant(case: KernelCase, query: Array, key: Array, value: Array) -> tuple[Inputs, Cache]:
    """query (B, S, N, D); key and value (Hkv, tokens, D): what every entry holds, entry b its first T_b tokens of it.

    Values must be representable in the activation type. Without rotary or packing.
    """
    assert case.rotary == "none"
    assert not case.packed
    past, inputs = poisoned_cache(case, case.capacity), make_inputs(case)
    shape = (case.batch, case.seq, case.kv_heads, case.head_size)
    recent = [np.zeros(shape, np.float32) for _ in range(2)]
    whole = replace(case, totals=(key.shape[1] + case.seq,), total=case.capacity + case.seq + 1)
    sides = ((key, past.key, past.k_scale, case.k_quant), (value, past.value, past.v_scale, case.v_quant))
    for (tokens, rows, scale, granularity), new in zip(sides, recent, strict=True):
        assert scale is not None
        codes = np.empty((1, case.kv_heads, tokens.shape[1], rows.shape[-1]), rows.dtype)
        per_token = granularity is Granularity.PER_TOKEN
        scales = np.empty((1, *codes.shape[1:3], 1), scale.dtype) if per_token else scale
        fill_rows(whole, codes[0], scales, granularity, tokens.astype(np.float32), 0)
        for b, (old, total) in enumerate(zip(case.pasts, case.totals, strict=True)):
            rows[b, :, :old] = codes[0, :, :old]
            if per_token:
                scale[b, :, :old] = scales[0, :, :old]
            new[b, : total - old] = tokens[:, old:total].swapaxes(0, 1)
    flat = [as_type(x.reshape(case.batch, case.seq, -1), case.activation) for x in (query, *recent)]
    return replace(inputs, query=flat[0], key=flat[1], value=flat[2]), past


def one_hot_values(case: KernelCase) -> F32:
    """(Hkv, tokens, D): token t has 1 at element (t + 5 h) mod D, so that equal weights count tokens."""
    tokens = np.arange(max(case.totals))
    value = np.zeros((case.kv_heads, tokens.size, case.head_size), np.float32)
    for h in range(case.kv_heads):
        value[h, tokens, (tokens + 5 * h) % case.head_size] = 1
    return value


def sign_keys(case: KernelCase) -> F32:
    """(Hkv, tokens, D) of +-1: exact in every format, and nearly orthogonal."""
    shape = (case.kv_heads, max(case.totals), case.head_size)
    return (case.rng("signs").integers(0, 2, shape) * 2 - 1).astype(np.float32)
