# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Bytes that a decoder takes on a device: weights, caches by kind and context length, scratch.

Weights and caches are counted. Scratch is an upper estimate: what a step and a prompt's chunk hold at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto, TensorProto, helper

from .kv_cache_genai import read_config
from .kv_cache_graph import GraphIndex, attributes
from .kv_cache_layers import CacheModelError, Problem
from .kv_cache_model import load_graph, read_decoder
from .kv_cache_weights import tensors

# Cache kind: bits of an element, whether it has scales.
KINDS = {"fp16": (16, False), "int8": (8, True), "fp8": (8, True), "int4": (4, True)}
# The decode kernel's partial results: at most 64 splits of 16 rows, D sums and two statistics each, in float.
_SPLITS, _ROWS, _STATISTICS = 64, 16, 2


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A decoder's sizes.

    caches: (Hkv, D) of each layer. weights: bytes. hidden, intermediate, vocabulary: widths of activations, 16 bit.
    heads: H. context: tokens that the model is made for, 0 if not known.
    """

    name: str
    caches: tuple[tuple[int, int], ...]
    weights: int
    heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    context: int = 0

    def bytes_per_token(self, kind: str, *, scale_bytes: int = 4, keep: int = 0) -> int:
        """Cache of one token and batch entry. scale_bytes: per token and KV head, 0 static. keep: layers in fp16."""
        bits, scaled = KINDS[kind]
        total = 0
        for i, (kv_heads, head_size) in enumerate(self.caches):
            row = 2 * head_size if i < keep else (head_size * bits + 7) // 8
            total += 2 * kv_heads * (row + (scale_bytes if scaled and i >= keep else 0))
        return total

    def attention_scratch(self, batch: int, chunk: int) -> int:
        """Bytes of one layer, reused by all: partial results of a step, or K after rotary of a prompt."""
        sizes = []
        for kv_heads, head_size in self.caches:
            step = kv_heads * _SPLITS * _ROWS * (head_size + _STATISTICS) * 4
            sizes.append(batch * max(step, chunk * kv_heads * head_size * 2))
        return max(sizes, default=0)

    def activations(self, batch: int, chunk: int) -> int:
        """Bytes of a chunk: four of the residual's width, Q, K, V, three of the MLP's, logits in 16 and in 32 bit."""
        kv_heads, head_size = max(self.caches, default=(0, 0))
        widths = 4 * self.hidden + (self.heads + 2 * kv_heads) * head_size + 3 * self.intermediate
        return batch * chunk * (2 * widths + 6 * self.vocabulary)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published decoder's shape, from its configuration file; gated MLP, no biases. tied: one table in and out."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool = False

    def footprint(self, name: str, weight_bits: float = 16) -> Footprint:
        """weight_bits: of every weight but the token table, which stays 16 bit below 16 where it is not tied."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        matrices = self.layers * (attention + 3 * self.hidden * self.intermediate)
        table = self.vocabulary * self.hidden
        norms = (2 * self.layers + 1) * self.hidden
        head = 0 if self.tied else table
        weights = int((matrices + head) * weight_bits / 8) + 2 * (norms + table)
        return Footprint(
            name=name,
            caches=((self.kv_heads, self.head_size),) * self.layers,
            weights=weights,
            heads=self.heads,
            hidden=self.hidden,
            intermediate=self.intermediate,
            vocabulary=self.vocabulary,
            context=self.context,
        )


def _preset(*numbers: int, tied: bool = False) -> Preset:
    names = ("layers", "heads", "kv_heads", "head_size", "hidden", "intermediate", "vocabulary", "context")
    return Preset(**dict(zip(names, numbers, strict=True)), tied=tied)


PRESETS = {
    "llama-3.2-1b": _preset(16, 32, 8, 64, 2048, 8192, 128256, 131072, tied=True),
    "llama-3.2-3b": _preset(28, 24, 8, 128, 3072, 8192, 128256, 131072, tied=True),
    "llama-3.1-8b": _preset(32, 32, 8, 128, 4096, 14336, 128256, 131072),
    "llama-3.1-70b": _preset(80, 64, 8, 128, 8192, 28672, 128256, 131072),
    "mistral-7b-v0.3": _preset(32, 32, 8, 128, 4096, 14336, 32768, 32768),
    "qwen2.5-7b": _preset(28, 28, 4, 128, 3584, 18944, 152064, 32768),
    "qwen3-8b": _preset(36, 32, 8, 128, 4096, 12288, 151936, 40960),
    "qwen3-32b": _preset(64, 64, 8, 128, 5120, 25600, 151936, 40960),
    "phi-3-mini-128k": _preset(32, 32, 32, 96, 3072, 8192, 32064, 131072),
}


def model_footprint(path: Path, head_size: int = 0) -> Footprint:
    """A model file's sizes; weights are counted by their types and shapes and not read. Raises CacheModelError."""
    model = load_graph(path)
    decoder = read_decoder(model, head_size).require()
    if not decoder.layers:
        raise CacheModelError([Problem(str(path), "it has no GroupQueryAttention node, so no cache to plan")])
    hidden, intermediate, vocabulary = _widths(model)
    described = (read_config(path.parent) or {}).get("model", {})
    context = described.get("context_length", 0) if isinstance(described, dict) else 0
    return Footprint(
        name=path.name,
        caches=tuple((layer.kv_heads, layer.head_size) for layer in decoder.layers),
        weights=sum(map(tensor_bytes, tensors(model.graph))),
        heads=max(layer.num_heads for layer in decoder.layers),
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        context=context if isinstance(context, int) else 0,
    )


def tensor_bytes(tensor: TensorProto) -> int:
    """Bytes of the values as they lie on a device, by type and shape."""
    count = 1
    for dim in tensor.dims:
        count *= dim
    if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4):
        return (count + 1) // 2
    return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _widths(model: ModelProto) -> tuple[int, int, int]:
    """Widths of the residual, of the MLP and of the logits, as the matrix products have them."""
    graph = GraphIndex.of(model)
    products = [n for n in model.graph.node if n.op_type in ("MatMul", "Gemm", "MatMulNBits")]
    widths = [graph.width(node.output[0]) for node in products]
    depths = []
    for node in products:
        weight = graph.initializers.get(node.input[1])
        if node.op_type == "MatMulNBits":
            depths.append(int(attributes(node).get("K", 0)))
        elif weight is not None and len(weight.dims) == 2:
            turned = node.op_type == "Gemm" and attributes(node).get("transB", 0)
            depths.append(weight.dims[1] if turned else weight.dims[0])
    # The last product makes the logits from the residual.
    vocabulary, hidden = (widths or [0])[-1], (depths or [0])[-1]
    return hidden, max([*widths[:-1], *depths], default=0), vocabulary


def largest_context(memory: int, fixed: int, per_token: int) -> int:
    """Tokens that fit beside `fixed` bytes; 0 if none does."""
    return max(0, (memory - fixed) // per_token)


def parse_size(text: str) -> int:
    """Bytes of 24GB, 24GiB, 500MB or a plain number. Raises ValueError."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    number = text.rstrip("BbGgIiKkMmTt ")
    unit = text[len(number) :].strip().upper()
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        msg = f"{text!r} is no size; write 24GB (10^9), 24GiB (2^30) or bytes"
        raise ValueError(msg) from None
    if not 0 < value < 2**60:
        msg = f"{text!r} is no size that a device has"
        raise ValueError(msg)
    return int(value)
