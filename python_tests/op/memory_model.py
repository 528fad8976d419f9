"""A decoder of several layers whose weights, cache and scales are all bound by the caller: what is left is scratch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from python_tests.op.cuda_case import cuda_case
from python_tests.op.gqa_case import Case
from python_tests.op.gqa_model import INPUTS, OUTPUTS, input_types, node_attributes, output_types, slots
from python_tests.reference.format import CacheDtype, row_bytes

FORMATS: dict[str, CacheDtype | None] = {"fp16": None} | {str(dtype): dtype for dtype in CacheDtype}
STATE = {
    "past_key": "present_key", "past_value": "present_value", "k_scale": "present_k_scale",
    "v_scale": "present_v_scale",
}  # fmt: skip
_HALF = int(TensorProto.FLOAT16)


@dataclass(frozen=True)
class Decoder:
    """Sizes of Llama 3 8B's attention: per layer packed Q, K, V from the hidden state, attention, and back."""

    format: str
    layers: int
    tokens: int
    hidden: int = 4096

    @property
    def case(self) -> Case:
        """One layer's node."""
        case = cuda_case(
            "decoder", dtype=CacheDtype.INT8, heads=32, kv_heads=8, head_size=128, packed=True, capacity=self.tokens,
            totals=(self.tokens,), total=self.tokens,
        )  # fmt: skip
        return replace(case, dtype=FORMATS[self.format])

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each state tensor of a layer."""
        case = self.case
        row = case.head_size if case.dtype is None else row_bytes(case.dtype, case.head_size)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("past_key", "past_value"), (1, 8, self.tokens, row))
        if case.dtype is not None:
            shapes |= dict.fromkeys(("k_scale", "v_scale"), (1, 8, self.tokens, 1))
        return shapes

    @property
    def weight_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape of each weight of a layer."""
        case = self.case
        packed = (case.heads + 2 * case.kv_heads) * case.head_size
        return {"qkv": (self.hidden, packed), "out": (case.heads * case.head_size, self.hidden)}

    def element_type(self, name: str) -> int:
        """ONNX type of a state tensor."""
        return input_types(self.case)[name][0]

    def element_size(self, name: str) -> int:
        """Bytes of an element of a state tensor."""
        return 4 if "scale" in name else 2 if self.format == "fp16" else 1

    @property
    def cache_bytes(self) -> int:
        """Codes of all layers, or their 16-bit values."""
        return self._state_bytes("past")

    @property
    def scale_bytes(self) -> int:
        """Scales of all layers."""
        return self._state_bytes("scale")

    def _state_bytes(self, kind: str) -> int:
        shapes = self.state_shapes.items()
        return self.layers * sum(prod(shape) * self.element_size(name) for name, shape in shapes if kind in name)

    @property
    def weight_bytes(self) -> int:
        """Weights of all layers."""
        return self.layers * sum(2 * prod(shape) for shape in self.weight_shapes.values())

    def model(self) -> bytes:
        """The serialized model. Tensors of layer i end in _i; the hidden state goes from "x" to "y"."""
        nodes: list[NodeProto] = []
        ins = [_info("x", _HALF, (1, 1, self.hidden)), _info("seqlens_k", int(TensorProto.INT32), (1,)),
               _info("total_sequence_length", int(TensorProto.INT32), (1,))]  # fmt: skip
        outs = [_info("y", _HALF, (1, 1, self.hidden))]
        for i in range(self.layers):
            nodes += self._layer(i)
            ins += [_info(f"{name}_{i}", _HALF, shape) for name, shape in self.weight_shapes.items()]
            for name, shape in self.state_shapes.items():
                ins.append(_info(f"{name}_{i}", self.element_type(name), shape))
                outs.append(_info(f"{STATE[name]}_{i}", self.element_type(name), shape))
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph(nodes, "decoder", ins, outs)
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())

    def _layer(self, i: int) -> list[NodeProto]:
        shared = {"seqlens_k", "total_sequence_length"}
        sources = [n and (n if n in shared else f"{n}_{i}") for n in slots(INPUTS, input_types(self.case))]
        targets = [n and f"{n}_{i}" for n in slots(OUTPUTS, output_types(self.case))]
        before, after = (f"h_{i}" if i else "x", f"h_{i + 1}" if i + 1 < self.layers else "y")
        attributes = node_attributes(self.case)
        return [
            helper.make_node("MatMul", [before, f"qkv_{i}"], [f"query_{i}"]),
            helper.make_node(
                "GroupQueryAttention", sources, targets, f"gqa_{i}", domain="com.microsoft", **attributes
            ),
            helper.make_node("MatMul", [f"output_{i}", f"out_{i}"], [f"a_{i}"]),
            helper.make_node("Add", [before, f"a_{i}"], [after]),
        ]  # fmt: skip


def _info(name: str, element_type: int, shape: tuple[int, ...]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type, shape)
