"""Writes the small decoder as an ONNX model: `python -m python_tests.transformers.small_decoder.export model.onnx`.

Inputs input_ids (B, S) and attention_mask (B, total), both int64; past_key_values.N.key and .value; output logits
(B, S, 256) and present.N.key and .value: the names that exporters give them. Without options the caches have the
activations' type, as in a model that a converter gets.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from python_tests.reference.format import QMAX, CacheDtype, Granularity
from python_tests.transformers.small_decoder import text
from python_tests.transformers.small_decoder.network import NORM_EPSILON, Array, Shape, Weights, forward, rotary_tables
from python_tests.transformers.small_decoder.train import WEIGHTS

CACHE_TYPES = {
    CacheDtype.INT8: int(TensorProto.INT8), CacheDtype.FP8: int(TensorProto.FLOAT8E4M3FN),
    CacheDtype.INT4: int(TensorProto.UINT8),
}  # fmt: skip
POSITIONS = 4096


@dataclass(frozen=True)
class CacheKind:
    """A quantized cache: its format, and where the scales of K and V come from."""

    dtype: CacheDtype
    k: Granularity = Granularity.PER_TOKEN
    v: Granularity = Granularity.PER_TOKEN


def load_weights(path: Path = WEIGHTS) -> Weights:
    """The committed weights, float32."""
    with np.load(path) as stored:
        return {name: stored[name].astype(np.float32) for name in stored.files}


def largest_values(weights: Weights, shape: Shape, length: int = 512) -> dict[tuple[int, str], Array]:
    """Largest magnitudes over eight pieces of the training text, by (layer, "k" or "v"): (1, Hkv, 1, D) float32."""
    ids = text.tokens(text.training_text())
    starts = np.linspace(0, len(ids) - length, 8).astype(int)
    saved = forward(weights, shape, np.stack([ids[s : s + length] for s in starts]))[1]
    return {(i, n): np.abs(saved[i][n]).max((0, 2))[None, :, None, :] for i in range(shape.layers) for n in "kv"}


def static_scales(largest: Mapping[tuple[int, str], Array], kind: CacheKind) -> dict[tuple[int, str], Array]:
    """Scales with which the largest values just fit: PER_TENSOR (1,), PER_CHANNEL (1, Hkv, 1, D), float32."""
    scales = {}
    for (layer, side), values in largest.items():
        whole = (kind.k if side == "k" else kind.v) is Granularity.PER_TENSOR
        fit = values.max().reshape(1) if whole else values
        scales[layer, side] = np.asarray(fit / np.float32(QMAX[kind.dtype]), np.float32)
    return scales


class _Graph:
    """Nodes and initializers under construction; activations have one type."""

    def __init__(self, activation: int) -> None:
        self.activation = activation
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def constant(self, name: str, array: Array) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def weight(self, name: str, array: Array) -> str:
        return self.constant(name, array.astype(helper.tensor_dtype_to_np_dtype(self.activation)))

    def node(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"/{output}", **attributes))
        return output


def export(
    weights: Weights,
    shape: Shape,
    activation: int = int(TensorProto.FLOAT),
    cache: CacheKind | Sequence[CacheKind | None] | None = None,
    *,
    scales: Mapping[tuple[int, str], Array] | None = None,
    positions: int = POSITIONS,
) -> ModelProto:
    """The model. cache: of all layers, or of each; None is a float cache of the activations' type.

    scales: of the static sides of quantized caches, by (layer, "k" or "v"). positions: rows of the rotary tables.
    """
    caches = [cache] * shape.layers if cache is None or isinstance(cache, CacheKind) else list(cache)
    g = _Graph(activation)
    names = _lengths(g)
    names += [g.weight(n, t) for n, t in zip(("cos_cache", "sin_cache"), rotary_tables(shape, positions), strict=True)]
    x = g.node("Gather", [g.weight("embedding", weights["embedding"]), "input_ids"], "embedded")
    ins: list[ValueInfoProto] = []
    outs: list[ValueInfoProto] = []
    for i in range(shape.layers):
        prefix = f"layers.{i}"
        normed = _norm(g, x, f"{prefix}.attention_norm", weights[f"{i}.attention_norm"])
        sides = [
            g.node("MatMul", [normed, g.weight(f"{prefix}.{n}", weights[f"{i}.{n}"])], f"{prefix}.{n}_out")
            for n in "qkv"
        ]
        layer_ins, layer_outs = _attention(g, i, sides, names, shape, caches[i], scales or {})
        ins, outs = ins + layer_ins, outs + layer_outs
        projected = g.node(
            "MatMul", [f"{prefix}.attended", g.weight(f"{prefix}.o", weights[f"{i}.o"])], f"{prefix}.o_out"
        )
        x = g.node("Add", [x, projected], f"{prefix}.after_attention")
        normed = _norm(g, x, f"{prefix}.mlp_norm", weights[f"{i}.mlp_norm"])
        up = g.node("MatMul", [normed, g.weight(f"{prefix}.up", weights[f"{i}.up"])], f"{prefix}.up_out")
        relu = g.node("Relu", [up], f"{prefix}.relu")
        square = g.node("Mul", [relu, relu], f"{prefix}.square")
        down = g.node("MatMul", [square, g.weight(f"{prefix}.down", weights[f"{i}.down"])], f"{prefix}.down_out")
        x = g.node("Add", [x, down], f"{prefix}.out")
    g.node(
        "MatMul", [_norm(g, x, "final_norm", weights["final_norm"]), g.weight("head", weights["embedding"].T)], "logits"
    )
    tokens = [
        _info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        _info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    logits = _info("logits", activation, ["batch_size", "sequence_length", shape.vocabulary])
    graph = helper.make_graph(g.nodes, "small_decoder", tokens + ins, [logits, *outs], g.initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _info(name: str, kind: int, dims: list[str | int]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def _norm(g: _Graph, x: str, name: str, weight: Array) -> str:
    return g.node("LayerNormalization", [x, g.weight(name, weight)], f"{name}_out", epsilon=NORM_EPSILON)


def _lengths(g: _Graph) -> list[str]:
    """seqlens_k and total_sequence_length of all layers, from the mask."""
    total = g.node(
        "ReduceSum", ["attention_mask", g.constant("one_axis", np.array([1], np.int64))], "tokens", keepdims=0
    )
    last = g.node("Sub", [total, g.constant("one", np.array(1, np.int64))], "tokens_less_one")
    seqlens = g.node("Cast", [last], "seqlens_k", to=TensorProto.INT32)
    columns = g.node("Gather", [g.node("Shape", ["attention_mask"], "mask_shape"), "one_axis"], "mask_columns")
    return [seqlens, g.node("Cast", [columns], "total_sequence_length", to=TensorProto.INT32)]


def _attention(
    g: _Graph, layer: int, sides: list[str], names: list[str], shape: Shape, cache: CacheKind | None,
    scales: Mapping[tuple[int, str], Array],
) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:  # fmt: skip
    """The node of one layer; returns its graph inputs and outputs."""
    attributes: dict[str, Any] = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads, "do_rotary": 1}
    kind = CACHE_TYPES[cache.dtype] if cache else g.activation
    row = shape.head_size // 2 if cache and cache.dtype is CacheDtype.INT4 else shape.head_size
    past = [f"past_key_values.{layer}.{n}" for n in ("key", "value")]
    present = [f"present.{layer}.{n}" for n in ("key", "value")]
    ins = [_info(n, kind, ["batch_size", shape.kv_heads, "past_sequence_length", row]) for n in past]
    outs = [_info(n, kind, ["batch_size", shape.kv_heads, "present_sequence_length", row]) for n in present]
    inputs, outputs = [*sides, *past, *names], [f"layers.{layer}.attended", *present]
    if cache is not None:
        attributes |= {"kv_cache_dtype": str(cache.dtype), "k_quant_type": str(cache.k), "v_quant_type": str(cache.v)}
        inputs += [""] * (12 - len(inputs))
        outputs.append("")
        for side, name, granularity in (("k", "key", cache.k), ("v", "value", cache.v)):
            if granularity is not Granularity.PER_TOKEN:
                inputs.append(g.constant(f"layers.{layer}.{side}_scale", scales[layer, side]))
                outputs.append("")
                continue
            inputs.append(f"past_key_values.{layer}.{name}_scale")
            outputs.append(f"present.{layer}.{name}_scale")
            dims: list[str | int] = ["batch_size", shape.kv_heads]
            ins.append(_info(inputs[-1], TensorProto.FLOAT, [*dims, "past_sequence_length", 1]))
            outs.append(_info(outputs[-1], TensorProto.FLOAT, [*dims, "present_sequence_length", 1]))
        while not outputs[-1]:
            outputs.pop()
    name = f"/layers.{layer}/GroupQueryAttention"
    g.nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, name, domain="com.microsoft", **attributes))
    return ins, outs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("output", type=Path)
    parser.add_argument("--activation", choices=("float32", "float16"), default="float32")
    parser.add_argument("--cache", choices=tuple(map(str, CacheDtype)), help="default: as the activations")
    for side in "kv":
        choices = [str(n) for n in Granularity if n is not Granularity.NONE]
        parser.add_argument(f"--{side}-granularity", choices=choices, default="PER_TOKEN")
    arguments = parser.parse_args()
    weights, shape, kind = load_weights(), Shape(), None
    if arguments.cache:
        kind = CacheKind(
            CacheDtype(arguments.cache), Granularity(arguments.k_granularity), Granularity(arguments.v_granularity)
        )
    activation = TensorProto.FLOAT if arguments.activation == "float32" else TensorProto.FLOAT16
    scales = static_scales(largest_values(weights, shape), kind) if kind else None
    model = export(weights, shape, int(activation), kind, scales=scales)
    arguments.output.write_bytes(model.SerializeToString())
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
