# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Rewrites the GroupQueryAttention nodes of a decoder for a quantized KV cache, in a graph without its weights.

PER_TOKEN scales become graph inputs and outputs named after the caches: past_key_values.0.key gets
past_key_values.0.key_scale, present.0.key gets present.0.key_scale. Static scales become initializers of the input's
name.
"""

from __future__ import annotations

import re
from collections.abc import MutableSequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from .kv_cache_calibration import Calibration
from .kv_cache_graph import GQA, GraphIndex, attributes, input_at, node_label, output_at
from .kv_cache_layers import (
    GRANULARITIES,
    MAX_GROUP,
    MAX_HEAD_SIZE,
    PER_TOKEN,
    QUANTIZED_CACHES,
    CacheLayer,
    CacheModelError,
    CacheSide,
    DecoderModel,
    Problem,
)
from .kv_cache_model import read_decoder

SCALE_TYPES = {"float32": int(TensorProto.FLOAT), "float16": int(TensorProto.FLOAT16)}
_FLOAT8_IR_VERSION = 9
# What input 9 on means on a node that this release's operator does not run.
_REFUSED_INPUTS = {9: "position_ids", 10: "attention_bias", 14: "q_norm_weight", 15: "k_norm_weight"}


@dataclass(frozen=True, kw_only=True)
class CacheChoice:
    """What the caches are to be.

    cache_dtype: int8, float8e4m3fn or int4. k_granularity, v_granularity: PER_TOKEN, PER_CHANNEL or PER_TENSOR.
    scale_dtype: float32 or float16, of PER_TOKEN scales; static scales are float32. keep_layers: indices of layers that
    stay as they are. fp8_as_uint8: hold fp8 in uint8 tensors, which NumPy can make. head_size: D, where the model does
    not tell it.
    """

    cache_dtype: str
    k_granularity: str = PER_TOKEN
    v_granularity: str = PER_TOKEN
    scale_dtype: str = "float32"
    keep_layers: frozenset[int] = frozenset()
    fp8_as_uint8: bool = False
    head_size: int = 0

    @property
    def granularities(self) -> tuple[str, str]:
        """Of K, of V."""
        return self.k_granularity, self.v_granularity

    @property
    def static(self) -> bool:
        """Whether K or V needs measured scales."""
        return any(g != PER_TOKEN for g in self.granularities)

    @property
    def element_type(self) -> int:
        """ONNX type of the cache tensors."""
        if self.cache_dtype == "int8":
            return int(TensorProto.INT8)
        as_float8 = self.cache_dtype == "float8e4m3fn" and not self.fp8_as_uint8
        return int(TensorProto.FLOAT8E4M3FN if as_float8 else TensorProto.UINT8)

    def check(self) -> None:
        """Raises ValueError for values that do not go together."""
        msg = ""
        if self.cache_dtype not in QUANTIZED_CACHES or not set(self.granularities) <= set(GRANULARITIES):
            msg = f"{self.cache_dtype}, {self.granularities}: not a cache of {QUANTIZED_CACHES} with {GRANULARITIES}"
        elif self.scale_dtype not in SCALE_TYPES:
            msg = f"scales of {self.scale_dtype}; they are float32 or float16"
        elif self.static and self.scale_dtype != "float32":
            msg = (
                "both scales of a node have one type, and static ones are float32: float16 needs PER_TOKEN for K and V"
            )
        elif self.fp8_as_uint8 and self.cache_dtype != "float8e4m3fn":
            msg = f"fp8_as_uint8 means nothing for a cache of {self.cache_dtype}"
        if msg:
            raise ValueError(msg)


@dataclass(frozen=True)
class Conversion:
    """What was changed. before, after: the caches by layer. added_inputs, added_outputs, initializers: names."""

    before: DecoderModel
    after: DecoderModel
    changed: tuple[int, ...]
    kept: tuple[int, ...]
    added_inputs: tuple[str, ...]
    added_outputs: tuple[str, ...]
    initializers: tuple[str, ...]


def quantize_caches(model: ModelProto, choice: CacheChoice, calibration: Calibration | None = None) -> Conversion:
    """Edit the model in place. Raises CacheModelError, with every node that stands against it, before any edit."""
    choice.check()
    before = read_decoder(model, choice.head_size)
    graph = GraphIndex.of(model)
    nodes = {node_label(node): node for node in model.graph.node if node.op_type == GQA}
    layers = [la for la in before.layers if la.index not in choice.keep_layers]
    problems = [*_unkept(before, choice, nodes), *_unknown_layers(before, choice)]
    for layer in layers:
        problems += [Problem(layer.node, reason) for reason in refusals(graph, nodes[layer.node], layer, choice)]
    scales = {}
    if choice.static and not problems:
        problems += [] if calibration else [Problem("static scales", "PER_TENSOR and PER_CHANNEL need a calibration")]
        if calibration:
            scales = {la.index: calibration.of(la) for la in layers}
    if not layers and not problems:
        problems.append(Problem("the model", "no GroupQueryAttention node is left to convert"))
    if problems:
        raise CacheModelError(problems)
    for layer in layers:
        _set_attributes(nodes[layer.node], choice)
        for position, side in enumerate(layer.sides):
            _retype(graph, layer, side, choice)
            granularity = choice.granularities[position]
            if granularity == PER_TOKEN:
                _add_scale_cache(model, graph, nodes[layer.node], side, position, choice)
            else:
                scale = scales[layer.index][position].scale(granularity, choice.cache_dtype)
                model.graph.initializer.append(
                    numpy_helper.from_array(np.ascontiguousarray(scale), scale_name(side.past))
                )
                _set_slot(nodes[layer.node].input, 12 + position, scale_name(side.past))
    if choice.element_type == TensorProto.FLOAT8E4M3FN:
        model.ir_version = max(model.ir_version, _FLOAT8_IR_VERSION)
    return _conversion(model, before, layers, choice)


def scale_name(cache: str) -> str:
    """The scale's name beside a cache's: past_key_values.0.key_scale, present.0.value_scale."""
    return f"{cache}_scale"


def _conversion(model: ModelProto, before: DecoderModel, layers: list[CacheLayer], choice: CacheChoice) -> Conversion:
    sides = [(side, choice.granularities[i]) for la in layers for i, side in enumerate(la.sides)]
    fed = [side for side, granularity in sides if granularity == PER_TOKEN]
    changed = tuple(la.index for la in layers)
    return Conversion(
        before, read_decoder(model, choice.head_size), changed,
        tuple(la.index for la in before.layers if la.index not in changed),
        tuple(scale_name(side.past) for side in fed), tuple(scale_name(side.present) for side in fed),
        tuple(scale_name(side.past) for side, granularity in sides if granularity != PER_TOKEN),
    )  # fmt: skip


def _unkept(before: DecoderModel, choice: CacheChoice, nodes: dict[str, NodeProto]) -> list[Problem]:
    """Problems of caches that are not named in keep_layers."""

    def index(problem: Problem) -> int:
        node = nodes.get(problem.node)
        # A cache that is computed on its way has its number in the other names at least.
        names = [input_at(node, 3), output_at(node, 1), input_at(node, 4)] if node else [problem.node]
        numbers = [found[-1] for name in names if (found := re.findall(r"\d+", name))]
        return int(numbers[0]) if numbers else -1

    return [p for p in before.problems if index(p) not in choice.keep_layers]


def _unknown_layers(before: DecoderModel, choice: CacheChoice) -> list[Problem]:
    known = {la.index for la in before.layers}
    missing = sorted(i for i in choice.keep_layers if i not in known) if not before.problems else []
    have = f"0 to {max(known)}" if known == set(range(len(known))) and known else ", ".join(map(str, sorted(known)))
    return [
        Problem(f"layer {i}", f"cannot be kept: the model has no such layer, only {have or 'none'}") for i in missing
    ]


def refusals(graph: GraphIndex, node: NodeProto, layer: CacheLayer, choice: CacheChoice) -> list[str]:
    """Why this node cannot have such a cache; empty if it can."""
    if layer.quantized:
        return [f"its cache is {layer.cache_dtype} already; convert the float model instead"]
    reasons = []
    if layer.head_size % 8 or not 0 < layer.head_size <= MAX_HEAD_SIZE:
        reasons.append(f"head size {layer.head_size}; a quantized cache takes multiples of 8 up to {MAX_HEAD_SIZE}")
    if layer.num_heads % layer.kv_heads or layer.num_heads // layer.kv_heads > MAX_GROUP:
        reasons.append(
            f"{layer.num_heads} query heads on {layer.kv_heads} KV heads; up to {MAX_GROUP} each are supported"
        )
    for slot in range(9, len(node.input)):
        if node.input[slot] and slot != 11:
            what = _REFUSED_INPUTS.get(slot, f"input {slot}")
            reasons.append(
                f"it uses {what} ({node.input[slot]}), which a quantized cache of this release does not take"
            )
    if output_at(node, 3):
        reasons.append(f"it writes output_qk ({node.output[3]}), which a quantized cache does not make")
    if attributes(node).get("sliding_window_cache", 0):
        reasons.append("its cache is as long as its window (sliding_window_cache); export with a full-length cache")
    taken = graph.names()
    for name in (scale_name(n) for side in layer.sides for n in (side.past, side.present)):
        if name in taken:
            reasons.append(f"the name {name} is taken")
    if choice.cache_dtype == "int4":
        for side in layer.sides:
            for reader in graph.readers.get(side.past, []):
                if reader.node.op_type == "Shape" and graph.hides_last_dimension(side.past, reader.node):
                    label = node_label(reader.node)
                    reasons.append(
                        f"{label} (Shape) reads the last dimension of {side.past}, which int4 halves; use int8 or fp8"
                    )
    return reasons


def _set_attributes(node: NodeProto, choice: CacheChoice) -> None:
    """Later releases know quantization types and bit width; kv_cache_dtype is written only where it is needed."""
    values: dict[str, str | int] = {"k_quant_type": choice.k_granularity, "v_quant_type": choice.v_granularity}
    values["kv_cache_bit_width"] = 4 if choice.cache_dtype == "int4" else 8
    if choice.fp8_as_uint8:
        values["kv_cache_dtype"] = choice.cache_dtype
    kept = [a for a in node.attribute if a.name not in (*values, "kv_cache_dtype")]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(k, v) for k, v in values.items())])


def _retype(graph: GraphIndex, layer: CacheLayer, side: CacheSide, choice: CacheChoice) -> None:
    row = (layer.head_size + 1) // 2 if choice.cache_dtype == "int4" else layer.head_size
    for info in (graph.inputs[side.past], graph.outputs[side.present]):
        tensor = info.type.tensor_type
        tensor.elem_type = choice.element_type
        if len(tensor.shape.dim) == 4:
            tensor.shape.dim[3].dim_value = row


def _add_scale_cache(
    model: ModelProto, graph: GraphIndex, node: NodeProto, side: CacheSide, position: int, choice: CacheChoice
) -> None:
    past = _scale_info(graph.inputs[side.past], scale_name(side.past), SCALE_TYPES[choice.scale_dtype])
    present = _scale_info(graph.outputs[side.present], scale_name(side.present), SCALE_TYPES[choice.scale_dtype])
    model.graph.input.append(past)
    model.graph.output.append(present)
    _set_slot(node.input, 12 + position, past.name)
    _set_slot(node.output, 4 + position, present.name)


def _scale_info(cache: ValueInfoProto, name: str, kind: int) -> ValueInfoProto:
    """(B, Hkv, C, 1) with the cache's own first three dimensions."""
    info = ValueInfoProto()
    info.CopyFrom(cache)
    info.name = name
    tensor = info.type.tensor_type
    tensor.elem_type = kind
    if len(tensor.shape.dim) == 4:
        tensor.shape.dim[3].dim_value = 1
    else:
        tensor.ClearField("shape")
    return info


def _set_slot(names: MutableSequence[str], slot: int, name: str) -> None:
    """Put a name at an index of node.input or node.output, with empty names before it where there are none."""
    row = list(names)
    row += [""] * (slot + 1 - len(row))
    row[slot] = name
    del names[:]
    names.extend(row)
