"""Runs a decoder, float or converted, through onnxruntime with separate past and present, and reads its caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto
from onnxruntime.transformers.kv_cache_layers import CacheLayer, CacheSide
from onnxruntime.transformers.kv_cache_model import read_decoder

from python_tests.reference.format import Array, CacheDtype, dequantize


class Decoder:
    """A session at batch 1 whose caches grow by one call after the other."""

    def __init__(self, model: ModelProto, provider: str = "CPUExecutionProvider") -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=[provider])
        self.decoder = read_decoder(model)
        self.length = 0
        self.state: dict[str, Any] = {}
        for layer in self.decoder.layers:
            for side in layer.sides:
                self.state[side.past] = _empty(layer.cache_shape(1, 0), layer.element_type)
                if side.present_scale:
                    self.state[side.scale] = _empty(layer.scale_shape(side, 1, 0), side.scale_type)

    def pairs(self) -> dict[str, str]:
        """Present by past, caches and scales."""
        sides = [side for layer in self.decoder.layers for side in layer.sides]
        return {s.past: s.present for s in sides} | {s.scale: s.present_scale for s in sides if s.present_scale}

    def run(self, tokens: list[int]) -> Array:
        """Append tokens; logits (S, vocabulary) float32."""
        self.length += len(tokens)
        steps = np.arange(self.length - len(tokens), self.length)[None]
        arrays = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, self.length), np.int64),
            "position_ids": steps.astype(np.int64),
            "seqlens_k": np.array([self.length - 1], np.int32),
            "total_sequence_length": np.array([self.length], np.int32),
        }
        feeds = {name: ort.OrtValue.ortvalue_from_numpy(arrays[name]) for name in self.decoder.inputs} | self.state
        pairs = self.pairs()
        logits, *present = self.session.run_with_ort_values(["logits", *pairs.values()], feeds)
        self.state = dict(zip(pairs, present, strict=True))
        return np.asarray(logits.numpy()[0], np.float32)

    def codes(self, side: CacheSide) -> Array:
        """The cache as stored, (Hkv, T, row)."""
        stored: Array = self.state[side.past].numpy()[0]
        return stored

    def scales(self, side: CacheSide) -> Array:
        """The scale cache, (Hkv, T, 1)."""
        stored: Array = self.state[side.scale].numpy()[0]
        return stored

    def values(self, layer: CacheLayer, side: CacheSide, static: Array | None = None) -> Array:
        """What the cache reads back as, (Hkv, T, D) float32. static: the scale of a side that is not PER_TOKEN."""
        if not layer.quantized:
            return np.asarray(self.codes(side), np.float32)
        scale = self.scales(side) if static is None else static[0] if static.ndim == 4 else static
        return dequantize(self.codes(side), scale, CacheDtype(layer.cache_dtype), layer.head_size)


def _empty(shape: tuple[int, ...], element_type: int) -> Any:  # noqa: ANN401
    if element_type == TensorProto.FLOAT8E4M3FN:
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, element_type, "cpu", 0)
    kinds = {TensorProto.INT8: np.int8, TensorProto.UINT8: np.uint8, TensorProto.FLOAT16: np.float16}
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, kinds.get(element_type, np.float32)))


def relative_error(exact: Array, found: Array) -> float:
    """Norm of the difference by the norm of the exact values, in double."""
    wide = exact.astype(np.float64)
    return float(np.linalg.norm(wide - found.astype(np.float64)) / np.linalg.norm(wide))
