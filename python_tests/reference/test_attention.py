"""Attention, rotation and whole steps against hand-computed values and invariants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from python_tests.op.gqa_case import Case, make_inputs, make_past, poisoned_cache
from python_tests.reference.attention import AttentionOptions, attend, visible
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.rotary import rotate
from python_tests.reference.step import Inputs, run_step

ONES = np.ones((1, 1, 8))


def two_tokens(options: AttentionOptions, head_sink: Array | None = None) -> float:
    """Output of one query over keys with raw scores 0 and log 3 (scale 1) and values 0 and 4."""
    key, value = np.zeros((1, 2, 8)), np.zeros((1, 2, 8))
    key[0, 1, 0], value[0, 1] = np.log(3), 4
    query = np.zeros((1, 1, 8))
    query[0, 0, 0] = 1
    return float(attend(query, key, value, np.array([1]), options, head_sink).output[0, 0, 0])


def test_softmax_by_hand() -> None:
    """Weights 1/4 and 3/4."""
    assert two_tokens(AttentionOptions(scale=1)) == pytest.approx(3.0)


def test_default_scale() -> None:
    """1 / sqrt(D): the logit log 3 becomes log 3 / sqrt 8."""
    weight = 3 ** (1 / np.sqrt(8))
    assert two_tokens(AttentionOptions()) == pytest.approx(4 * weight / (1 + weight))


def test_smooth_softmax_and_sink_by_hand() -> None:
    """A further logit in the denominator: 0, or the head's own, which is not scaled and replaces the 0."""
    assert two_tokens(AttentionOptions(scale=1, smooth_softmax=True)) == pytest.approx(12 / 5)
    sink = np.array([np.log(4)])
    assert two_tokens(AttentionOptions(scale=1), sink) == pytest.approx(12 / 8)
    assert two_tokens(AttentionOptions(scale=1, smooth_softmax=True), sink) == pytest.approx(12 / 8)
    assert two_tokens(AttentionOptions(scale=1), np.array([-np.inf])) == pytest.approx(3.0)


def test_softcap_by_hand() -> None:
    """cap * tanh(scale * dot / cap); the sink is not capped."""
    logit = 0.5 * np.tanh(np.log(3) / 0.5)
    weight = np.exp(logit)
    options = AttentionOptions(scale=1, softcap=0.5)
    assert two_tokens(options) == pytest.approx(4 * weight / (1 + weight))
    assert two_tokens(options, np.array([3.0])) == pytest.approx(4 * weight / (1 + weight + np.exp(3.0)))


def test_window_counts_tokens() -> None:
    """local_window_size w leaves the last w + 1 tokens; -1 and 2**31 - 1 or more leave all."""
    positions = np.array([5])
    assert visible(positions, 8, 2)[0].tolist() == [False, False, False, True, True, True, False, False]
    for no_limit in (-1, 2**31 - 1, 2**32 + 4):
        assert visible(positions, 8, no_limit)[0].sum() == 6


def test_unseen_tokens_do_not_matter() -> None:
    """NaN and Inf behind the query and before the window do not reach the output; seen ones do."""
    rng = np.random.default_rng(3)
    query, key, value = rng.normal(size=(1, 2, 8)), rng.normal(size=(1, 6, 8)), rng.normal(size=(1, 6, 8))
    options = AttentionOptions(local_window_size=1)
    clean = attend(query, key, value, np.array([3]), options).output
    for unseen in (0, 1, 4, 5):
        key[0, unseen], value[0, unseen] = np.nan, np.inf
    assert np.array_equal(attend(query, key, value, np.array([3]), options).output, clean)
    value[0, 2, 5] = np.nan
    poisoned = attend(query, key, value, np.array([3]), options).output
    assert np.isnan(poisoned[..., 5]).all()
    assert np.array_equal(np.delete(poisoned, 5, axis=-1), np.delete(clean, 5, axis=-1))


def test_query_heads_share_their_kv_head() -> None:
    """Heads 0-2 use KV head 0, heads 3-5 use KV head 1."""
    value = np.stack([np.full((1, 8), 1.0), np.full((1, 8), 2.0)])
    output = attend(np.ones((1, 6, 8)), np.ones((2, 1, 8)), value, np.array([0]), AttentionOptions()).output
    assert output[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_rotation_by_hand() -> None:
    """A quarter turn of (1, 2): half-split pairs i with i + r / 2, interleaved 2 i with 2 i + 1."""
    values = np.array([1, 2, 3, 4, 5], np.float32).reshape(1, 1, 1, 5)
    cos, sin = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    cos[0], sin[0] = 1, 0
    position = np.array([[1]])
    half = rotate(values, cos, sin, position, interleaved=False)
    pairs = rotate(values, cos, sin, position, interleaved=True)
    assert half.ravel().tolist() == [-3, -4, 1, 2, 5]
    assert pairs.ravel().tolist() == [-2, 1, -4, 3, 5]
    assert np.array_equal(rotate(values, cos, sin, position * 0, interleaved=False), values)


def test_rotation_is_relative() -> None:
    """The dot product of two rotated rows depends on the distance of their positions only."""
    rng = np.random.default_rng(4)
    angles = np.arange(40)[:, None] * 0.3 ** np.arange(8)[None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    q, k = (rng.normal(size=(1, 1, 1, 16)).astype(np.float32) for _ in range(2))
    for interleaved in (False, True):
        dots = [
            np.sum(
                rotate(q, cos, sin, np.array([[p + 7]]), interleaved=interleaved)
                * rotate(k, cos, sin, np.array([[p]]), interleaved=interleaved)
            )
            for p in (0, 11, 32)
        ]
        assert np.allclose(dots, dots[0], atol=1e-4)


BASE = Case(id="reference", heads=4, head_size=16, capacity=12, totals=(7, 3), total=7)


def test_steps_equal_a_burst() -> None:
    """Four single steps write the bytes and scales of one burst, and give its last output row."""
    burst = replace(BASE, seq=4, totals=(7, 5), total=12, rotary="half")
    inputs, past = make_inputs(burst), make_past(burst)
    at_once = run_step(burst.operator, inputs, past)
    cache = past
    for s in range(4):
        assert inputs.key is not None
        assert inputs.value is not None
        one = replace(
            inputs,
            query=inputs.query[:, s : s + 1],
            key=inputs.key[:, s : s + 1],
            value=inputs.value[:, s : s + 1],
            seqlens_k=inputs.seqlens_k - 3 + s,
        )
        single = run_step(burst.operator, one, cache)
        cache = single.cache
        assert np.allclose(single.output[:, 0], at_once.output[:, s], rtol=1e-12, atol=1e-12)
    assert np.array_equal(cache.key, at_once.cache.key)
    assert np.array_equal(cache.value, at_once.cache.value)
    assert cache.k_scale is not None
    assert at_once.cache.k_scale is not None
    assert np.array_equal(cache.k_scale, at_once.cache.k_scale, equal_nan=True)


def test_separate_buffers_keep_their_tail() -> None:
    """Old rows are copied, new ones appended, and rows from T_b on keep what present held."""
    case = replace(BASE, in_place=False)
    past, present = make_past(case), poisoned_cache(case, 12)
    present.key[...] = 55
    cache = run_step(case.operator, make_inputs(case), past, present).cache
    for b, total in enumerate(case.totals):
        assert np.array_equal(cache.key[b, :, : total - 1], past.key[b, :, : total - 1])
        assert not np.array_equal(cache.key[b, :, total - 1], past.key[b, :, total - 1])
        assert (cache.key[b, :, total:] == 55).all()


@pytest.mark.parametrize("total", [0, -3, 13, 1000])
def test_invalid_entry(total: int) -> None:
    """Lengths that do not fit give NaN and change nothing; the other entry is as if it were alone."""
    case = replace(BASE, totals=(total, 3))
    past = make_past(case)
    result = run_step(case.operator, make_inputs(case), past)
    assert result.valid.tolist() == [False, True]
    assert np.isnan(result.output[0]).all()
    assert np.isfinite(result.output[1]).all()
    assert np.array_equal(result.cache.key[0], past.key[0])


def test_right_padded_prompt() -> None:
    """Padding rows give output 0, write nothing, and their contents do not matter."""
    case = replace(BASE, seq=8, totals=(8, 3), total=8, capacity=12)
    inputs = make_inputs(case)
    assert inputs.key is not None
    inputs.key[1, 3:] = np.nan
    result = run_step(case.operator, inputs, make_past(case))
    assert (result.output[1, 3:] == 0).all()
    assert np.isfinite(result.output).all()
    assert result.cache.k_scale is not None
    assert np.isnan(result.cache.k_scale[1, :, 3:]).all()


def test_empty_prompt_entry() -> None:
    """seqlens_k -1 in a prompt: zeros and an untouched cache."""
    case = replace(BASE, seq=5, totals=(0, 5), total=5)
    past = make_past(case)
    result = run_step(case.operator, make_inputs(case), past)
    assert (result.output[0] == 0).all()
    assert np.array_equal(result.cache.value[0], past.value[0])


def test_prompt_attends_exact_values() -> None:
    """A prompt's output does not depend on the cache format; a step's does."""
    prompt = replace(BASE, seq=5, totals=(5, 5), total=5, k_quant=Granularity.PER_TENSOR)
    outputs = [run_step(c.operator, make_inputs(c), make_past(c)).output for c in (prompt, replace(prompt, dtype=None))]
    assert np.array_equal(outputs[0], outputs[1])
    chunk = replace(prompt, total=12)
    outputs = [run_step(c.operator, make_inputs(c), make_past(c)).output for c in (chunk, replace(chunk, dtype=None))]
    assert not np.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_packed_equals_separate(dtype: CacheDtype) -> None:
    """The packed tensor is query heads, key heads, value heads of each token."""
    case = replace(BASE, dtype=dtype, rotary="interleaved")
    packed = replace(case, packed=True)
    results = [run_step(c.operator, make_inputs(c), make_past(c)) for c in (case, packed)]
    assert np.array_equal(results[0].output, results[1].output)
    assert np.array_equal(results[0].cache.key, results[1].cache.key)


def test_quality_follows_from_the_step_size() -> None:
    """One attended token: the output is the dequantized row, so the error is at most half a step of int8."""
    case = replace(BASE, totals=(1, 1), total=12)
    inputs: Inputs = make_inputs(case)
    assert inputs.value is not None
    result = run_step(case.operator, inputs, make_past(case))
    exact = inputs.value.reshape(2, 1, 2, 16).repeat(2, axis=2)
    step = np.abs(exact).max(axis=-1, keepdims=True) / 127
    assert (np.abs(result.output - exact) <= step * 0.5001).all()
    assert np.abs(result.output - exact).max() > 0
