"""What the converter refuses, by node name and reason, and that it has then changed nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.transformers.kv_cache_convert import CacheChoice, quantize_caches
from onnxruntime.transformers.kv_cache_layers import CacheModelError
from onnxruntime.transformers.kv_cache_model import read_decoder

from python_tests.transformers.models import MS, Shape, decoder

NODE = "/layers.1/attn/GQA"


def gqa(model: ModelProto, layer: int = 1) -> NodeProto:
    """The attention node of a layer."""
    return next(n for n in model.graph.node if n.name == f"/layers.{layer}/attn/GQA")


def refused(model: ModelProto, choice: CacheChoice | None = None) -> str:
    """The text of the refusal; the model is as it was."""
    before = model.SerializeToString()
    with pytest.raises(CacheModelError) as caught:
        quantize_caches(model, choice or CacheChoice(cache_dtype="int8"))
    assert model.SerializeToString() == before
    return str(caught.value)


def append(model: ModelProto, op: str, ins: list[str], outs: list[str], name: str, domain: str = "") -> NodeProto:
    """A node more."""
    model.graph.node.append(helper.make_node(op, ins, outs, name, domain=domain))
    return model.graph.node[-1]


def other_domain(model: ModelProto) -> None:
    gqa(model).domain = "ai.example"


def shared_past(model: ModelProto) -> None:
    gqa(model, 2).input[3] = "past_key_values.1.key"


def past_read_elsewhere(model: ModelProto) -> None:
    append(model, "Identity", ["past_key_values.1.key"], ["copy"], "/probe/Identity")


def present_read_elsewhere(model: ModelProto) -> None:
    append(model, "Identity", ["present.1.value"], ["copy"], "/probe/Identity")


def cast_past(model: ModelProto) -> None:
    append(model, "Cast", ["past_key_values.1.key"], ["cast_past"], "/past/Cast")
    gqa(model).input[3] = "cast_past"


def no_past(model: ModelProto) -> None:
    gqa(model).input[3] = gqa(model).input[4] = ""


def present_not_an_output(model: ModelProto) -> None:
    kept = [o for o in model.graph.output if o.name != "present.1.key"]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def multi_head(model: ModelProto) -> None:
    gqa(model).op_type = "MultiHeadAttention"


def attention_bias(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1, 1, 1), np.float32), "bias"))
    gqa(model).input.extend(["", "bias"])


def output_qk(model: ModelProto) -> None:
    gqa(model).output.append("qk")


def window_cache(model: ModelProto) -> None:
    gqa(model).attribute.append(helper.make_attribute("sliding_window_cache", 1))


def name_taken(model: ModelProto) -> None:
    append(model, "Identity", ["input_ids"], ["past_key_values.1.key_scale"], "/probe/Identity")


def inside_a_branch(model: ModelProto) -> None:
    node = NodeProto()
    node.CopyFrom(gqa(model))
    for i, name in enumerate(node.output):
        node.output[i] = f"inner_{name}"
    body = helper.make_graph([node], "body", [], [helper.make_tensor_value_info(node.output[0], 1, None)])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    branch = helper.make_node("If", ["yes"], [gqa(model).output[0]], "/merged/If", then_branch=body, else_branch=body)
    model.graph.node.remove(gqa(model))
    model.graph.node.append(branch)


def two_types(model: ModelProto) -> None:
    next(i for i in model.graph.input if i.name == "past_key_values.1.value").type.tensor_type.elem_type = 10


def double_cache(model: ModelProto) -> None:
    for side in ("key", "value"):
        info = next(i for i in model.graph.input if i.name == f"past_key_values.1.{side}")
        info.type.tensor_type.elem_type = TensorProto.DOUBLE


REFUSED: dict[str, tuple[Callable[[ModelProto], None], str, str]] = {
    "other domain": (other_domain, NODE, "domain is ai.example"),
    "two nodes read one cache": (shared_past, NODE, "is shared: read by"),
    "past is read elsewhere": (past_read_elsewhere, NODE, "/probe/Identity"),
    "present is read elsewhere": (present_read_elsewhere, NODE, "/probe/Identity"),
    "past is computed": (cast_past, NODE, "made by /past/Cast"),
    "no past": (no_past, NODE, "has no past_key"),
    "present is not an output": (present_not_an_output, NODE, "not a graph output"),
    "another attention": (multi_head, "past_key_values.1.key", "not the cache of a GroupQueryAttention"),
    "attention_bias": (attention_bias, NODE, "attention_bias (bias)"),
    "output_qk": (output_qk, NODE, "output_qk"),
    "cache as long as the window": (window_cache, NODE, "sliding_window_cache"),
    "a name that is taken": (name_taken, NODE, "past_key_values.1.key_scale is taken"),
    "inside a branch": (inside_a_branch, NODE, "inside /merged/If"),
    "K and V of two types": (two_types, NODE, "different element types"),
    "a cache of doubles": (double_cache, NODE, "DOUBLE"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_reason(case: str) -> None:
    edit, node, reason = REFUSED[case]
    model = decoder(Shape())
    edit(model)
    lines = refused(model).splitlines()
    assert any(line.startswith(f"{node}: ") and reason in line for line in lines), lines


@pytest.mark.parametrize("case", ["other domain", "another attention", "past is computed"])
def test_a_layer_that_is_kept_does_not_stand_in_the_way(case: str) -> None:
    model = decoder(Shape())
    REFUSED[case][0](model)
    if case == "another attention":
        for side in ("key", "value"):
            assert f"past_key_values.1.{side}" in {p.node for p in read_decoder(model).problems}
    done = quantize_caches(model, CacheChoice(cache_dtype="int8", keep_layers=frozenset({1})))
    assert done.changed == (0, 2)


def test_every_problem_is_named_at_once() -> None:
    model = decoder(Shape())
    attention_bias(model)
    gqa(model, 0).attribute.append(helper.make_attribute("sliding_window_cache", 1))
    text = refused(model)
    assert "/layers.0/attn/GQA: " in text
    assert f"{NODE}: " in text


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(head_size=12), "multiples of 8"),
        (Shape(head_size=264, heads=2, kv_heads=1), "up to 256"),
        (Shape(heads=66, kv_heads=1, head_size=8), "up to 64"),
    ],
)
def test_shapes_that_no_quantized_cache_has(shape: Shape, reason: str) -> None:
    assert reason in refused(decoder(shape))


def test_int4_with_a_reader_of_the_last_dimension() -> None:
    model = decoder(Shape())
    append(model, "Shape", ["past_key_values.1.key"], ["past_shape"], "/past/Shape")
    index = numpy_helper.from_array(np.array(2, np.int64), "two")
    model.graph.initializer.append(index)
    append(model, "Gather", ["past_shape", "two"], ["past_length"], "/past/Gather")
    quantize_caches(decoder(Shape()), CacheChoice(cache_dtype="int4"))
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.array(3, np.int64), "two"))
    assert "last dimension of past_key_values.1.key" in refused(model, CacheChoice(cache_dtype="int4"))
    model.graph.initializer[-1].CopyFrom(index)
    quantize_caches(model, CacheChoice(cache_dtype="int4"))


def test_a_quantized_model_is_not_converted_again() -> None:
    model = decoder(Shape())
    quantize_caches(model, CacheChoice(cache_dtype="int8"))
    text = refused(model, CacheChoice(cache_dtype="int4"))
    assert text.count("already") == len(text.splitlines()) == 3


def test_layers_that_are_not_there_cannot_be_kept() -> None:
    text = refused(decoder(Shape()), CacheChoice(cache_dtype="int8", keep_layers=frozenset({1, 31})))
    assert text == "layer 31: cannot be kept: the model has no such layer, only 0 to 2"


def test_nothing_left_to_convert() -> None:
    assert "left to convert" in refused(
        decoder(Shape()), CacheChoice(cache_dtype="int8", keep_layers=frozenset({0, 1, 2}))
    )


def test_a_model_that_hides_its_head_size() -> None:
    model = decoder(Shape(symbolic_row=True))
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.output[0][:2] in ("q_", "k_", "v_"):
            node.op_type, node.domain = "Projection", MS
    assert "--head-size" in refused(model)
    done = quantize_caches(model, CacheChoice(cache_dtype="int8", head_size=16))
    assert {layer.head_size for layer in done.after.layers} == {16}
