"""Misuse: one clear error that names the attribute or tensor, what was given, and, where it helps, what is allowed.

What the node alone shows is rejected when the session is created, the rest when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from onnxruntime.capi import onnxruntime_pybind11_state as errors

from python_tests.op.checks import check_cache
from python_tests.op.gqa_case import Case, make_inputs, make_past, poisoned_cache
from python_tests.op.gqa_model import (
    FLOATS,
    build_model,
    cached_session,
    input_buffers,
    input_types,
    make_session,
    output_buffers,
    read_cache_buffers,
    run,
)
from python_tests.op.providers import Provider, selected
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.step import run_step

NOT_IMPLEMENTED = (errors.NotImplemented,)
# The creation of a session reports a contradiction by whichever stage finds it: inference, lookup or kernel.
CONTRADICTION = (errors.InvalidArgument, errors.InvalidGraph, errors.Fail, errors.RuntimeException)
F32, F16, I64, U8 = (int(t) for t in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.UINT8))
ACTIVATION = FLOATS[selected().activations[0]]
BASE = Case(id="reject", totals=(21, 9), total=64)
STATIC = replace(BASE, k_quant=Granularity.PER_TENSOR, v_quant=Granularity.PER_CHANNEL)
PLAIN = replace(BASE, dtype=None, totals=(21,), capacity=64)
INT4 = replace(BASE, dtype=CacheDtype.INT4)
FP8 = replace(BASE, dtype=CacheDtype.FP8)


@dataclass(frozen=True)
class Bad:
    """A node that must not become a session. words: what the message has to contain."""

    id: str
    words: tuple[str, ...]
    case: Case = BASE
    attributes: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None
    outputs: dict[str, Any] | None = None
    kind: tuple[type[Exception], ...] = CONTRADICTION


BIAS: dict[str, Any] = {"attention_bias": (ACTIVATION, [1, 1, "S", "T"])}
POSITIONS: dict[str, Any] = {"position_ids": (I64, ["B", "S"])}
SINK: dict[str, Any] = {"head_sink": (ACTIVATION, [8])}
ROTARY = {"do_rotary": 1}
NODES = [
    Bad("k-mode", ("k_quant_type", "PER_ROW"), attributes={"k_quant_type": "PER_ROW"}),
    Bad("v-mode", ("v_quant_type", "per_token"), attributes={"v_quant_type": "per_token"}),
    Bad("dtype", ("kv_cache_dtype", "int2"), attributes={"kv_cache_dtype": "int2"}),
    Bad("width-16", ("kv_cache_bit_width", "16"), attributes={"kv_cache_bit_width": 16}),
    Bad("width-4-int8", ("kv_cache_bit_width", "4"), attributes={"kv_cache_bit_width": 4}),
    Bad("width-8-int4", ("kv_cache_bit_width", "8"), INT4, attributes={"kv_cache_bit_width": 8}),
    Bad("width-4-fp8", ("kv_cache_bit_width", "4"), FP8, attributes={"kv_cache_bit_width": 4}),
    Bad("uint8-auto", ("uint8", "kv_cache_dtype"), INT4, attributes={"kv_cache_dtype": None}),
    Bad("int8-as-int4", ("kv_cache_dtype", "int4"), attributes={"kv_cache_dtype": "int4"}),
    Bad("int8-as-fp8", ("kv_cache_dtype", "float8e4m3fn"), attributes={"kv_cache_dtype": "float8e4m3fn"}),
    Bad("uint8-as-int8", ("kv_cache_dtype", "int8"), INT4, attributes={"kv_cache_dtype": "int8"}),
    Bad("fp8-as-int4", ("kv_cache_dtype", "int4"), FP8, attributes={"kv_cache_dtype": "int4"}),
    Bad("k-only", ("k_quant_type", "v_quant_type"), attributes={"v_quant_type": None}),
    Bad("v-only", ("k_quant_type", "v_quant_type"), attributes={"k_quant_type": None}, inputs={"k_scale": None},
        outputs={"present_k_scale": None}),
    Bad("int8-without-mode", ("k_quant_type",), attributes={"k_quant_type": None, "v_quant_type": None},
        inputs={"k_scale": None, "v_scale": None}, outputs={"present_k_scale": None, "present_v_scale": None}),
    Bad("float-with-mode", ("past_key",), inputs={"past_key": (ACTIVATION, None), "past_value": (ACTIVATION, None)},
        outputs={"present_key": ACTIVATION, "present_value": ACTIVATION}),
    Bad("dtype-unquantized", ("kv_cache_dtype",), PLAIN, attributes={"kv_cache_dtype": "int8"}),
    Bad("width-unquantized", ("kv_cache_bit_width",), PLAIN, attributes={"kv_cache_bit_width": 8}),
    Bad("no-k-scale", ("k_scale",), inputs={"k_scale": None}),
    Bad("no-v-scale", ("v_scale",), inputs={"v_scale": None}),
    Bad("no-static-k-scale", ("k_scale",), STATIC, inputs={"k_scale": None}),
    Bad("no-present-k-scale", ("present_k_scale",), outputs={"present_k_scale": None}),
    Bad("no-present-v-scale", ("present_v_scale",), outputs={"present_v_scale": None}),
    Bad("static-present-k-scale", ("present_k_scale",), STATIC, outputs={"present_k_scale": F32}),
    Bad("static-half-scale", ("k_scale", "float"), replace(STATIC, scale_type="float16")),
    Bad("no-past", ("past_key",), inputs={"past_key": None, "past_value": None},
        outputs={"present_key": ACTIVATION, "present_value": ACTIVATION}),
    Bad("window-0", ("local_window_size", "0"), attributes={"local_window_size": 0}),
    Bad("window-minus-2", ("local_window_size", "-2"), attributes={"local_window_size": -2}),
    Bad("softcap", ("softcap", "-1"), attributes={"softcap": -1.0}),
    Bad("heads", ("num_heads", "kv_num_heads", "3"), attributes={"kv_num_heads": 3}),
    Bad("group-65", ("num_heads", "65"), attributes={"num_heads": 65, "kv_num_heads": 1}, kind=NOT_IMPLEMENTED),
    Bad("position-ids", ("position_ids",), inputs=POSITIONS, kind=NOT_IMPLEMENTED),
    Bad("attention-bias", ("attention_bias",), inputs=BIAS, kind=NOT_IMPLEMENTED),
    Bad("output-qk", ("output_qk",), outputs={"output_qk": ACTIVATION}, kind=NOT_IMPLEMENTED),
    Bad("plain-position-ids", ("position_ids",), PLAIN, inputs=POSITIONS, kind=NOT_IMPLEMENTED),
    Bad("plain-attention-bias", ("attention_bias",), PLAIN, inputs=BIAS, kind=NOT_IMPLEMENTED),
    Bad("plain-head-sink", ("head_sink",), PLAIN, inputs=SINK, kind=NOT_IMPLEMENTED),
    Bad("plain-k-scale", ("k_scale",), PLAIN, inputs={"k_scale": (F32, [1])}, kind=NOT_IMPLEMENTED),
    Bad("plain-v-scale", ("v_scale",), PLAIN, inputs={"v_scale": (F32, [1])}, kind=NOT_IMPLEMENTED),
    Bad("plain-output-qk", ("output_qk",), PLAIN, outputs={"output_qk": ACTIVATION}, kind=NOT_IMPLEMENTED),
    Bad("mixed-cache-types", ("T_CACHE",), inputs={"past_value": (U8, None)}),
    Bad("mixed-scale-types", ("T_KV_SCALE",), inputs={"v_scale": (F16, None)}),
]  # fmt: skip


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.id) for bad in NODES])
def test_node_is_rejected(bad: Bad, provider: Provider) -> None:
    """No session comes into being, and the message says why."""
    model = build_model(bad.case, attributes=bad.attributes, inputs=bad.inputs, outputs=bad.outputs)
    with pytest.raises(bad.kind) as caught:
        make_session(model, provider)
    missing = [word for word in bad.words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def feeds_of(case: Case) -> dict[str, Array]:
    """NumPy feeds of a case whose tensors all have a NumPy type."""
    inputs, past = make_inputs(case), make_past(case)
    names: dict[str, Array | None] = {
        "query": inputs.query, "key": inputs.key, "value": inputs.value, "past_key": past.key, "past_value": past.value,
        "seqlens_k": inputs.seqlens_k, "cos_cache": inputs.cos_cache, "sin_cache": inputs.sin_cache,
        "total_sequence_length": np.array([inputs.total_sequence_length], np.int32), "head_sink": inputs.head_sink,
        "k_scale": past.k_scale, "v_scale": past.v_scale,
    }  # fmt: skip
    return {k: v for k, v in names.items() if v is not None}


@dataclass(frozen=True)
class BadFeed:
    """A call that must fail: `tensor` gets `shape` (zeros), or the given value."""

    id: str
    tensor: str
    shape: tuple[int, ...] | None = None
    value: Any = None
    case: Case = BASE
    words: tuple[str, ...] = ()
    kind: type[Exception] = errors.InvalidArgument


BURST = replace(BASE, seq=3, totals=(5, 5))
TURNING = replace(BASE, rotary="half")
FEEDS = [
    BadFeed("query-rank", "query", (2, 1024)),
    BadFeed("query-width", "query", (2, 1, 1023)),
    BadFeed("key-batch", "key", (1, 1, 256)),
    BadFeed("key-rows", "key", (2, 2, 256)),
    BadFeed("key-width", "key", (2, 1, 128)),
    BadFeed("value-rows", "value", (2, 3, 256)),
    BadFeed("value-width", "value", (2, 1, 512)),
    BadFeed("past-key-rank", "past_key", (2, 2, 64)),
    BadFeed("past-key-batch", "past_key", (1, 2, 64, 128)),
    BadFeed("past-key-heads", "past_key", (2, 8, 64, 128)),
    BadFeed("past-key-row", "past_key", (2, 2, 64, 64)),
    BadFeed("past-key-row-int4", "past_key", (2, 2, 64, 128), case=INT4, words=("64",)),
    BadFeed("past-value-capacity", "past_value", (2, 2, 63, 128)),
    BadFeed("past-value-row", "past_value", (2, 2, 64, 120)),
    BadFeed("k-scale-rank", "k_scale", (2, 2, 64)),
    BadFeed("k-scale-capacity", "k_scale", (2, 2, 63, 1)),
    BadFeed("k-scale-transposed", "k_scale", (2, 64, 2, 1)),
    BadFeed("v-scale-batch", "v_scale", (1, 2, 64, 1)),
    BadFeed("v-scale-per-element", "v_scale", (2, 2, 64, 128)),
    BadFeed("k-scale-tensor", "k_scale", (2,), case=STATIC),
    BadFeed("k-scale-tensor-rank", "k_scale", (1, 1), case=STATIC),
    BadFeed("v-scale-channel", "v_scale", (1, 2, 1, 64), case=STATIC),
    BadFeed("v-scale-channel-flat", "v_scale", (256,), case=STATIC),
    BadFeed("seqlens-rank", "seqlens_k", (2, 2)),
    BadFeed("seqlens-scalar", "seqlens_k", ()),
    BadFeed("seqlens-batch", "seqlens_k", (3,)),
    BadFeed("seqlens-row", "seqlens_k", (1, 2)),
    BadFeed("total-count", "total_sequence_length", (2,)),
    BadFeed("total-below-s", "total_sequence_length", value=[2], case=BURST, words=("2",)),
    BadFeed("total-negative", "total_sequence_length", value=[-4], words=("-4",)),
    BadFeed("cos-width", "cos_cache", (65, 65), case=TURNING),
    BadFeed("cos-rank", "cos_cache", (65,), case=TURNING),
    BadFeed("cos-rows", "cos_cache", (63, 64), case=replace(TURNING, cos_rows=63)),
    BadFeed("sin-width", "sin_cache", (65, 32), case=TURNING),
    BadFeed("sin-rows", "sin_cache", (64, 64), case=TURNING),
    BadFeed("sink-heads", "head_sink", (2,), case=replace(BASE, sink=True)),
    BadFeed("sink-rank", "head_sink", (8, 1), case=replace(BASE, sink=True)),
]  # fmt: skip


def free_model(case: Case) -> bytes:
    """The case's model without any input shape, so that the kernel has to check."""
    return build_model(case, inputs={name: (kind, None) for name, (kind, _) in input_types(case).items()})


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.id) for bad in FEEDS])
def test_call_is_rejected(bad: BadFeed, provider: Provider) -> None:
    """INVALID_ARGUMENT that names the tensor and, for a wrong shape, gives it."""
    feeds = feeds_of(bad.case)
    old = feeds[bad.tensor]
    feeds[bad.tensor] = np.zeros(bad.shape, old.dtype) if bad.shape is not None else np.array(bad.value, old.dtype)
    session = cached_session(free_model(bad.case), provider, "ORT_ENABLE_ALL", 2)
    with pytest.raises(bad.kind) as caught:
        session.run(None, feeds)
    shown = ",".join(str(d) for d in bad.shape) if bad.shape else ""
    missing = [word for word in (bad.tensor, shown, *bad.words) if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("head_size", [4, 12, 68, 264, 320, 512])
def test_head_size_is_rejected(head_size: int, provider: Provider) -> None:
    """Multiples of 8 up to 256 are supported; others are named."""
    case = replace(BASE, head_size=head_size)
    session = cached_session(free_model(case), provider, "ORT_ENABLE_ALL", 2)
    with pytest.raises(errors.NotImplemented, match=rf"head_size.*\b{head_size}\b"):
        session.run(None, feeds_of(case))


@pytest.mark.parametrize("present", ["cos_cache", "sin_cache", None])
def test_rotary_needs_both_caches(present: str | None, provider: Provider) -> None:
    """At creation or at the first call, by name."""
    kept: dict[str, Any] = {name: None for name in ("cos_cache", "sin_cache") if name != present}
    model = build_model(TURNING, inputs=kept)
    feeds = {k: v for k, v in feeds_of(TURNING).items() if k not in kept}
    with pytest.raises((errors.InvalidArgument, *CONTRADICTION), match=r"cos_cache.*sin_cache"):
        make_session(model, provider).run(None, feeds)


@pytest.mark.parametrize("missing", ["key", "value"])
def test_key_without_value(missing: str, provider: Provider) -> None:
    """Packed means that both are absent."""
    model = build_model(BASE, inputs={missing: None})
    feeds = {k: v for k, v in feeds_of(BASE).items() if k != missing}
    with pytest.raises((errors.InvalidArgument, *CONTRADICTION), match=r"key.*value"):
        make_session(model, provider).run(None, feeds)


STATE = {"present_key": "past_key", "present_value": "past_value", "present_k_scale": "k_scale",
         "present_v_scale": "v_scale"}  # fmt: skip


@pytest.mark.parametrize("odd", list(STATE))
@pytest.mark.parametrize("shared", [False, True], ids=["one-shared", "one-separate"])
def test_partly_shared_state(odd: str, shared: bool, provider: Provider) -> None:
    """Past and present of K, V and both scales alias together or not at all."""
    case = replace(BASE, id=f"aliases-{odd}")
    ins = input_buffers(case, make_inputs(case), make_past(case), provider)
    same = output_buffers(case, ins, None, provider)
    separate = output_buffers(case, ins, poisoned_cache(case, 64), provider)
    outs = {name: (same if (name == odd) != shared else separate)[name] for name in same}
    before = {name: buffer.read() for name, buffer in (ins | outs).items()}
    with pytest.raises(RuntimeError, match=r"(past|k_scale|v_scale).*share"):
        run(cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2), ins, outs)
    for name in (*STATE, "past_key", "past_value"):
        assert np.array_equal(before[name], (ins | outs)[name].read(), equal_nan=before[name].dtype.kind == "f"), name


@pytest.mark.parametrize("name", ["present_key", "present_v_scale"])
def test_partly_overlapping_state(name: str, provider: Provider) -> None:
    """A present buffer that starts inside its past buffer."""
    case = replace(BASE, id=f"overlap-{name}")
    ins = input_buffers(case, make_inputs(case), make_past(case), provider)
    outs = output_buffers(case, ins, poisoned_cache(case, 64), provider)
    outs[name].pointer = ins[STATE[name]].pointer + 128
    with pytest.raises(RuntimeError, match=f"{STATE[name]}.*overlap"):
        run(cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2), ins, outs)


def test_an_error_leaves_the_session_usable(provider: Provider) -> None:
    """After a rejected call, the next one is right and the cache is as it was before."""
    case = replace(BASE, id="after-error", activation=provider.activations[0])
    session = cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2)
    inputs, past = make_inputs(case), make_past(case)
    ins = input_buffers(case, inputs, past, provider)
    outs = output_buffers(case, ins, None, provider)
    total = ins["total_sequence_length"]
    total.write(np.array([0], np.int32))
    with pytest.raises(RuntimeError, match="total_sequence_length"):
        run(session, ins, outs)
    assert np.array_equal(ins["past_key"].read(), past.key)
    total.write(np.array([64], np.int32))
    run(session, ins, outs)
    expected = run_step(case.operator, inputs, past)
    check_cache(case, read_cache_buffers(ins, outs), expected)
