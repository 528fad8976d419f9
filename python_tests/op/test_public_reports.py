"""Faults that users of quantized caches have met in public, 1 to 34: the whole class, with computed results.

test_report_NN answers report NN of public_reports.py. Base case unless it says otherwise: B 2, S 1, 8 query heads,
2 KV heads, D 128, capacity 64, float16 activations, int8 PER_TOKEN, in place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from python_tests.op.checks import check_guards, check_rows, check_scales, verify
from python_tests.op.gqa_case import Case, make_inputs, make_past, poisoned_cache
from python_tests.op.gqa_model import (
    build_model,
    cached_session,
    call,
    input_buffers,
    output_buffers,
    run,
)
from python_tests.op.huge_cache import HugeCache, verify_huge
from python_tests.op.providers import SELECTED, Provider
from python_tests.op.public_reports import REPORTS
from python_tests.op.stream import Stream
from python_tests.op.two_nodes import verify_two
from python_tests.reference.format import Array, CacheDtype, quantize_per_token
from python_tests.reference.step import Cache, run_step

ROOT = Path(__file__).parents[2]
BASE = Case(id="report", activation="float16", total=64)
FORMATS = list(CacheDtype)


def base(number: int, **changes: object) -> Case:
    """The base case under the report's own id."""
    return replace(BASE, id=f"report-{number}", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_01(dtype: CacheDtype, in_place: bool, provider: Provider) -> None:
    """Lengths below and beyond the capacity: nothing outside is written, neighbours are right, the entry is NaN."""
    case = base(1, dtype=dtype, capacity=16, total=16, totals=(0, 17, 1001, 16, 1), in_place=in_place)
    _, expected = verify(case, provider)
    assert expected.valid.tolist() == [False, False, False, True, True]


def test_report_02(provider: Provider) -> None:
    """seqlens_k beyond the rows of cos_cache: NaN for that entry; if the host's total says so, an error."""
    case = base(2, rotary="half", cos_rows=16, total=16, totals=(21, 16))
    _, expected = verify(case, provider)
    assert expected.valid.tolist() == [False, True]
    with pytest.raises(RuntimeError, match="cos_cache"):
        verify(replace(case, total=21), provider)


def test_report_03(provider: Provider) -> None:
    """seqlens_k of shape (B, 1) and (1, 1) is accepted; what is rejected stands in test_reject.py."""
    verify(base(3, seqlens_2d=True), provider)
    verify(base(3, seqlens_2d=True, totals=(21,)), provider)


@pytest.mark.parametrize("in_place", [True, False])
def test_report_04(in_place: bool, provider: Provider) -> None:
    """Fewer tokens than new ones: that entry's data and scales stay, P = 0 beside it is right."""
    _, expected = verify(base(4, seq=4, totals=(2, 4), in_place=in_place), provider)
    assert expected.valid.tolist() == [False, True]


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_05(dtype: CacheDtype, provider: Provider) -> None:
    """past of 5 rows, present of 6, separate: old rows and scales copied, the new row appended."""
    outcome, _ = verify(base(5, dtype=dtype, capacity=5, totals=(6, 6), total=6, in_place=False), provider)
    assert outcome.cache.capacity == 6


def test_report_06() -> None:
    """The guards do not depend on an environment variable: report 1 in a process without any."""
    code = (
        "from python_tests.op.providers import selected\n"
        "from python_tests.op.test_public_reports import CacheDtype, test_report_01\n"
        "test_report_01(CacheDtype.INT8, True, selected())\n"
    )
    # Where libraries are, and which provider is meant, is all that the process is told.
    kept = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT", SELECTED)
    env = {name: os.environ[name] for name in kept if name in os.environ}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_07(dtype: CacheDtype, provider: Provider) -> None:
    """B 4, separate buffers, 8 steps: finite, and every entry is bit for bit what it is alone."""
    lengths = (3, 9, 1, 7)
    case = base(7, dtype=dtype, in_place=False, totals=lengths)
    together = make_past(case)
    alone = [Cache(*(cut(x, b) for x in fields(together))) for b in range(4)]
    for step in range(8):
        now = replace(case, totals=tuple(n + step for n in lengths), id=f"report-7-{step}")
        inputs = make_inputs(now)
        outcome = call(now, inputs, together, poisoned_cache(now, 64), provider)
        assert np.isfinite(outcome.output).all()
        together = outcome.cache
        assert inputs.key is not None
        assert inputs.value is not None
        for b in range(4):
            single, own = replace(now, totals=now.totals[b : b + 1]), slice(b, b + 1)
            one = replace(
                inputs, query=inputs.query[own], key=inputs.key[own], value=inputs.value[own],
                seqlens_k=inputs.seqlens_k[own],
            )  # fmt: skip
            result = call(single, one, alone[b], poisoned_cache(single, 64), provider)
            assert np.array_equal(result.output[0], outcome.output[b])
            alone[b] = result.cache
            check_rows(result.cache.key, together.key[b : b + 1], "key")


def fields(cache: Cache) -> tuple[Array, Array, Array, Array]:
    """The four tensors of a PER_TOKEN cache."""
    assert cache.k_scale is not None
    assert cache.v_scale is not None
    return cache.key, cache.value, cache.k_scale, cache.v_scale


def cut(array: Array, b: int) -> Array:
    """One batch entry with its dimension."""
    return array[b : b + 1].copy()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_08(dtype: CacheDtype, in_place: bool, provider: Provider) -> None:
    """Packed QKV with rotary into a present full of 0x7F and NaN scales: a prompt and the step after it."""
    case = base(8, dtype=dtype, packed=True, rotary="half", in_place=in_place)
    verify(replace(case, totals=(1, 1)), provider)
    verify(replace(case, seq=9, totals=(9, 4), total=9), provider)


def test_report_10(provider: Provider) -> None:
    """A window of 2^32 + 4 is no limit and never 4."""
    wide, _ = verify(base(10, window=2**32 + 4, totals=(50, 20)), provider)
    none, _ = verify(base(10, totals=(50, 20)), provider)
    assert np.array_equal(wide.output, none.output)


def test_report_11(provider: Provider) -> None:
    """D 256 with 32 query heads per KV head."""
    for seq in (1, 4):
        verify(base(11, heads=32, kv_heads=1, head_size=256, seq=seq, totals=(50, 20)), provider)


@pytest.mark.parametrize("heads", [9, 12, 16, 64])
def test_report_12(heads: int, provider: Provider) -> None:
    """Groups above 8."""
    verify(base(12, heads=heads, kv_heads=1), provider)


@pytest.mark.parametrize("dtype", [CacheDtype.INT8, CacheDtype.FP8])
@pytest.mark.parametrize("batch", [1, 3])
def test_report_13(batch: int, dtype: CacheDtype, provider: Provider) -> None:
    """D 256."""
    verify(base(13, dtype=dtype, head_size=256, totals=(40, 3, 64)[:batch]), provider)


@pytest.mark.parametrize("total", range(7, 18))
def test_report_14(total: int, provider: Provider) -> None:
    """Lengths around multiples of 8, with D 256; larger heads are rejected in test_reject.py."""
    verify(base(14, head_size=256, totals=(total, total)), provider)
    verify(base(14, head_size=256, totals=(total, total), capacity=total, total=None), provider)


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_15(dtype: CacheDtype, provider: Provider) -> None:
    """A ragged batch."""
    verify(base(15, dtype=dtype, totals=(2, 18, 64)), provider)


def test_report_16(provider: Provider) -> None:
    """Caches that are slices of larger arrays (stride 80, 64 used): right values, as a feed."""
    case = base(16, activation=provider.activations[0])
    inputs, past = make_inputs(case), make_past(case)
    wide = [np.full((2, 2, 80, x.shape[3]), 1, x.dtype) for x in fields(past)]
    for big, small in zip(wide, fields(past), strict=True):
        big[:, :, :64] = small
    feeds = {
        "query": inputs.query, "key": inputs.key, "value": inputs.value, "seqlens_k": inputs.seqlens_k,
        "total_sequence_length": np.array([64], np.int32),
    }  # fmt: skip
    feeds |= dict(zip(("past_key", "past_value", "k_scale", "v_scale"), [x[:, :, :64] for x in wide], strict=True))
    output = cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2).run(["output"], feeds)[0]
    outcome, _ = verify(case, provider)
    assert np.array_equal(output.reshape(outcome.output.shape), outcome.output)


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_17(dtype: CacheDtype, provider: Provider) -> None:
    """Scales read between two calls are unchanged after the second."""
    stream = Stream.start(base(17, dtype=dtype), 8, provider)
    stream.feed((0, 0), 5)
    first = fields(stream.cache())
    stream.feed((5, 5), 1)
    for old, now in zip(first, fields(stream.cache()), strict=True):
        assert old[:, :, :5].tobytes() == now[:, :, :5].tobytes()


def test_report_18(provider: Provider) -> None:
    """Scale and cache buffers of exactly their size, filled to the last row: the canaries behind them live."""
    for capacity in (1, 7, 64):
        outcome, _ = verify(base(18, capacity=capacity, totals=(capacity, capacity), total=capacity + 0), provider)
        check_guards(outcome)
        for name in ("in:k_scale", "in:v_scale"):
            assert outcome.buffers[name].read().nbytes == 2 * 2 * capacity * 4


def test_report_19(provider: Provider) -> None:
    """127, 0.5, 1.5, -0.5, -1.5 with scale 1: ties to even in K and V alike."""
    case = base(19, totals=(1, 1))
    inputs, past = make_inputs(case), make_past(case)
    row = np.resize(np.array([127, 0.5, 1.5, -0.5, -1.5, 2.5, -2.5, 126.5], np.float16), 128)
    assert inputs.key is not None
    assert inputs.value is not None
    inputs.key[...] = inputs.value[...] = np.tile(row, 2)
    outcome = call(case, inputs, past, None, provider)
    wanted = np.resize(np.array([127, 0, 2, 0, -2, 2, -2, 126], np.int8), 128)
    for rows, scales in ((outcome.cache.key, outcome.cache.k_scale), (outcome.cache.value, outcome.cache.v_scale)):
        assert scales is not None
        assert (scales[:, :, 0] == 1).all()
        assert (rows[:, :, 0] == wanted).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("amax", [0.01, 0.3])
def test_report_20(amax: float, dtype: CacheDtype, provider: Provider) -> None:
    """Small rows use the whole range: the scale is not floored."""
    case = base(20, dtype=dtype, totals=(1, 1), activation=provider.activations[0])
    inputs = make_inputs(case)
    values = np.linspace(-amax, amax / 2, 128).astype(inputs.query.dtype)
    assert inputs.value is not None
    inputs.value[...] = np.tile(values, 2)
    outcome, _ = verify(case, provider, inputs=inputs)
    codes, scale = quantize_per_token(values[None].astype(np.float32), dtype, np.float32)
    assert outcome.cache.v_scale is not None
    assert (outcome.cache.v_scale[:, :, 0, 0] == scale[0, 0]).all()
    assert (outcome.cache.value[:, :, 0] == codes[0]).all()
    assert codes.ravel()[0] & 0x0F == 1 if dtype is CacheDtype.INT4 else True


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_21(dtype: CacheDtype, provider: Provider) -> None:
    """Poisoned scales, a prompt of 3, then steps: what was written is used, what was not is not."""
    stream = Stream.start(base(21, dtype=dtype), 6, provider)
    stream.feed((0, 0), 3, total=3, check=True)
    for t in range(3, 6):
        stream.feed((t, t), 1, check=True)


@pytest.mark.parametrize("head_size", [72, 80, 96, 192])
def test_report_22(head_size: int, provider: Provider) -> None:
    """int4 with head sizes that are no power of two."""
    verify(base(22, dtype=CacheDtype.INT4, head_size=head_size), provider)
    verify(base(22, dtype=CacheDtype.INT4, head_size=head_size, seq=11, totals=(40, 11), in_place=False), provider)


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_23(dtype: CacheDtype, provider: Provider) -> None:
    """A constant of its own per KV head: heads are not exchanged, with 40 equal rows each."""
    case = base(23, dtype=dtype, seq=40, totals=(40, 40))
    inputs = make_inputs(case)
    assert inputs.value is not None
    inputs.value[...] = np.repeat(np.array([1, -3], np.float16), 128)
    outcome, _ = verify(case, provider, inputs=inputs)
    wanted = np.repeat([1.0, -3.0], 4)[None, None, :, None]
    assert np.allclose(outcome.output, wanted, rtol=2e-3)


def test_report_24(provider: Provider) -> None:
    """D 64 and D 128 in one session."""
    verify_two(base(24, head_size=64), base(24, head_size=128), provider)


def test_report_27(provider: Provider) -> None:
    """S 4 after 13 tokens: causal within the four."""
    for dtype in FORMATS:
        verify(base(27, dtype=dtype, seq=4, totals=(17, 17)), provider)


def test_report_28(provider: Provider) -> None:
    """One session and one capacity of 262,144: 5 tokens, then 131,073, then 5 again."""
    case = base(28, heads=2, kv_heads=1, head_size=8, capacity=262144, total=262144)
    for total in (5, 131073, 5):
        verify(replace(case, totals=(total,)), provider)


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_30(dtype: CacheDtype, provider: Provider) -> None:
    """From 20 tokens back to 10, and a new token: row 10 and its scale are overwritten, the tail is ignored."""
    stream = Stream.start(base(30, dtype=dtype), 30, provider)
    stream.feed((0, 0), 20)
    old = fields(stream.cache())
    stream.feed((10, 10), 1)
    assert stream.inputs.key is not None
    assert stream.inputs.value is not None
    shifted = replace(stream.inputs, key=np.roll(stream.inputs.key, 3, 1), value=np.roll(stream.inputs.value, 3, 1))
    rewritten = Stream(stream.case, shifted, stream.buffers, provider)
    rewritten.feed((10, 10), 1, check=True)
    for before, now in zip(old, fields(rewritten.cache()), strict=True):
        assert (before[:, :, 10] != now[:, :, 10]).any()
        assert before[:, :, :10].tobytes() == now[:, :, :10].tobytes()
        assert before[:, :, 11:20].tobytes() == now[:, :, 11:20].tobytes()


@pytest.mark.parametrize(("dtype", "batch"), [(CacheDtype.INT8, 17), (CacheDtype.INT8, 16), (CacheDtype.INT4, 33)])
def test_report_34(dtype: CacheDtype, batch: int, provider: Provider) -> None:
    """Caches of 2^31 elements and more: the last entry is right, and entry 0 is its own.

    The memory is reserved and, but for a few rows, never touched; so no guards here.
    """
    totals = (4,) * batch
    case = base(34, dtype=dtype, heads=8, kv_heads=8, capacity=131072, totals=totals, total=131072)
    if provider.device != "cpu":
        early = replace(case, totals=(9,) * batch, capacity=9, total=10, window=5)
        verify_huge(HugeCache(early, 131072, (0,) * batch), provider, all_bytes=False)
        return
    small = replace(case, capacity=4, total=64)
    inputs, past = make_inputs(case), make_past(small)
    state = {"past_key": past.key, "past_value": past.value, "k_scale": past.k_scale, "v_scale": past.v_scale}
    huge: dict[str, Array] = {}
    for name, rows in state.items():
        assert rows is not None
        huge[name] = np.zeros((batch, 8, 131072, rows.shape[3]), rows.dtype)
        huge[name][:, :, :3] = rows[:, :, :3]
    assert huge["past_key"].size >= 2**31 if dtype is CacheDtype.INT8 else huge["past_key"].size > 2**31
    ins = input_buffers(case, inputs, past, provider)
    session = cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2)
    outs = output_buffers(case, ins, None, provider)
    for name, array in huge.items():
        ins[name].shape, ins[name].pointer = array.shape, array.ctypes.data
    run(session, ins, outs)
    expected = run_step(small.operator, replace(inputs, total_sequence_length=64), past, poisoned_cache(small, 64))
    for name, array in (("key", huge["past_key"]), ("value", huge["past_value"])):
        check_rows(array[:, :, :4], getattr(expected.cache, name)[:, :, :4], name)
        assert not array[:, :, 4].any()
    assert expected.cache.k_scale is not None
    check_scales(huge["k_scale"][:, :, :4], expected.cache.k_scale[:, :, :4], "k_scale")
    output = outs["output"].read().reshape(expected.output.shape)
    assert np.allclose(output, expected.output, rtol=4e-3, atol=4e-3)


def test_every_report_is_answered() -> None:
    """Each has a test in one of the three files; those whose fault cannot occur on a CPU are marked gpu."""
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_public_reports*.py"))
    missing = [n for n in REPORTS if f"def test_report_{n:02d}(" not in source]
    assert not missing, missing
