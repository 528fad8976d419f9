"""Small decoders with GroupQueryAttention, named and wired as exporters do; weights from a seed.

Builder: attention_mask makes the lengths; Q, K and V are separate; rotary in the node. Optimum: the same graph with
position_ids. Hand: packed QKV, seqlens_k and total_sequence_length are graph inputs, `past_key_0` names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

MS = "com.microsoft"
NUMPY = {int(TensorProto.FLOAT): np.float32, int(TensorProto.FLOAT16): np.float16}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """style: builder, optimum or hand. cache: ONNX type of activations and caches. rotary: in the node.

    intermediate: width of a gated MLP, 0 for none. tiled: weights have shapes but no values; for save_tiled.
    """

    style: str = "builder"
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    vocabulary: int = 64
    table: int = 128
    cache: int = int(TensorProto.FLOAT)
    rotary: bool = True
    interleaved: bool = False
    symbolic_row: bool = False
    intermediate: int = 0
    tiled: bool = False
    seed: int = 0


@dataclass
class Parts:
    """A graph under construction."""

    shape: Shape
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def node(self, op: str, ins: list[str], outs: list[str], domain: str = "", **attributes: int) -> None:
        name = f"/{outs[0]}/{op}"
        self.nodes.append(helper.make_node(op, ins, outs, name=name, domain=domain, **attributes))

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def matrix(self, name: str, rows: int, columns: int, scale: float = 1.0) -> str:
        if self.shape.tiled:
            self.weights.append(TensorProto(name=name, data_type=self.shape.cache, dims=[rows, columns]))
            return name
        values = self.rng.standard_normal((rows, columns)) * scale / np.sqrt(rows)
        return self.activation_weight(name, values)

    def activation_weight(self, name: str, values: np.ndarray[Any, Any]) -> str:
        """An initializer of the activations' type."""
        if self.shape.cache != TensorProto.BFLOAT16:
            return self.weight(name, values.astype(NUMPY[self.shape.cache]))
        # The upper half of a float32, cut off: NumPy has no such type.
        raw = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        self.weights.append(helper.make_tensor(name, TensorProto.BFLOAT16, values.shape, raw, raw=True))
        return name


def past_name(shape: Shape, layer: int, what: str) -> str:
    """Graph input of a cache."""
    return f"past_{what}_{layer}" if shape.style == "hand" else f"past_key_values.{layer}.{what}"


def present_name(shape: Shape, layer: int, what: str) -> str:
    """Graph output of a cache."""
    return f"present_{what}_{layer}" if shape.style == "hand" else f"present.{layer}.{what}"


def decoder(shape: Shape) -> ModelProto:
    """input_ids (B, S) int64 to logits (B, S, vocabulary) float."""
    parts = Parts(shape, rng=np.random.default_rng(shape.seed))
    width = shape.heads * shape.head_size
    parts.inputs.append(
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
    )
    lengths, total = _lengths(parts)
    if shape.rotary:
        _rotary_tables(parts)
    parts.node("Gather", [parts.matrix("embedding", shape.vocabulary, width, 8.0), "input_ids"], ["hidden_0"])
    for layer in range(shape.layers):
        _layer(parts, layer, lengths, total)
    last = _norm(parts, f"hidden_{shape.layers}")
    parts.node("MatMul", [last, parts.matrix("head", width, shape.vocabulary)], ["logits_raw"])
    parts.node("Cast", ["logits_raw"], ["logits"], to=int(TensorProto.FLOAT))
    logits = helper.make_tensor_value_info(
        "logits", TensorProto.FLOAT, ["batch_size", "sequence_length", shape.vocabulary]
    )
    graph = helper.make_graph(parts.nodes, "decoder", parts.inputs, [logits, *parts.outputs], parts.weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _lengths(parts: Parts) -> tuple[str, str]:
    """Names of seqlens_k and total_sequence_length, and the nodes that make them of attention_mask."""
    shape = parts.shape
    if shape.style == "hand":
        parts.inputs.append(helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["batch_size"]))
        parts.inputs.append(helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1]))
        return "seqlens_k", "total_sequence_length"
    mask = ["batch_size", "total_sequence_length"]
    parts.inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, mask))
    if shape.style == "optimum":
        ids = ["batch_size", "sequence_length"]
        parts.inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ids))
    one = parts.weight("one", np.array([1], np.int64))
    parts.node("ReduceSum", ["attention_mask", one], ["mask_sum"], keepdims=0)
    parts.node("Sub", ["mask_sum", one], ["mask_last"])
    parts.node("Cast", ["mask_last"], ["seqlens_k"], to=int(TensorProto.INT32))
    parts.node("Shape", ["attention_mask"], ["mask_shape"])
    index = parts.weight("index_1", np.array(1, np.int64))
    parts.node("Gather", ["mask_shape", index], ["total_length"], axis=0)
    parts.node("Cast", ["total_length"], ["total_seq_len"], to=int(TensorProto.INT32))
    return "seqlens_k", "total_seq_len"


def _rotary_tables(parts: Parts) -> None:
    shape = parts.shape
    half = shape.head_size // 2
    angles = np.outer(np.arange(shape.table), 10000.0 ** (-np.arange(half) / half))
    parts.activation_weight("cos_cache", np.cos(angles))
    parts.activation_weight("sin_cache", np.sin(angles))


def _layer(parts: Parts, layer: int, lengths: str, total: str) -> None:
    shape = parts.shape
    width, kv_width = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    hidden = _norm(parts, f"hidden_{layer}")
    if shape.style == "hand":
        parts.node("MatMul", [hidden, parts.matrix(f"w_qkv_{layer}", width, width + 2 * kv_width)], [f"qkv_{layer}"])
        ins = [f"qkv_{layer}", "", ""]
    else:
        ins = [f"{w}_{layer}" for w in ("q", "k", "v")]
        for name, columns in zip(ins, (width, kv_width, kv_width), strict=True):
            parts.node("MatMul", [hidden, parts.matrix(f"w_{name}", width, columns)], [name])
    row: str | int = "kv_cache_dim" if shape.symbolic_row else shape.head_size
    for what in ("key", "value"):
        name, present = past_name(shape, layer, what), present_name(shape, layer, what)
        past = ["batch_size", shape.kv_heads, "past_sequence_length", row]
        parts.inputs.append(helper.make_tensor_value_info(name, shape.cache, past))
        dims = ["batch_size", shape.kv_heads, "total_sequence_length", row]
        parts.outputs.append(helper.make_tensor_value_info(present, shape.cache, dims))
    ins += [past_name(shape, layer, "key"), past_name(shape, layer, "value"), lengths, total]
    attributes: dict[str, Any] = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads}
    if shape.rotary:
        ins += ["cos_cache", "sin_cache"]
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(shape.interleaved)}
    outs = [f"attention_{layer}", present_name(shape, layer, "key"), present_name(shape, layer, "value")]
    parts.nodes.append(
        helper.make_node("GroupQueryAttention", ins, outs, f"/layers.{layer}/attn/GQA", domain=MS, **attributes)
    )
    parts.node("MatMul", [outs[0], parts.matrix(f"w_o_{layer}", width, width, 0.5)], [f"projected_{layer}"])
    sums = [f"hidden_{layer}", f"projected_{layer}"]
    if shape.intermediate:
        parts.node("Add", sums, [f"middle_{layer}"])
        sums = [f"middle_{layer}", _mlp(parts, layer)]
    parts.node("Add", sums, [f"hidden_{layer + 1}"])


def _norm(parts: Parts, name: str) -> str:
    """onnxruntime's own operator in ONNX's domain, as exporters write it."""
    scale = parts.activation_weight(f"{name}_scale", np.ones(parts.shape.heads * parts.shape.head_size))
    parts.node("SimplifiedLayerNormalization", [name, scale], [f"{name}_norm"], axis=-1, stash_type=1)
    return f"{name}_norm"


def _mlp(parts: Parts, layer: int) -> str:
    """SiLU(gate) * up, and down."""
    width, inner = parts.shape.heads * parts.shape.head_size, parts.shape.intermediate
    norm = _norm(parts, f"middle_{layer}")
    gate, up, act, product, down = (f"{what}_{layer}" for what in ("gate", "up", "act", "product", "down"))
    parts.node("MatMul", [norm, parts.matrix(f"w_{gate}", width, inner)], [gate])
    parts.node("MatMul", [norm, parts.matrix(f"w_{up}", width, inner)], [up])
    parts.node("Sigmoid", [gate], [act])
    parts.node("Mul", [act, gate], [f"silu_{layer}"])
    parts.node("Mul", [f"silu_{layer}", up], [product])
    parts.node("MatMul", [product, parts.matrix(f"w_{down}", inner, width, 0.5)], [down])
    return down


def save(model: ModelProto, path: Path, *, external: bool = False) -> Path:
    """Write the model; external: all but the smallest weights in <name>.data beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        copy = ModelProto()
        copy.CopyFrom(model)
        data = f"{path.name}.data"
        onnx.save(
            copy, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=data, size_threshold=256
        )
    else:
        onnx.save(model, str(path))
    return path


def save_sparse(shape: Shape, path: Path, padding: int) -> Path:
    """A decoder whose external data has `padding` more bytes, a hole in the file that takes no disk.

    The hole holds one tensor that an Identity node reads, so that nothing drops it while the graph is loaded.
    """
    model = decoder(shape)
    hole = TensorProto(name="hole", data_type=TensorProto.INT8, dims=[padding])
    model.graph.initializer.append(hole)
    model.graph.node.append(helper.make_node("Size", ["hole"], ["hole_size"], name="/hole/Size"))
    model.graph.output.append(helper.make_tensor_value_info("hole_size", TensorProto.INT64, []))
    data = path.with_name(path.name + ".data")
    path.parent.mkdir(parents=True, exist_ok=True)
    with data.open("wb") as file:
        for tensor in model.graph.initializer:
            if 0 < len(tensor.raw_data) < 256:
                continue
            offset = -(-file.tell() // 4096) * 4096
            length = padding if tensor is hole or tensor.name == "hole" else len(tensor.raw_data)
            file.seek(offset)
            if tensor.name == "hole":
                file.truncate(offset + padding)
                file.seek(0, 2)
            else:
                file.write(tensor.raw_data)
                tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data.name), ("offset", offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    onnx.save(model, str(path))
    return path


LLAMA_8B = Shape(
    layers=32, heads=32, kv_heads=8, head_size=128, vocabulary=128256, table=131072, intermediate=14336,
    cache=int(TensorProto.FLOAT16), tiled=True,
)  # fmt: skip


def save_tiled(shape: Shape, path: Path, *, scale: float = 0.02, block: int = 1 << 23, hollow: bool = False) -> Path:
    """A decoder of any size in one data file as long as its largest weight: every weight is that file's first bytes.

    The file repeats one block of `block` normal float16 numbers, times `scale`. On a device every weight has memory of
    its own. hollow: one block and then a hole, where nothing is to be computed. Returns the path.
    """
    model = decoder(shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.with_name(path.name + ".data")
    empty = [t for t in model.graph.initializer if not t.raw_data]
    lengths = {t.name: 2 * int(np.prod(t.dims, dtype=np.int64)) for t in empty}
    longest = max(lengths.values())
    values = (np.random.default_rng(shape.seed).standard_normal(block) * scale).astype(np.float16).tobytes()
    with data.open("wb") as file:
        for at in range(0, len(values) if hollow else longest, len(values)):
            file.write(values[: longest - at])
        file.truncate(longest)
    for tensor in empty:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", data.name), ("offset", 0), ("length", lengths[tensor.name])):
            tensor.external_data.add(key=key, value=str(value))
    onnx.save(model, str(path))
    return path
