# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Where a tensor of an ONNX graph comes from and who reads it, nested graphs included. Weights are not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

CONTRIB_DOMAIN = "com.microsoft"
GQA = "GroupQueryAttention"


@dataclass(frozen=True)
class Reader:
    """A node that reads a tensor. slot: which of its inputs. inside: the nested graph's owner, empty at top level."""

    node: NodeProto
    slot: int
    inside: str = ""


def node_label(node: NodeProto) -> str:
    """The node's name, or what identifies a node without one."""
    return node.name or f"(unnamed {node.op_type} writing {next(filter(None, node.output), '?')})"


def attributes(node: NodeProto) -> dict[str, Any]:
    """Attribute values by name, strings as str."""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def input_at(node: NodeProto, slot: int) -> str:
    """Name of an input; empty where the node has none there."""
    return node.input[slot] if slot < len(node.input) else ""


def output_at(node: NodeProto, slot: int) -> str:
    """Name of an output; empty where the node has none there."""
    return node.output[slot] if slot < len(node.output) else ""


def nested_graphs(node: NodeProto) -> Iterator[GraphProto]:
    """Bodies of If, Loop and Scan."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def walk(graph: GraphProto, inside: str = "") -> Iterator[tuple[NodeProto, str]]:
    """Every node with the label of the outermost node that holds its graph."""
    for node in graph.node:
        yield node, inside
        for body in nested_graphs(node):
            yield from walk(body, inside or node_label(node))


def dims(info: ValueInfoProto | None) -> list[int | str] | None:
    """Dimensions: a number, or the name of a free one (empty where it has none). None without a shape."""
    if info is None or not info.type.tensor_type.HasField("shape"):
        return None
    shape = info.type.tensor_type.shape
    return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in shape.dim]


@dataclass
class GraphIndex:
    """Producers, readers, declared types and initializers of a model's main graph by tensor name."""

    graph: GraphProto
    producers: dict[str, NodeProto] = field(default_factory=dict)
    readers: dict[str, list[Reader]] = field(default_factory=dict)
    inputs: dict[str, ValueInfoProto] = field(default_factory=dict)
    outputs: dict[str, ValueInfoProto] = field(default_factory=dict)
    infos: dict[str, ValueInfoProto] = field(default_factory=dict)
    initializers: dict[str, TensorProto] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelProto) -> GraphIndex:
        """Index of the model's main graph; nested graphs count as readers only."""
        graph = model.graph
        index = cls(graph)
        index.initializers = {t.name: t for t in graph.initializer}
        index.inputs = {i.name: i for i in graph.input if i.name not in index.initializers}
        index.outputs = {o.name: o for o in graph.output}
        index.infos = {**{i.name: i for i in graph.value_info}, **index.inputs, **index.outputs}
        for node in graph.node:
            index.producers |= {name: node for name in node.output if name}
        for node, inside in walk(graph):
            for slot, name in enumerate(node.input):
                if name:
                    index.readers.setdefault(name, []).append(Reader(node, slot, inside))
        return index

    def names(self) -> set[str]:
        """Every tensor name that is taken, in nested graphs too."""
        taken = set(self.infos) | set(self.initializers)
        for node, _ in walk(self.graph):
            taken |= {*node.input, *node.output}
        return taken

    def constant(self, name: str) -> NDArray[Any] | None:
        """A small constant as a NumPy array, whether initializer or Constant node; None if it is anything else."""
        tensor = self.initializers.get(name)
        if tensor is None and (node := self.producers.get(name)) is not None and node.op_type == "Constant":
            value = attributes(node).get("value")
            tensor = value if isinstance(value, TensorProto) else None
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        return np.asarray(numpy_helper.to_array(tensor))

    def width(self, name: str) -> int:
        """Last dimension of an activation: as declared, or as the weights that made it have it; 0 if not known."""
        for _ in range(8):
            shape = dims(self.infos.get(name))
            if shape and isinstance(shape[-1], int) and shape[-1] > 0:
                return shape[-1]
            node = self.producers.get(name)
            if node is None:
                return 0
            if node.op_type == "MatMulNBits":
                return int(attributes(node).get("N", 0))
            if node.op_type in ("MatMul", "Gemm"):
                weight = self.initializers.get(node.input[1])
                turned = node.op_type == "Gemm" and attributes(node).get("transB", 0)
                return (weight.dims[0] if turned else weight.dims[-1]) if weight is not None else 0
            if node.op_type in ("Add", "Cast", "Identity", "RotaryEmbedding"):
                # A bias may stand first: go on with the operand that is not a weight.
                name = next((n for n in node.input if n and n not in self.initializers), "")
                continue
            return 0
        return 0

    def hides_last_dimension(self, name: str, shape_reader: NodeProto) -> bool:
        """True if a Shape of `name` is used for anything else than its first three dimensions."""
        attrs = attributes(shape_reader)
        if 0 <= attrs.get("start", 0) and 0 < attrs.get("end", 99) <= 3:
            return False
        for reader in self.readers.get(shape_reader.output[0], []):
            picked = self.constant(input_at(reader.node, 1)) if reader.node.op_type == "Gather" else None
            if picked is None or not all(i in (0, 1, 2, -2, -3, -4) for i in picked.reshape(-1)):
                return True
        return shape_reader.output[0] in self.outputs
