# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""The KV cache of a decoder in words and numbers: a layer, its two sides, all layers, and what is wrong with one."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

ELEMENT_BYTES = {
    int(TensorProto.FLOAT): 4, int(TensorProto.FLOAT16): 2, int(TensorProto.BFLOAT16): 2,
    int(TensorProto.INT8): 1, int(TensorProto.UINT8): 1, int(TensorProto.FLOAT8E4M3FN): 1,
}  # fmt: skip
FLOAT_CACHES = {
    int(TensorProto.FLOAT): "float32",
    int(TensorProto.FLOAT16): "float16",
    int(TensorProto.BFLOAT16): "bfloat16",
}
QUANTIZED_CACHES = ("int8", "float8e4m3fn", "int4")
NONE, PER_TENSOR, PER_CHANNEL, PER_TOKEN = "NONE", "PER_TENSOR", "PER_CHANNEL", "PER_TOKEN"
GRANULARITIES = (PER_TOKEN, PER_CHANNEL, PER_TENSOR)
MAX_HEAD_SIZE, MAX_GROUP = 256, 64


@dataclass(frozen=True)
class Problem:
    """Why a node's cache cannot be used. node: its name, or the graph input's where no node is to blame."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"


class CacheModelError(ValueError):
    """A model that cannot be read or converted. problems: every node with its reason."""

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


@dataclass(frozen=True)
class CacheSide:
    """K or V of one layer. Names are graph inputs and outputs.

    past, present: the cache. granularity: NONE, PER_TENSOR, PER_CHANNEL or PER_TOKEN. scale: input 12 or 13 of the
    node, empty with NONE; scale_type: its ONNX element type, 0 with NONE. scale_is_input: it has to be fed (a scale
    cache, or static scales that are a graph input); False for an initializer. present_scale: empty unless PER_TOKEN.
    """

    past: str
    present: str
    granularity: str = NONE
    scale: str = ""
    scale_type: int = 0
    scale_is_input: bool = False
    present_scale: str = ""


@dataclass(frozen=True)
class CacheLayer:
    """The cache of one GroupQueryAttention node.

    index: the number in the cache's name, else the node's position. cache_dtype: float32, float16, bfloat16, int8,
    float8e4m3fn or int4. element_type: the ONNX type of past and present. num_heads, kv_heads, head_size: H, Hkv, D.
    capacity: dimension 2 of past, a number where the model fixes it, else its name. rotary: 0 none, 1 halves,
    2 interleaved pairs; rotary_size: elements of a head that turn, 0 where the table's width is not known;
    rotary_rows: tokens that the table is for, 0 where it is not stored in the model.
    """

    index: int
    node: str
    key: CacheSide
    value: CacheSide
    cache_dtype: str
    element_type: int
    num_heads: int
    kv_heads: int
    head_size: int
    capacity: int | str
    rotary: int = 0
    rotary_size: int = 0
    rotary_rows: int = 0

    @property
    def sides(self) -> tuple[CacheSide, CacheSide]:
        """K, V."""
        return self.key, self.value

    @property
    def quantized(self) -> bool:
        """Whether the cache holds codes."""
        return self.cache_dtype in QUANTIZED_CACHES

    @property
    def row(self) -> int:
        """Last dimension of past and present: elements as stored (int4: two values each)."""
        return (self.head_size + 1) // 2 if self.cache_dtype == "int4" else self.head_size

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, int, int, int]:
        """(B, Hkv, C, row) of past and present, K and V alike."""
        return batch, self.kv_heads, capacity, self.row

    def scale_shape(self, side: CacheSide, batch: int, capacity: int) -> tuple[int, ...]:
        """PER_TOKEN (B, Hkv, C, 1), PER_CHANNEL (1, Hkv, 1, D), PER_TENSOR (1,), NONE ()."""
        return {
            PER_TOKEN: (batch, self.kv_heads, capacity, 1),
            PER_CHANNEL: (1, self.kv_heads, 1, self.head_size),
            PER_TENSOR: (1,),
            NONE: (),
        }[side.granularity]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K, V and scales that a token takes in this layer, per batch entry; static scales are not counted."""
        scales = sum(ELEMENT_BYTES[s.scale_type] for s in self.sides if s.granularity == PER_TOKEN)
        return self.kv_heads * (2 * self.row * ELEMENT_BYTES[self.element_type] + scales)


@dataclass(frozen=True)
class DecoderModel:
    """The caches of a model, by layer. problems: nodes and graph inputs whose cache is of another kind.

    lengths, total: graph inputs that are themselves seqlens_k (int32 (B) or (B, 1), tokens after the call less one) and
    total_sequence_length (int32 (1)) of the nodes; empty where the model computes them, usually from attention_mask.
    inputs, outputs: all other names with element type and dimensions (a number, or a free dimension's name).
    """

    layers: tuple[CacheLayer, ...]
    problems: tuple[Problem, ...]
    lengths: str
    total: str
    inputs: dict[str, tuple[int, list[int | str]]]
    outputs: dict[str, tuple[int, list[int | str]]]

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of a token over all layers, scales included, per batch entry."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def require(self) -> DecoderModel:
        """Itself; raises CacheModelError where there are problems."""
        if self.problems:
            raise CacheModelError(self.problems)
        return self
