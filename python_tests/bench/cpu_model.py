"""The benchmark's model: one GroupQueryAttention node."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto, helper

from python_tests.bench.cpu_case import FLOATS, HEAD_SIZE, HEADS, KV_HEADS, QUANTIZED, Setup, scale_shape


def build(setup: Setup, tokens: int) -> bytes:
    """The model. kv_cache_bit_width says what a uint8 cache is in patched and in later upstream releases alike."""
    element, _ = FLOATS[setup.activation]
    cache = QUANTIZED[setup.cache][0] if setup.quantized else element
    row = QUANTIZED[setup.cache][2] if setup.quantized else HEAD_SIZE
    info = helper.make_tensor_value_info
    kv, out = KV_HEADS * HEAD_SIZE, HEADS * HEAD_SIZE
    ins = [info(n, element, [1, 1, w]) for n, w in (("query", out), ("key", kv), ("value", kv))]
    ins += [info(n, cache, [1, KV_HEADS, tokens, row]) for n in ("past_key", "past_value")]
    ins += [info("seqlens_k", TensorProto.INT32, [1]), info("total_sequence_length", TensorProto.INT32, [1])]
    outs = [info("output", element, [1, 1, out])]
    outs += [info(n, cache, [1, KV_HEADS, tokens, row]) for n in ("present_key", "present_value")]
    names, results = [i.name for i in ins], [o.name for o in outs]
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    if setup.quantized:
        ins += [info(n, TensorProto.FLOAT, scale_shape(setup.mode, tokens)) for n in ("k_scale", "v_scale")]
        names += [""] * 5 + ["k_scale", "v_scale"]
        attributes |= {"k_quant_type": setup.mode, "v_quant_type": setup.mode}
        attributes["kv_cache_bit_width"] = 4 if setup.cache == "int4" else 8
        if setup.mode == "PER_TOKEN":
            scales = ("present_k_scale", "present_v_scale")
            outs += [info(n, TensorProto.FLOAT, scale_shape(setup.mode, tokens)) for n in scales]
            results += ["", *scales]
    node = helper.make_node("GroupQueryAttention", names, results, domain="com.microsoft", **attributes)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "bench", ins, outs), opset_imports=opsets, ir_version=9)
    return bytes(model.SerializeToString())
