"""Faults that users of quantized caches have met in public, 36 to 63: values, features, lengths and rejections.

As test_public_reports.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from onnxruntime.capi import onnxruntime_pybind11_state as errors

from python_tests.op.checks import check_rows, verify
from python_tests.op.gqa_case import Case, RotaryName, fill_rows, make_inputs, make_past, poisoned_cache
from python_tests.op.gqa_model import (
    OUTPUTS,
    build_model,
    cached_session,
    call,
    input_buffers,
    make_session,
    output_buffers,
    run,
)
from python_tests.op.providers import FloatName, Provider, selected
from python_tests.op.stream import Stream
from python_tests.op.test_reject import NODES, NOT_IMPLEMENTED, Bad, feeds_of
from python_tests.reference.bfloat16 import round_bfloat16
from python_tests.reference.format import Array, CacheDtype, Granularity, zero_code_byte
from python_tests.reference.step import Inputs, run_step

BASE = Case(id="report", activation="float16", total=64)
FORMATS = list(CacheDtype)
BFLOAT16 = int(TensorProto.BFLOAT16)


def base(number: int, **changes: object) -> Case:
    """The base case under the report's own id."""
    return replace(BASE, id=f"report-{number}", **changes)  # type: ignore[arg-type]


def key_value(inputs: Inputs) -> tuple[Array, Array]:
    """key and value of inputs that are not packed, to be changed in place."""
    assert inputs.key is not None
    assert inputs.value is not None
    return inputs.key, inputs.value


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_report_36(scale: float, dtype: CacheDtype, provider: Provider) -> None:
    """Codes 0x7F (NaN in fp8) and scales NaN or Inf in all rows from T_b on: the output is finite."""
    case = base(36, dtype=dtype, seq=3, totals=(30, 3))
    past = make_past(case)
    for array in (past.k_scale, past.v_scale):
        assert array is not None
        for b, length in enumerate(case.pasts):
            array[b, :, length:] = scale
    outcome, _ = verify(case, provider, past=past)
    assert np.isfinite(outcome.output).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_37(dtype: CacheDtype, provider: Provider) -> None:
    """A right-padded prompt of lengths 3 and 8 with NaN padding in Q, K and V: valid rows finite, padding not read."""
    case = base(37, dtype=dtype, seq=8, totals=(3, 8), total=8, rotary="half")
    inputs = make_inputs(case)
    for array in (inputs.query, *key_value(inputs)):
        array[0, 3:] = np.nan
    outcome, _ = verify(case, provider, inputs=inputs)
    assert np.isfinite(outcome.output).all()
    assert (outcome.output[0, 3:] == 0).all()


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_38(dtype: CacheDtype, bad: float, prompt: bool, provider: Provider) -> None:
    """One bad V value in token 5 of entry 1: queries before it, other tokens and the other entry are as without it."""
    case = base(38, dtype=dtype, seq=9, totals=(9, 9), total=9 if prompt else 64)
    clean, _ = verify(case, provider)
    inputs = make_inputs(case)
    key_value(inputs)[1][1, 5, 130] = bad
    outcome, _ = verify(case, provider, inputs=inputs)
    assert np.array_equal(outcome.output[0], clean.output[0])
    if provider.independent_rows:
        assert np.array_equal(outcome.output[1, :5], clean.output[1, :5])
    # Only KV head 1 was hit: the query heads of head 0 are untouched, those of head 1 are not finite from token 5 on.
    assert np.array_equal(outcome.output[1, :, :4], clean.output[1, :, :4])
    assert not np.isfinite(outcome.output[1, 5:, 4:]).all(axis=-1).any()
    others = np.arange(64) != 5
    assert np.array_equal(outcome.cache.value[:, :, others], clean.cache.value[:, :, others])


@pytest.mark.parametrize("scale_type", ["float32", "float16"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_39(dtype: CacheDtype, scale_type: FloatName, provider: Provider) -> None:
    """Rows of zeros and rows of equal values: scale 0 with code 0, never Inf or NaN, never negative."""
    case = base(39, dtype=dtype, seq=4, totals=(4, 4), scale_type=scale_type)
    inputs = make_inputs(case)
    key, value = key_value(inputs)
    key[:, 0] = value[:, 1] = 0
    key[:, 2] = value[:, 2] = -0.75
    outcome, _ = verify(case, provider, inputs=inputs)
    assert np.isfinite(outcome.output).all()
    for scales, rows, token in (
        (outcome.cache.k_scale, outcome.cache.key, 0),
        (outcome.cache.v_scale, outcome.cache.value, 1),
    ):
        assert scales is not None
        assert (scales[:, :, token] == 0).all()
        assert not np.signbit(scales[:, :, :4]).any()
        assert (rows[:, :, token].view(np.uint8) == zero_code_byte(dtype)).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_41(dtype: CacheDtype, provider: Provider) -> None:
    """A scale of -0.5 that someone else stored is read with its sign; the writer never stores one below 0."""
    case = base(41, dtype=dtype)
    past = make_past(case)
    assert past.k_scale is not None
    assert past.v_scale is not None
    past.k_scale[:, :, 3] = past.v_scale[:, :, 3] = -0.5
    outcome, _ = verify(case, provider, past=past)
    assert outcome.cache.v_scale is not None
    assert (outcome.cache.v_scale[:, :, 20] > 0).all()


HEADS = [(1, 1), (3, 1), (6, 2), (7, 1), (8, 1), (12, 2), (24, 2), (16, 1), (64, 1), (64, 64), (5, 1), (10, 2)]


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}-{h[1]}")
def test_report_42(heads: tuple[int, int], head_size: int, provider: Provider) -> None:
    """Any group size; every KV head has its own V."""
    for seq in (1, 3):
        verify(base(42, heads=heads[0], kv_heads=heads[1], head_size=head_size, seq=seq, totals=(40, 9)), provider)


@pytest.mark.parametrize("rotary", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("head_size", "rotary_dim"), [(96, 32), (96, 48), (96, 96), (72, 72), (72, 64), (128, 16), (8, 8)]
)
def test_report_43(head_size: int, rotary_dim: int, rotary: RotaryName, provider: Provider) -> None:
    """Rotation of a part of the head, both pairings, head 72, and caches of angles longer than the KV cache."""
    case = base(43, head_size=head_size, rotary=rotary, rotary_dim=rotary_dim, cos_rows=200, seq=2, totals=(50, 2))
    verify(case, provider)
    verify(replace(case, packed=True, seq=5, totals=(5, 3), total=5), provider)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("sink", [-np.inf, 0.0, 5.0])
@pytest.mark.parametrize("tokens", [40, 1100])
def test_report_44(tokens: int, sink: float, smooth: bool, softcap: float, provider: Provider) -> None:
    """A sink of -Inf, 0 or 5: counted once however the tokens are split, neither scaled nor capped."""
    case = base(
        44, totals=(tokens, 7), capacity=tokens, total=tokens, sink=True, smooth=smooth, softcap=softcap, scale=0.7,
        heads=4, kv_heads=1,
    )  # fmt: skip
    inputs = make_inputs(case)
    assert inputs.head_sink is not None
    inputs.head_sink[...] = sink
    for threads in (1, 2):
        verify(case, provider, inputs=inputs, threads=threads)


@pytest.mark.parametrize("granularity", list(Granularity)[1:])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_45(dtype: CacheDtype, granularity: Granularity, provider: Provider) -> None:
    """Softcap 5 with logits around +-50 and K scales around 3: the cap applies to the dequantized, scaled product."""
    case = base(45, dtype=dtype, softcap=5.0, k_quant=granularity, activation=provider.activations[0], scale=0.05)
    past, inputs = make_past(case), make_inputs(case)
    key_value(inputs)[0][...] *= 100
    assert past.k_scale is not None
    if granularity is Granularity.PER_TOKEN:
        values = case.rng("keys").normal(0, 100, (2, 20, 128)).astype(np.float32)
        for b in range(2):
            fill_rows(case, past.key[b, :, :20], past.k_scale, granularity, values, b)
    else:
        past.k_scale[...] = 3.0
    outcome, expected = verify(case, provider, past=past, inputs=inputs)
    uncapped = run_step(replace(case, softcap=0.0).operator, inputs, past)
    assert not np.allclose(outcome.output, uncapped.output, rtol=0.05)
    assert expected.valid.all()


@pytest.mark.parametrize("past", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("seq", [1, 3, 4, 33, 129])
def test_report_46(seq: int, past: int, provider: Provider) -> None:
    """S new tokens behind P old ones, B 2 ragged: the bytes of one prompt of all tokens."""
    for dtype in FORMATS:
        case = base(46, dtype=dtype, capacity=200, totals=(1, 1), heads=4)
        pieces, whole = (Stream.start(case, past + seq, provider) for _ in range(2))
        other = max(past - 1, 0)
        if other:
            pieces.feed((0, 0), other, total=other)
        if past > other:
            pieces.feed((other, 0), 1)
        pieces.feed((past, other), seq, check=True)
        whole.feed((0, 0), past + seq, total=past + seq)
        left, right = pieces.cache(), whole.cache()
        for b, end in ((0, past + seq), (1, other + seq)):
            check_rows(left.key[b : b + 1, :, :end], right.key[b : b + 1, :, :end], "key")
            check_rows(left.value[b : b + 1, :, :end], right.value[b : b + 1, :, :end], "value")


def test_report_48(provider: Provider) -> None:
    """int4 back from 7 tokens to 3: only rows from 3 on are rewritten."""
    stream = Stream.start(base(48, dtype=CacheDtype.INT4), 20, provider)
    stream.feed((0, 0), 7)
    old = stream.cache()
    moved = Stream(stream.case, make_inputs(replace(stream.case, id="report-48-other")), stream.buffers, provider)
    moved.feed((3, 3), 1, check=True)
    now = moved.cache()
    changed = (old.key != now.key).any(axis=(0, 1, 3))
    assert np.flatnonzero(changed).tolist() == [3]


def test_report_49(provider: Provider) -> None:
    """Inference from a past of 0 rows, and with a packed query of unknown width: no fixed 0, no type of the query."""
    case = base(49, packed=True)
    inputs: dict[str, Any] = {"query": (int(TensorProto.FLOAT16), ["B", "S", "packed"])}
    inputs |= {n: (int(TensorProto.INT8), ["B", 2, 0, 128]) for n in ("past_key", "past_value")}
    session = make_session(build_model(case, inputs=inputs, typed_outputs=False), provider)
    shapes = {o.name: (o.type, o.shape) for o in session.get_outputs()}
    assert shapes["present_key"][0] == "tensor(int8)"
    assert 0 not in shapes["present_key"][1]
    assert shapes["output"][1][2] not in (0, "packed")
    # And it runs: a prompt and a step into present buffers that are longer than past.
    for seq, total in ((5, 5), (2, 7)):
        now = replace(case, seq=seq, totals=(seq, seq), total=total, capacity=0, in_place=False)
        data, past = make_inputs(now), make_past(now)
        ins = input_buffers(now, data, past, provider)
        outs = output_buffers(now, ins, poisoned_cache(now, total), provider)
        run(session, ins, outs)
        check_rows(
            outs["present_key"].read(), run_step(now.operator, data, past, poisoned_cache(now, total)).cache.key, "key"
        )


def test_report_50(provider: Provider) -> None:
    """Capacity 64, 3 old tokens, 2 new ones: present and its scales have 64 rows, not 5."""
    case = base(50, seq=2, totals=(5, 5), total=5, activation=provider.activations[0])
    session = cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2)
    names = [name for name in OUTPUTS if name != "output_qk"]
    shapes = [array.shape for array in session.run(names, feeds_of(case))]
    assert shapes == [(2, 2, 1024), (2, 2, 64, 128), (2, 2, 64, 128), (2, 2, 64, 1), (2, 2, 64, 1)]


BINDINGS = [
    ("past_key", CacheDtype.FP8, TensorProto.UINT8),
    ("past_key", CacheDtype.INT8, TensorProto.FLOAT16),
    ("past_value", CacheDtype.INT4, TensorProto.INT8),
    ("k_scale", CacheDtype.INT8, TensorProto.FLOAT16),
    ("v_scale", CacheDtype.INT4, TensorProto.DOUBLE),
]


@pytest.mark.parametrize(("name", "dtype", "element_type"), BINDINGS)
def test_report_51(name: str, dtype: CacheDtype, element_type: int, provider: Provider) -> None:
    """A buffer bound with another element type than the graph's is a type error, and nothing is written."""
    case = base(51, dtype=dtype)
    ins = input_buffers(case, make_inputs(case), make_past(case), provider)
    outs = output_buffers(case, ins, poisoned_cache(case, 64), provider)
    ins[name].element_type = int(element_type)
    with pytest.raises(Exception, match=r"Unexpected input data type"):
        run(cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2), ins, outs)
    assert (outs["output"].read() == 77).all()


@pytest.mark.parametrize("activation", selected().activations)
@pytest.mark.parametrize("granularity", list(Granularity)[1:])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_55(dtype: CacheDtype, granularity: Granularity, activation: FloatName, provider: Provider) -> None:
    """K rows up to 60,000 and products of Q and a channel's scale beyond float16: finite, and right."""
    case = base(55, dtype=dtype, k_quant=granularity, activation=activation, heads=8, kv_heads=1, scale=1e-9)
    inputs, past = make_inputs(case), make_past(case)
    key, value = key_value(inputs)
    key[...] = np.clip(key.astype(np.float32) * 2e4, -6e4, 6e4)
    value[...] = np.clip(value.astype(np.float32) * 2e4, -6e4, 6e4)
    inputs.query[...] *= 3e3
    if activation == "bfloat16":
        for array in (key, value, inputs.query):
            array[...] = round_bfloat16(array)
    assert past.k_scale is not None
    known = past.k_scale[:, :, :20] if granularity is Granularity.PER_TOKEN else past.k_scale
    known *= np.float32(2e4)
    outcome, _ = verify(case, provider, inputs=inputs, past=past)
    assert np.isfinite(outcome.output).all()


def test_report_56_on_cpu(provider: Provider) -> None:
    """bfloat16 activations on the CPU are refused by name, not run as something else."""
    if provider.device != "cpu":
        pytest.skip("the CUDA provider has bfloat16")
    names = ("query", "key", "value")
    shapes = {name: (BFLOAT16, None) for name in names}
    with pytest.raises(Exception, match="GroupQueryAttention"):
        make_session(build_model(BASE, inputs=shapes, outputs={"output": BFLOAT16}), provider)


def test_report_58(provider: Provider) -> None:
    """attention_bias with a quantized cache is rejected by name, with and without a cache that is."""
    for bad in (n for n in NODES if "attention-bias" in n.id):
        model = build_model(bad.case, inputs=bad.inputs)
        with pytest.raises(errors.NotImplemented, match="attention_bias"):
            make_session(model, provider)


@pytest.mark.parametrize("bad", [pytest.param(n, id=n.id) for n in NODES if n.kind == NOT_IMPLEMENTED])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_59(dtype: CacheDtype, bad: Bad, provider: Provider) -> None:
    """Whatever this build cannot run is refused when the session is created, for every format, by name."""
    case = bad.case if bad.case.dtype is None else replace(bad.case, dtype=dtype)
    with pytest.raises(errors.NotImplemented) as caught:
        make_session(build_model(case, attributes=bad.attributes, inputs=bad.inputs, outputs=bad.outputs), provider)
    assert all(word in str(caught.value) for word in bad.words), str(caught.value)


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_60(dtype: CacheDtype, provider: Provider) -> None:
    """D 64, 64 query heads on 8 KV heads, with a sink."""
    for window in (-1, 127):
        verify(base(60, dtype=dtype, heads=64, kv_heads=8, head_size=64, sink=True, window=window), provider)


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_61(dtype: CacheDtype, provider: Provider) -> None:
    """Filled to the last row, then one more step: nothing is written and the output is NaN."""
    stream = Stream.start(base(61, dtype=dtype, capacity=8, totals=(1, 1)), 9, provider)
    for t in range(8):
        stream.feed((t, t), 1, check=t == 7)
    full = stream.cache()
    assert np.isnan(stream.feed((8, 8), 1, check=True)).all()
    assert not stream.stray_writes()
    check_rows(stream.cache().key, full.key, "key")


@pytest.mark.parametrize("seq", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_report_62(seq: int, provider: Provider) -> None:
    """Prompts around block edges: output, and a scale per row."""
    verify(base(62, seq=seq, totals=(seq, seq), total=seq, capacity=300), provider)


@pytest.mark.parametrize("dtype", FORMATS)
def test_report_63(dtype: CacheDtype, provider: Provider) -> None:
    """Past of 0 rows; an entry with no token in a prompt; the shortest window: zeros or numbers, never NaN."""
    prompt = base(63, dtype=dtype, seq=5, totals=(5, 5), total=5, capacity=0, in_place=False)
    empty = base(63, dtype=dtype, seq=5, totals=(0, 5), total=5)
    for case in (prompt, empty, base(63, dtype=dtype, window=1, seq=3, totals=(40, 3))):
        outcome, _ = verify(case, provider)
        assert np.isfinite(outcome.output).all()
    past = make_past(empty)
    outcome = call(empty, make_inputs(empty), past, None, provider)
    assert (outcome.output[0] == 0).all()
    check_rows(outcome.cache.key[:1], past.key[:1], "key")
