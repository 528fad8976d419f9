# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Static scales of a KV cache: the magnitudes that a float model's K and V reach, measured over tokens.

The file that `Calibration.write` makes holds magnitudes, not scales: one file serves int8, fp8 and int4, per tensor and
per channel. K is measured as it is cached, after rotary. Rotary turns pairs of channels, so a channel's largest value
depends on the position while the length of its pair does not: of channels that turn, the length of the pair is
measured, a bound at every position and not only at those of the calibration text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto

from .kv_cache_layers import PER_CHANNEL, CacheLayer, CacheModelError, DecoderModel, Problem
from .kv_cache_model import read_decoder

Floats: TypeAlias = NDArray[np.float32]
FORMAT, VERSION = "kv-cache-calibration", 1
# Largest codes. The int ranges reach one further below zero, which a scale that is good for both signs does not use.
LARGEST_CODE = {"int8": 127.0, "float8e4m3fn": 448.0, "int4": 7.0}
LOWEST_PERCENTILE = 99.0
# A channel that the text never moved still gets a scale, this much of its side's.
SMALLEST_SHARE = 2.0**-10
_NUMPY = {int(TensorProto.FLOAT): np.float32, int(TensorProto.FLOAT16): np.float16}


@dataclass(frozen=True)
class Magnitudes:
    """What one side of one layer reaches: channel, float32 (Hkv, D); tensor, one number for all of it."""

    channel: Floats
    tensor: float

    def scale(self, granularity: str, cache_dtype: str) -> Floats:
        """float32 (1,) for PER_TENSOR, (1, Hkv, 1, D) for PER_CHANNEL. Every scale is above zero."""
        top = LARGEST_CODE[cache_dtype]
        whole = self.tensor / top if self.tensor > 0 else 1.0
        if granularity == PER_CHANNEL:
            scale = np.maximum(self.channel / top, whole * SMALLEST_SHARE)
            return np.asarray(scale[None, :, None, :], np.float32)
        return np.array([whole], np.float32)


@dataclass(frozen=True)
class Calibration:
    """Magnitudes of K and V by layer index. tokens: how many were measured. percentile: 100 is the largest value."""

    tokens: int
    percentile: float
    layers: dict[int, tuple[Magnitudes, Magnitudes]]

    def write(self, path: Path) -> None:
        """As JSON. Refuses to replace a file: FileExistsError."""
        sides = {
            str(index): {
                name: {
                    "tensor": side.tensor,
                    "channel": [[float(f"{x:.8g}") for x in head] for head in side.channel.tolist()],
                }
                for name, side in zip(("key", "value"), pair, strict=True)
            }
            for index, pair in sorted(self.layers.items())
        }
        head = {"format": FORMAT, "version": VERSION, "tokens": self.tokens, "percentile": self.percentile}
        with path.open("x", encoding="utf-8") as file:
            json.dump({**head, "layers": sides}, file)
            file.write("\n")

    def of(self, layer: CacheLayer) -> tuple[Magnitudes, Magnitudes]:
        """K's and V's; raises CacheModelError where the file has none for this layer or for another shape."""
        pair = self.layers.get(layer.index)
        if pair is None:
            have = ", ".join(map(str, sorted(self.layers)))
            raise CacheModelError([Problem(layer.node, f"the calibration has no layer {layer.index}, only {have}")])
        want = (layer.kv_heads, layer.head_size)
        if pair[0].channel.shape != want or pair[1].channel.shape != want:
            reason = (
                f"the calibration has {pair[0].channel.shape} channels, the model {want}: measured on another model?"
            )
            raise CacheModelError([Problem(layer.node, reason)])
        return pair


def read_calibration(path: Path) -> Calibration:
    """The file that `Calibration.write` made. Raises CacheModelError for any other content."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            msg = f"format {data.get('format')!r}, version {data.get('version')!r}"
            raise ValueError(msg)
        layers = {int(index): (_side(pair["key"]), _side(pair["value"])) for index, pair in data["layers"].items()}
        return Calibration(int(data["tokens"]), float(data["percentile"]), layers)
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as exc:
        reason = f"not a calibration of version {VERSION} ({exc}); make one with: kv_cache_quantizer calibrate"
        raise CacheModelError([Problem(str(path), reason)]) from exc


def _side(data: dict[str, Any]) -> Magnitudes:
    channel, tensor = np.array(data["channel"], np.float32), float(data["tensor"])
    if channel.ndim != 2 or not np.isfinite(channel).all() or (channel < 0).any() or not 0 <= tensor < math.inf:
        msg = "magnitudes are finite numbers, none below zero, one per KV head and channel"
        raise ValueError(msg)
    return Magnitudes(channel, tensor)


class LargestValues:
    """The upper end of a distribution, exactly, without keeping the rest. count: values that will come per column."""

    def __init__(self, columns: int, count: int, percentile: float) -> None:
        self._rank = (count - 1) * percentile / 100
        self._keep = count - math.floor(self._rank)
        self._first = count - self._keep
        self._values: Floats = np.zeros((0, columns), np.float32)

    def add(self, values: Floats) -> None:
        """values: (n, columns), none below zero; NaN counts as the largest."""
        both = np.asarray(np.concatenate([self._values, values]), np.float32)
        drop = len(both) - self._keep
        self._values = np.asarray(np.partition(both, drop, axis=0)[drop:], np.float32) if drop > 0 else both

    def result(self) -> Floats:
        """The percentile of each column, interpolated between neighbours as NumPy does."""
        ordered = np.sort(self._values, axis=0).astype(np.float64)
        at = self._rank - self._first
        low, part = math.floor(at), at - math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        value = ordered[low] if part == 0 else ordered[low] * (1 - part) + ordered[high] * part
        return np.asarray(value, np.float32)


def pair_lengths(values: Floats, rotary: int, rotary_size: int) -> Floats:
    """Magnitudes (..., D) where every channel that rotary turns has its pair's length. rotary: as in CacheLayer."""
    size = np.abs(values)
    if not rotary or not rotary_size:
        return size
    half = rotary_size // 2
    first = slice(0, half) if rotary == 1 else slice(0, rotary_size, 2)
    second = slice(half, rotary_size) if rotary == 1 else slice(1, rotary_size, 2)
    length = np.hypot(values[..., first], values[..., second])
    size[..., first] = length
    size[..., second] = length
    return size


def measure(
    path: Path,
    sequences: Sequence[NDArray[np.int64]],
    *,
    percentile: float = 100.0,
    envelope: bool = True,
    provider: str = "CPUExecutionProvider",
    head_size: int = 0,
) -> Calibration:
    """Run a float model over token sequences, each from an empty cache, and measure its K and V.

    sequences: token ids (S,). percentile: 99 to 100. envelope: pairs of channels, not channels, where the node applies
    rotary. Raises CacheModelError for a model that cannot be fed or run, or a K or V that is not finite.
    """
    if not LOWEST_PERCENTILE <= percentile <= 100 or not sequences or min(map(len, sequences)) < 1:
        msg = f"percentile {percentile} lies outside {LOWEST_PERCENTILE:g} to 100, or there are no tokens"
        raise ValueError(msg)
    decoder = read_decoder(path, head_size).require()
    _require_float(decoder)
    count = sum(map(len, sequences))
    sides = [(layer, side, i) for layer in decoder.layers for i, side in enumerate(layer.sides)]
    tops = [_tops(layer, count, percentile) for layer, _, _ in sides]
    for tokens, outputs in _run(path, decoder, sequences, provider):
        for output, (layer, _, side), (channels, whole) in zip(outputs, sides, tops, strict=True):
            rows = np.asarray(output[0, :, : len(tokens)], np.float32).transpose(1, 0, 2)
            turned = layer.rotary if envelope and side == 0 else 0
            sizes = pair_lengths(rows, turned, layer.rotary_size)
            channels.add(sizes.reshape(len(tokens), -1))
            whole.add(sizes.reshape(-1, 1))
    found = []
    for (layer, _, side), (channels, whole) in zip(sides, tops, strict=True):
        reached = Magnitudes(channels.result().reshape(layer.kv_heads, layer.head_size), float(whole.result()[0]))
        if not np.isfinite(reached.channel).all() or not math.isfinite(reached.tensor):
            raise CacheModelError(
                [Problem(layer.node, f"{'KV'[side]} is not finite on these tokens: no scale holds it")]
            )
        found.append(reached)
    layers = {la.index: (found[2 * i], found[2 * i + 1]) for i, la in enumerate(decoder.layers)}
    return Calibration(count, percentile, layers)


def _tops(layer: CacheLayer, count: int, percentile: float) -> tuple[LargestValues, LargestValues]:
    """Of each channel, and of all together."""
    width = layer.kv_heads * layer.head_size
    return LargestValues(width, count, percentile), LargestValues(1, count * width, percentile)


def _run(
    path: Path, decoder: DecoderModel, sequences: Sequence[NDArray[np.int64]], provider: str
) -> Iterator[tuple[NDArray[np.int64], list[NDArray[Any]]]]:
    """Each sequence with K and V of every layer, (1, Hkv, rows, D), in the order of the layers."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    names = [side.present for layer in decoder.layers for side in layer.sides]
    try:
        if provider not in ort.get_available_providers():
            msg = "this onnxruntime does not have it"
            raise RuntimeError(msg)
        session = ort.InferenceSession(str(path), options, providers=[provider])
        for tokens in sequences:
            yield tokens, session.run(names, prompt_feeds(decoder, tokens))
    except CacheModelError:
        raise
    # What onnxruntime raises has no base class of its own.
    except Exception as exc:
        reason = f"onnxruntime cannot run it on {provider}: {next(iter(str(exc).splitlines()), exc)}"
        raise CacheModelError([Problem(str(path), reason)]) from exc


def _require_float(decoder: DecoderModel) -> None:
    problems = []
    if not decoder.layers:
        problems.append(Problem("the model", "it has no GroupQueryAttention node"))
    for layer in decoder.layers:
        if layer.quantized:
            problems.append(Problem(layer.node, f"its cache is {layer.cache_dtype} already; measure the float model"))
        elif layer.element_type not in _NUMPY:
            problems.append(
                Problem(layer.node, "NumPy has no bfloat16; measure a float16 or float32 export of the model")
            )
    if problems:
        raise CacheModelError(problems)


def prompt_feeds(decoder: DecoderModel, tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Inputs of one prompt (S,) at batch 1 with empty caches. Raises CacheModelError for an input of another kind."""
    length = len(tokens)
    known: dict[str, NDArray[Any]] = {
        "input_ids": tokens[None].astype(np.int64),
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length, dtype=np.int64)[None],
        decoder.lengths: np.array([length - 1], np.int32),
        decoder.total: np.array([length], np.int32),
    }
    feeds = {}
    for name, (kind, shape) in decoder.inputs.items():
        if name not in known:
            reason = "a calibration run can fill input_ids, attention_mask, position_ids, lengths and caches only"
            raise CacheModelError([Problem(name, reason)])
        value = known[name].astype(np.int32) if kind == TensorProto.INT32 else known[name]
        feeds[name] = value[:, None] if name == decoder.lengths and len(shape) == 2 else value
    for layer in decoder.layers:
        capacity = layer.capacity if isinstance(layer.capacity, int) else 0
        if 0 < capacity < length:
            raise CacheModelError(
                [Problem(layer.node, f"{length} tokens do not fit its cache of {capacity}; shorten --length")]
            )
        empty = np.zeros(layer.cache_shape(1, capacity), _NUMPY[layer.element_type])
        feeds |= {side.past: empty for side in layer.sides}
    return feeds
