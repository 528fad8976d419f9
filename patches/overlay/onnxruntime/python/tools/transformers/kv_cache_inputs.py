# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Which inputs and outputs of a decoder model carry tokens, lengths and logits, and of what types they are."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from .kv_cache_layers import DecoderModel

F32 = NDArray[np.float32]
IntegerType: TypeAlias = type[np.int64] | type[np.int32]
_INTEGERS: dict[int, IntegerType] = {int(TensorProto.INT64): np.int64, int(TensorProto.INT32): np.int32}
_FLOATS = (int(TensorProto.FLOAT), int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16))


class DecodeError(ValueError):
    """A model that this loop cannot feed, or a call that its cache cannot follow."""


class InputNames:
    """Which graph input is which. Raises DecodeError for one that is not known, and for logits that are not there."""

    def __init__(self, model: DecoderModel) -> None:
        known = {"input_ids", "attention_mask", "position_ids", model.lengths, model.total}
        for name, (_, dims) in model.inputs.items():
            if name not in known:
                msg = f"graph input {name} {dims}: not one of input_ids, attention_mask, position_ids or a KV cache"
                raise DecodeError(msg)
        if "input_ids" not in model.inputs or not ({"attention_mask", model.lengths} & set(model.inputs)):
            msg = f"graph inputs {', '.join(model.inputs)}: wants input_ids, and attention_mask or the nodes' seqlens_k"
            raise DecodeError(msg)
        self.ids, self.mask, self.positions = (
            n if n in model.inputs else "" for n in ("input_ids", "attention_mask", "position_ids")
        )
        self.types = {name: _integer(name, kind) for name, (kind, _) in model.inputs.items()}
        self.lengths_rank = len(model.inputs[model.lengths][1]) if model.lengths else 0
        self.logits = "logits" if "logits" in model.outputs else next(iter(model.outputs), "")
        self.logits_type, dims = model.outputs.get(self.logits, (0, []))
        if self.logits_type not in _FLOATS or len(dims) != 3 or not isinstance(dims[2], int):
            msg = f"graph output {self.logits or 'logits'} {dims}: wants float logits (B, S, V), V a number"
            raise DecodeError(msg)
        self.vocabulary = dims[2]
        self.unused_outputs = [n for n in model.outputs if n != self.logits]


def check_rotary_tables(model: DecoderModel, capacity: int) -> None:
    """Raises DecodeError where a layer's rotary table, as stored in the model, has fewer rows than the capacity.

    A step's total_sequence_length is the capacity: the operator would refuse every one.
    """
    turning = [layer for layer in model.layers if layer.rotary_rows]
    shortest = min(turning, key=lambda layer: layer.rotary_rows, default=None)
    if shortest is not None and capacity > shortest.rotary_rows:
        msg = (
            f"capacity {capacity} is beyond the rotary table of {shortest.node}: its cos_cache has "
            f"{shortest.rotary_rows} rows. Give a smaller --capacity (perplexity: --window), or export the model with "
            "a longer table"
        )
        raise DecodeError(msg)


def _integer(name: str, kind: int) -> IntegerType:
    if kind not in _INTEGERS:
        msg = f"graph input {name}: its type is {helper.tensor_dtype_to_string(kind)}, wanted int64 or int32"
        raise DecodeError(msg)
    return _INTEGERS[kind]


def as_float32(data: NDArray[np.uint8], element_type: int) -> F32:
    """Bytes (..., n * element size) of ONNX float, float16 or bfloat16 -> values (..., n) float32."""
    if element_type == TensorProto.BFLOAT16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float32 if element_type == TensorProto.FLOAT else np.float16).astype(np.float32)
