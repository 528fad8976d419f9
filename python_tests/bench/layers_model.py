"""The benchmark's model: a GroupQueryAttention node a layer, with shared activations and a cache for each."""

from __future__ import annotations

from typing import Any

from onnx import NodeProto, ValueInfoProto, helper

from python_tests.bench.gqa_case import PRESENT, Case, Tensor

INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
    "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale",
)  # fmt: skip
OUTPUTS = ("output", "present_key", "present_value", "output_qk", "present_k_scale", "present_v_scale")


def attributes(case: Case) -> dict[str, Any]:
    """Of a node. kv_cache_bit_width says what a uint8 cache is in patched and in upstream releases alike."""
    m = case.model
    found: dict[str, Any] = {"num_heads": m.heads, "kv_num_heads": m.kv_heads, "do_rotary": 1}
    if case.quantized:
        found |= {"k_quant_type": case.k_mode, "v_quant_type": case.v_mode}
        found["kv_cache_bit_width"] = 4 if case.cache == "int4" else 8
    return found | ({"local_window_size": m.window} if m.window >= 0 else {})


def _node(case: Case, layer: int) -> NodeProto:
    shared, state = case.shared_inputs(), case.state()
    names = [f"{n}_{layer}" if n in state else n if n in shared else "" for n in INPUTS]
    present = {PRESENT[n] for n in state}
    results = [f"{n}_{layer}" if n == "output" or n in present else "" for n in OUTPUTS]
    while not names[-1]:
        names.pop()
    while not results[-1]:
        results.pop()
    return helper.make_node(
        "GroupQueryAttention", names, results, f"layer_{layer}", domain="com.microsoft", **attributes(case)
    )


def _info(name: str, tensor: Tensor) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.element, list(tensor.shape))


def build(case: Case, layers: int) -> bytes:
    """The serialized model. Tensors of layer i end in _i."""
    ins = [_info(name, tensor) for name, tensor in case.shared_inputs().items()]
    outs = []
    for layer in range(layers):
        outs.append(_info(f"output_{layer}", case.output))
        for name, tensor in case.state().items():
            ins.append(_info(f"{name}_{layer}", tensor))
            outs.append(_info(f"{PRESENT[name]}_{layer}", tensor))
    graph = helper.make_graph([_node(case, layer) for layer in range(layers)], "layers", ins, outs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
