"""A model of one GroupQueryAttention node, and calls of it through IoBinding on guarded memory."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from python_tests.op.gqa_case import Case
from python_tests.op.guarded import GuardedArray
from python_tests.op.providers import CPU, FloatName, Provider
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.step import Cache, Inputs

INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
    "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale",
)  # fmt: skip
OUTPUTS = ("output", "present_key", "present_value", "output_qk", "present_k_scale", "present_v_scale")
FLOATS: dict[FloatName, int] = {
    "float32": int(TensorProto.FLOAT), "float16": int(TensorProto.FLOAT16), "bfloat16": int(TensorProto.BFLOAT16),
}  # fmt: skip
Shape: TypeAlias = list[str | int] | None
InputTypes: TypeAlias = dict[str, tuple[int, Shape]]


def cache_element_type(case: Case) -> int:
    """ONNX element type of past_key."""
    if case.dtype is None:
        return FLOATS[case.activation]
    if case.dtype is CacheDtype.FP8:
        return int(TensorProto.UINT8 if case.fp8_as_uint8 else TensorProto.FLOAT8E4M3FN)
    return int(TensorProto.INT8 if case.dtype is CacheDtype.INT8 else TensorProto.UINT8)


def node_attributes(case: Case) -> dict[str, Any]:
    """Attributes of the node; a feature that is off leaves its attribute out."""
    attributes: dict[str, Any] = {"num_heads": case.heads, "kv_num_heads": case.kv_heads}
    if case.dtype is not None:
        attributes |= {"k_quant_type": str(case.k_quant), "v_quant_type": str(case.v_quant)}
        if case.dtype is CacheDtype.INT4 or case.fp8_as_uint8:
            attributes["kv_cache_dtype"] = str(case.dtype)
    if case.rotary != "none":
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(case.rotary == "interleaved")}
    optional = {
        "local_window_size": (case.window, -1),
        "softcap": (case.softcap, 0.0),
        "smooth_softmax": (int(case.smooth), 0),
        "scale": (case.scale, 0.0),
    }
    return attributes | {name: value for name, (value, default) in optional.items() if value != default}


def input_types(case: Case) -> InputTypes:
    """Element type and shape of every graph input. Dimensions are free, so that the kernel has to check them.

    Only the width of the activations is fixed: 1.21.0 infers a packed query of free width to an output of width 0.
    """
    activation, cache = FLOATS[case.activation], cache_element_type(case)
    width, kv_width = case.heads * case.head_size, case.kv_heads * case.head_size
    if case.packed:
        types: InputTypes = {"query": (activation, ["B", "S", width + 2 * kv_width])}
    else:
        types = {"query": (activation, ["B", "S", width])}
        types |= {name: (activation, ["B", "S", kv_width]) for name in ("key", "value")}
    row: list[str | int] = ["B", "Hkv", "C", "R"]
    types |= {"past_key": (cache, [*row]), "past_value": (cache, [*row])}
    types["seqlens_k"] = (int(TensorProto.INT32), ["B", 1] if case.seqlens_2d else ["B"])
    types["total_sequence_length"] = (int(TensorProto.INT32), [1])
    if case.rotary != "none":
        types |= {"cos_cache": (activation, ["rows", "half"]), "sin_cache": (activation, ["rows", "half"])}
    if case.sink:
        types["head_sink"] = (activation, ["N"])
    if case.dtype is not None:
        for name, granularity in (("k_scale", case.k_quant), ("v_scale", case.v_quant)):
            rank = 1 if granularity is Granularity.PER_TENSOR else 4
            dims: list[str | int] = [f"{name}_{i}" for i in range(rank)]
            types[name] = (FLOATS[case.scale_type], dims)
    return types


def output_types(case: Case) -> dict[str, int]:
    """Element type of every graph output."""
    types = {"output": FLOATS[case.activation]}
    types |= dict.fromkeys(OUTPUTS[1:3], cache_element_type(case))
    if case.dtype is not None:
        sides = (("present_k_scale", case.k_quant), ("present_v_scale", case.v_quant))
        types |= {name: FLOATS[case.scale_type] for name, g in sides if g is Granularity.PER_TOKEN}
    return types


def slots(names: tuple[str, ...], present: Container[str]) -> list[str]:
    """Node inputs or outputs in order, absent ones empty, without a tail of empty names."""
    row = [name if name in present else "" for name in names]
    while row and not row[-1]:
        row.pop()
    return row


def build_model(
    case: Case,
    *,
    attributes: dict[str, Any] | None = None,
    inputs: Mapping[str, tuple[int, Shape] | None] | None = None,
    outputs: dict[str, int | None] | None = None,
    typed_outputs: bool = True,
    constants: Mapping[str, Array] | None = None,
) -> bytes:
    """The serialized model of a case. Overrides replace or add by name; None removes an attribute, input or output.

    typed_outputs False leaves the types of graph outputs to the runtime's inference. constants: inputs that are
    initializers.
    """
    constants = constants or {}
    attrs = {k: v for k, v in (node_attributes(case) | (attributes or {})).items() if v is not None}
    ins = {k: v for k, v in ({**input_types(case), **(inputs or {})}).items() if v is not None}
    outs = {k: v for k, v in (output_types(case) | (outputs or {})).items() if v is not None}
    node = helper.make_node(
        "GroupQueryAttention", slots(INPUTS, ins), slots(OUTPUTS, outs), domain="com.microsoft", name="gqa", **attrs
    )
    graph_inputs = [helper.make_tensor_value_info(k, *ins[k]) for k in INPUTS if k in ins and k not in constants]
    graph_outputs = [helper.make_tensor_value_info(k, outs[k], None) for k in OUTPUTS if k in outs]
    if not typed_outputs:
        for info in graph_outputs:
            info.ClearField("type")
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "gqa", graph_inputs, graph_outputs, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def make_session(
    model: bytes, provider: Provider = CPU, *, level: str = "ORT_ENABLE_ALL", threads: int = 2
) -> ort.InferenceSession:
    """A session that neither falls back to another provider nor prints warnings."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "0" if provider.device == "cpu" else "1")
    return ort.InferenceSession(model, options, providers=[provider.session_entry])


@lru_cache(maxsize=64)
def cached_session(model: bytes, provider: Provider, level: str, threads: int) -> ort.InferenceSession:
    """One session for all cases that share a model."""
    return make_session(model, provider, level=level, threads=threads)


Buffers = dict[str, GuardedArray]


# Bytes that the buffer of a name and element size is moved away from a 64-byte boundary.
Misalign: TypeAlias = Callable[[str, int], int]


def aligned(name: str, element_size: int) -> int:
    """Every buffer on a 64-byte boundary."""
    return 0


def input_buffers(case: Case, inputs: Inputs, past: Cache, provider: Provider, misalign: Misalign = aligned) -> Buffers:
    """Guarded device memory for every graph input of the case."""
    arrays: dict[str, Array | None] = {
        "query": inputs.query, "key": inputs.key, "value": inputs.value, "seqlens_k": inputs.seqlens_k,
        "past_key": past.key, "past_value": past.value, "k_scale": past.k_scale, "v_scale": past.v_scale,
        "total_sequence_length": np.array([inputs.total_sequence_length], np.int32),
        "cos_cache": inputs.cos_cache, "sin_cache": inputs.sin_cache, "head_sink": inputs.head_sink,
    }  # fmt: skip
    buffers = {}
    for name, (element_type, _) in input_types(case).items():
        array = arrays[name]
        assert array is not None, name
        where = CPU if name == "total_sequence_length" else provider
        buffers[name] = guarded(name, array, element_type, where, misalign)
    return buffers


def guarded(name: str, array: Array, element_type: int, provider: Provider, misalign: Misalign) -> GuardedArray:
    """The array in memory of the provider's device."""
    size = 2 if element_type == TensorProto.BFLOAT16 else array.itemsize
    return GuardedArray(array, element_type, provider.device, misalign(name, size), provider.device_id)


def output_buffers(
    case: Case, ins: Buffers, present: Cache | None, provider: Provider, misalign: Misalign = aligned
) -> Buffers:
    """Memory of the outputs: the caches of `ins` again when present is None, else separate copies of present."""
    shape = (case.batch, case.seq, case.heads * case.head_size)
    types = output_types(case)
    poison = np.full(shape, 77, case.activation_type)
    buffers = {"output": guarded("output", poison, types["output"], provider, misalign)}
    for name in [n for n in OUTPUTS[1:] if n in types]:
        source = name.replace("present", "past") if name in OUTPUTS[1:3] else name.removeprefix("present_")
        if present is None:
            buffers[name] = ins[source]
        else:
            array = {"past_key": present.key, "past_value": present.value, "k_scale": present.k_scale}.get(source)
            array = present.v_scale if array is None else array
            assert array is not None, name
            buffers[name] = guarded(name, array, types[name], provider, misalign)
    return buffers


def bind(session: ort.InferenceSession, ins: Buffers, outs: Buffers) -> ort.IOBinding:
    """A binding of raw pointers into the buffers, which must outlive it."""
    binding = session.io_binding()
    for calls, buffers in ((binding.bind_input, ins), (binding.bind_output, outs)):
        for name, x in buffers.items():
            calls(name, x.device, x.device_id, x.element_type, list(x.shape), x.pointer)
    return binding


def run(session: ort.InferenceSession, ins: Buffers, outs: Buffers) -> None:
    """Run with raw pointers into the buffers. Errors are onnxruntime's own exceptions."""
    session.run_with_iobinding(bind(session, ins, outs))


@dataclass(frozen=True)
class Outcome:
    """What a call left: output (B, S, N, D), the cache in present's buffers, past's buffers, all buffers by name."""

    output: Array
    cache: Cache
    past: Cache
    buffers: Buffers


def read_cache_buffers(ins: Buffers, outs: Buffers) -> Cache:
    """present's rows and scales; a static scale is read where it is: in the inputs."""
    scales = [outs.get(f"present_{n}", ins.get(n)) for n in ("k_scale", "v_scale")]
    arrays = [None if s is None else s.read() for s in scales]
    return Cache(outs["present_key"].read(), outs["present_value"].read(), arrays[0], arrays[1])


def call(
    case: Case,
    inputs: Inputs,
    past: Cache,
    present: Cache | None,
    provider: Provider = CPU,
    *,
    level: str = "ORT_ENABLE_ALL",
    threads: int = 2,
    misalign: Misalign = aligned,
) -> Outcome:
    """One call of the case's node. present None: past and present are the same memory."""
    session = cached_session(build_model(case), provider, level, threads)
    ins = input_buffers(case, inputs, past, provider, misalign)
    outs = output_buffers(case, ins, present, provider, misalign)
    run(session, ins, outs)
    output = outs["output"].read().reshape(case.batch, case.seq, case.heads, case.head_size)
    before = [None if (s := ins.get(n)) is None else s.read() for n in ("k_scale", "v_scale")]
    past_after = Cache(ins["past_key"].read(), ins["past_value"].read(), before[0], before[1])
    named = {f"in:{k}": v for k, v in ins.items()} | {f"out:{k}": v for k, v in outs.items()}
    return Outcome(output, read_cache_buffers(ins, outs), past_after, named)
