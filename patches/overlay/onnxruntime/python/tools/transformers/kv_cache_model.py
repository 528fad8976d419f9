# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""What a decoder model says about its KV caches: one `CacheLayer` per GroupQueryAttention node.

    decoder = read_decoder("model.onnx")        # weights are not read; external data need not be there
    for layer in decoder.layers:
        layer.key.past, layer.key.present       # graph input and output, the same buffer at run time
        layer.cache_shape(batch, capacity)      # (B, Hkv, C, row)
        layer.key.scale, layer.key.present_scale, layer.scale_shape(layer.key, batch, capacity)

Works on models with float caches, with quantized ones, and with both. Operator and byte format: docs/format.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, TensorProto

from .kv_cache_graph import (
    CONTRIB_DOMAIN,
    GQA,
    GraphIndex,
    Reader,
    attributes,
    dims,
    input_at,
    node_label,
    output_at,
    walk,
)
from .kv_cache_layers import (
    FLOAT_CACHES,
    NONE,
    CacheLayer,
    CacheModelError,
    CacheSide,
    DecoderModel,
    Problem,
)


def load_graph(path: str | Path) -> ModelProto:
    """The model without its external data, whatever that weighs. Raises FileNotFoundError, CacheModelError."""
    if not Path(path).is_file():
        msg = f"{path}: there is no such file"
        raise FileNotFoundError(msg)
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as exc:
        raise CacheModelError([Problem(str(path), f"not an ONNX model: {exc}")]) from exc


def read_decoder(model: str | Path | ModelProto, head_size: int = 0) -> DecoderModel:
    """The caches of a model or of the file that holds it. head_size: D, for a model that does not tell it.

    Never raises for what a cache looks like: see DecoderModel.problems.
    """
    proto = model if isinstance(model, ModelProto) else load_graph(model)
    graph = GraphIndex.of(proto)
    layers: list[CacheLayer] = []
    problems: list[Problem] = []
    for node, inside in walk(proto.graph):
        if node.op_type != GQA:
            continue
        found = _read_layer(graph, node, inside, len(layers), head_size)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            layers.append(found)
    problems += _other_caches(graph, proto)
    if len({layer.index for layer in layers}) < len(layers):
        layers = [CacheLayer(**{**vars(layer), "index": i}) for i, layer in enumerate(layers)]
    layers.sort(key=lambda layer: layer.index)
    bound = {n for la in layers for s in la.sides for n in (s.past, s.present, s.scale, s.present_scale)}
    gqa = next((n for n in proto.graph.node if n.op_type == GQA), NodeProto())
    lengths, total = (n if (n := input_at(gqa, slot)) in graph.inputs else "" for slot in (5, 6))
    shown = [
        {n: (i.type.tensor_type.elem_type, dims(i) or []) for n, i in infos.items() if n not in bound}
        for infos in (graph.inputs, graph.outputs)
    ]
    return DecoderModel(tuple(layers), tuple(problems), lengths, total, *shown)


def _read_layer(graph: GraphIndex, node: NodeProto, inside: str, position: int, head_size: int) -> CacheLayer | Problem:
    label = node_label(node)
    attrs = attributes(node)
    if node.domain != CONTRIB_DOMAIN:
        return Problem(
            label, f"its domain is {node.domain or 'ai.onnx'}, not {CONTRIB_DOMAIN}: another operator of that name"
        )
    if inside:
        return Problem(
            label, f"it lies inside {inside}, so its cache is not an input of the graph; export without branches"
        )
    for slot, what in ((3, "past_key"), (4, "past_value")):
        if not input_at(node, slot):
            return Problem(label, f"it has no {what}: a model of the prompt alone, without a cache")
        if input_at(node, slot) not in graph.inputs:
            maker = graph.producers.get(input_at(node, slot))
            source = f"made by {node_label(maker)} ({maker.op_type})" if maker else "a constant"
            return Problem(label, f"{what} is {source}, not a graph input that a buffer can be bound to")
        if output_at(node, slot - 2) not in graph.outputs:
            return Problem(label, f"present_{what[5:]} is not a graph output that a buffer can be bound to")
    heads, kv_heads = int(attrs.get("num_heads", 0)), int(attrs.get("kv_num_heads", 0))
    element_type = graph.inputs[node.input[3]].type.tensor_type.elem_type
    if graph.inputs[node.input[4]].type.tensor_type.elem_type != element_type:
        return Problem(label, "past_key and past_value have different element types")
    cache_dtype = _cache_dtype(attrs, element_type)
    if not cache_dtype or heads < 1 or kv_heads < 1:
        kind = TensorProto.DataType.Name(element_type)
        return Problem(
            label, f"a cache of {kind} with num_heads {heads}, kv_num_heads {kv_heads} is none that it can have"
        )
    shape = dims(graph.inputs[node.input[3]]) or []
    size = _head_size(graph, node, shape, heads, kv_heads, cache_dtype) or head_size
    if not size:
        return Problem(label, "the model does not tell the head size; give it by --head-size")
    number = re.findall(r"\d+", node.input[3])
    rotary, rotary_size, rotary_rows = _rotary(graph, node, size)
    return CacheLayer(
        index=int(number[-1]) if number else position,
        node=label,
        key=_side(graph, node, attrs, 0),
        value=_side(graph, node, attrs, 1),
        cache_dtype=cache_dtype,
        element_type=element_type,
        num_heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        capacity=shape[2] if len(shape) == 4 else "",
        rotary=rotary,
        rotary_size=rotary_size,
        rotary_rows=rotary_rows,
    )


def _side(graph: GraphIndex, node: NodeProto, attrs: dict[str, object], side: int) -> CacheSide:
    granularity = str(attrs.get(("k_quant_type", "v_quant_type")[side], NONE))
    past, present = node.input[3 + side], node.output[1 + side]
    if granularity == NONE:
        return CacheSide(past, present)
    scale = input_at(node, 12 + side)
    info = graph.inputs.get(scale)
    stored = graph.initializers.get(scale)
    kind = info.type.tensor_type.elem_type if info else stored.data_type if stored else int(TensorProto.FLOAT)
    return CacheSide(past, present, granularity, scale, kind, info is not None, output_at(node, 4 + side))


def _cache_dtype(attrs: dict[str, object], element_type: int) -> str:
    if element_type in FLOAT_CACHES:
        return FLOAT_CACHES[element_type]
    if element_type == TensorProto.UINT8:
        named = str(attrs.get("kv_cache_dtype", "auto"))
        if named == "auto":
            return "int4" if attrs.get("kv_cache_bit_width", 0) == 4 else ""
        return named if named in ("int4", "float8e4m3fn") else ""
    return {int(TensorProto.INT8): "int8", int(TensorProto.FLOAT8E4M3FN): "float8e4m3fn"}.get(element_type, "")


def _head_size(
    graph: GraphIndex, node: NodeProto, shape: list[int | str], heads: int, kv_heads: int, cache_dtype: str
) -> int:
    row = shape[3] if len(shape) == 4 else ""
    if isinstance(row, int) and row > 0:
        return row * 2 if cache_dtype == "int4" else row
    packed = not input_at(node, 2)
    for name, parts in (
        (node.input[0], heads + 2 * kv_heads if packed else heads),
        (input_at(node, 1), kv_heads),
        (node.output[0], heads),
    ):
        width = graph.width(name) if name else 0
        if width and width % parts == 0:
            return width // parts
    return 0


def _rotary(graph: GraphIndex, node: NodeProto, head_size: int) -> tuple[int, int, int]:
    """rotary, rotary_size and rotary_rows of a layer."""
    attrs = attributes(node)
    if not attrs.get("do_rotary", 0):
        return 0, 0, 0
    table = graph.initializers.get(input_at(node, 7))
    rows, half = table.dims if table is not None and len(table.dims) == 2 else (0, 0)
    if not half:
        declared = (dims(graph.infos.get(input_at(node, 7))) or [0])[-1]
        half = declared if isinstance(declared, int) else 0
    return (2 if attrs.get("rotary_interleaved", 0) else 1), min(2 * half, head_size), rows


def _other_caches(graph: GraphIndex, proto: ModelProto) -> list[Problem]:
    """Caches that are read by more than one node or by another operator than GroupQueryAttention."""
    problems = [
        Problem(f.name, f"GroupQueryAttention inside the function {f.name}: inline functions first")
        for f in proto.functions
        if any(n.op_type == GQA for n in f.node)
    ]

    def read_by(readers: list[Reader]) -> str:
        return ", ".join(f"{node_label(r.node)} ({r.node.op_type})" for r in readers) or "nobody"

    for name, info in graph.inputs.items():
        readers = graph.readers.get(name, [])
        caches = [r for r in readers if r.node.op_type == GQA and r.slot in (3, 4)]
        scales = [r for r in readers if r.node.op_type == GQA and r.slot in (12, 13)]
        if caches:
            others = [r for r in readers if r not in caches and r.node.op_type != "Shape"]
            if len(caches) > 1 or others:
                problems.append(
                    Problem(node_label(caches[0].node), f"its cache {name} is shared: read by {read_by(readers)}")
                )
        elif "past" in name and re.search(r"key|value|kv", name) and len(dims(info) or []) in (0, 4, 5) and not scales:
            reason = f"not the cache of a GroupQueryAttention node but read by {read_by(readers)}"
            problems.append(Problem(name, reason))
    for node in graph.graph.node:
        for name in filter(None, node.output[1:3] if node.op_type == GQA else ()):
            if later := graph.readers.get(name):
                problems.append(Problem(node_label(node), f"its cache {name} is shared: read by {read_by(later)}"))
    return problems
