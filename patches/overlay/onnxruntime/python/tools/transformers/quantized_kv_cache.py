# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""The KV cache of a decoder: buffers that are allocated once and bound as past and present, and how much they hold.

    cache = QuantizedKvCache.for_model("model.onnx", batch=1, capacity=4096, device="cuda")
    cache.bind(io_binding)                  # once: addresses never change, a captured graph may keep them
    session.run_with_iobinding(io_binding)  # seqlens_k = cache.lengths + new tokens - 1
    cache.advance(new_tokens)
    cache.rewind(3)                         # the last three tokens were a wrong guess

Layers may differ: quantized with or without scale caches, float16, float32. A token's row is written by the operator
when the token is appended and never read beyond the length, so that rewind and reset move a number and no bytes.
Letters: B batch, Hkv KV heads, C capacity in tokens. Byte format: docs/format.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray
from onnx import ModelProto, TensorProto

from . import kv_cache_file
from .kv_cache_file import CacheFileError
from .kv_cache_layers import ELEMENT_BYTES, PER_TOKEN, CacheLayer, CacheSide, DecoderModel
from .kv_cache_memory import DeviceMemory
from .kv_cache_model import read_decoder

Lengths = NDArray[np.int64]


class CacheError(ValueError):
    """A call that the cache cannot follow: more tokens than it has room for, or than there are to drop."""


@dataclass(frozen=True)
class CacheTensor:
    """One state tensor: K, V, or the scale cache of either.

    past, present: names of the graph's input and output. element_type: ONNX. shape: (B, Hkv, C, elements of a row).
    """

    past: str
    present: str
    element_type: int
    shape: tuple[int, ...]
    is_scale: bool

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """(B, Hkv, C, bytes of a row)."""
        return (*self.shape[:3], self.shape[3] * ELEMENT_BYTES[self.element_type])

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return int(np.prod(self.byte_shape, dtype=np.int64))


def cache_tensors(decoder: DecoderModel, batch: int, capacity: int) -> list[CacheTensor]:
    """The state tensors of a model, layer by layer: K, V, then their scale caches where there are any."""
    found = []
    for layer in decoder.layers:
        shape = layer.cache_shape(batch, capacity)
        found += [CacheTensor(s.past, s.present, layer.element_type, shape, False) for s in layer.sides]
        scales = [s for s in layer.sides if s.granularity == PER_TOKEN]
        found += [
            CacheTensor(s.scale, s.present_scale, s.scale_type, layer.scale_shape(s, batch, capacity), True)
            for s in scales
        ]
    return found


def model_fingerprint(model: str | Path | ModelProto) -> str:
    """sha256 of a model file, hexadecimal. Of external data it holds, and so sees, names, offsets and sizes only."""
    data = model.SerializeToString() if isinstance(model, ModelProto) else Path(model).read_bytes()
    return hashlib.sha256(data).hexdigest()


class QuantizedKvCache:
    """Buffers and lengths. Bindings hold addresses: the object must outlive every session run that uses them.

    decoder: what read_decoder says about the model. static_scales: float arrays for scales that are graph inputs and
    not per token, by name. fingerprint: identifies the weights; a saved prefix of another one is refused.

    Raises CacheModelError (a cache of another kind in the model), CacheError, kv_cache_memory.DeviceError.
    """

    def __init__(
        self,
        decoder: DecoderModel,
        batch: int,
        capacity: int,
        device: str = "cpu",
        device_id: int = 0,
        *,
        static_scales: Mapping[str, ArrayLike] | None = None,
        fingerprint: str = "",
    ) -> None:
        decoder.require()
        _check_sizes(decoder, batch, capacity)
        self.decoder, self.batch, self.capacity, self.fingerprint = decoder, batch, capacity, fingerprint
        self.memory = DeviceMemory(device, device_id)
        self.tensors = cache_tensors(decoder, batch, capacity)
        self._static = _static_scales(decoder, static_scales or {})
        self._buffers = {t.past: self.memory.zeros(t.byte_shape) for t in self.tensors}
        self._lengths: Lengths = np.zeros(batch, np.int64)

    @classmethod
    def for_model(
        cls,
        model: str | Path | ModelProto,
        batch: int,
        capacity: int,
        device: str = "cpu",
        device_id: int = 0,
        *,
        static_scales: Mapping[str, ArrayLike] | None = None,
    ) -> QuantizedKvCache:
        """The cache of an ONNX file or model, whose weights are not read. Arguments and errors: the constructor's."""
        return cls(
            read_decoder(model), batch, capacity, device, device_id,
            static_scales=static_scales, fingerprint=model_fingerprint(model),
        )  # fmt: skip

    @property
    def lengths(self) -> Lengths:
        """Tokens of each batch entry, (B,) int64; a copy."""
        return self._lengths.copy()

    @property
    def nbytes(self) -> int:
        """Device bytes of all buffers, scale caches included."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def scale_nbytes(self) -> int:
        """Of these, the bytes of the scale caches."""
        return sum(t.nbytes for t in self.tensors if t.is_scale)

    @property
    def kind(self) -> str:
        """In a few words, for reports: "int8 PER_TOKEN/PER_TOKEN", or several kinds with their numbers of layers."""
        names = [_layer_kind(layer) for layer in self.decoder.layers]
        kinds = dict.fromkeys(names)
        return names[0] if len(kinds) == 1 else " + ".join(f"{names.count(k)} x {k}" for k in kinds)

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind every buffer as past and as present, and static scales that are graph inputs."""
        where = self.memory.device, self.memory.device_id
        for t in self.tensors:
            pointer = self._buffers[t.past].data_ptr()
            binding.bind_input(t.past, *where, t.element_type, list(t.shape), pointer)
            binding.bind_output(t.present, *where, t.element_type, list(t.shape), pointer)
        for name, array in self._static.items():
            binding.bind_cpu_input(name, array)

    def advance(self, tokens: int | Sequence[int] | Lengths) -> None:
        """Count tokens that a run has appended: one number, or one per batch entry. Raises CacheError beyond C."""
        added = self._per_entry(tokens)
        self._move(self._lengths + added, f"{added.max()} more tokens do not fit")

    def rewind(self, tokens: int | Sequence[int] | Lengths) -> None:
        """Drop the last tokens: one number, or one per batch entry. As if they had never been appended."""
        dropped = self._per_entry(tokens)
        self._move(self._lengths - dropped, f"cannot drop {dropped.max()} tokens")

    def reset(self) -> None:
        """Drop all tokens."""
        self._lengths[:] = 0

    def clone(self) -> QuantizedKvCache:
        """A second cache with the same content, on the same device: a branch. Bind it before use."""
        memory = self.memory
        other = QuantizedKvCache(
            self.decoder, self.batch, self.capacity, memory.device, memory.device_id,
            static_scales=self._static, fingerprint=self.fingerprint,
        )  # fmt: skip
        for name, buffer in self._buffers.items():
            memory.copy(buffer, other._buffers[name])
        other._lengths = self.lengths
        return other

    def rows(self, past: str, entry: int = 0) -> NDArray[np.uint8]:
        """The bytes that one tensor holds for a batch entry: (Hkv, its tokens, bytes of a row), copied to the host."""
        count = int(self._lengths[entry])
        rows: NDArray[np.uint8] = self.memory.read_rows(self._buffers[past], count)[entry]
        return rows

    def save(self, path: str | Path, tokens: Sequence[Sequence[int]] | None = None) -> None:
        """Write what the cache holds to a file. tokens: the ids it was made from, per batch entry, kept with it."""
        longest = int(self._lengths.max())
        header = {
            "model": self._identity(),
            "lengths": self._lengths.tolist(),
            "tokens": tokens and [*map(list, tokens)],
        }
        described = [
            (t.past, (t.shape[0], t.shape[1], longest, t.byte_shape[3]), lambda t=t: self._valid_rows(t, longest))
            for t in self.tensors
        ]
        kv_cache_file.write(Path(path), header, described)

    def load(self, path: str | Path) -> list[list[int]] | None:
        """Take the content of a file; buffers stay where they are. Returns the token ids that were saved with it.

        The file's batch is this cache's, or 1: then every entry gets that prefix. The capacity may be another one.
        Raises CacheFileError for a foreign, truncated or damaged file, one of another model, or one that does not fit;
        the cache is unchanged then.
        """
        file = kv_cache_file.read(Path(path))
        lengths = self._check_file(file)
        by_name = {t.past: t for t in self.tensors}
        for name, array in file.tensors():
            rows = np.repeat(array, self.batch // array.shape[0], axis=0)
            if rows.shape[2]:
                self.memory.write_rows(self._buffers[by_name[name].past], rows)
        self._lengths[:] = lengths
        tokens = file.header.get("tokens")
        return tokens and [list(map(int, ids)) for ids in tokens]

    def _identity(self) -> dict[str, Any]:
        """What a saved prefix depends on, batch and capacity left out."""
        tensors = [[t.past, t.element_type, t.shape[1], t.shape[3]] for t in self.tensors]
        layers = [_layer_kind(layer) for layer in self.decoder.layers]
        static = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in self._static.items()}
        return {"fingerprint": self.fingerprint, "layers": layers, "tensors": tensors, "static_scales": static}

    def _check_file(self, file: kv_cache_file.CacheFile) -> Lengths:
        """Lengths of the entries of a file that fits; raises CacheFileError otherwise."""
        theirs, ours = file.header.get("model"), json.loads(json.dumps(self._identity()))
        if theirs != ours:
            wrong = [k for k in ours if not isinstance(theirs, dict) or theirs.get(k) != ours[k]]
            msg = f"{file.path}: of another model or cache kind: {', '.join(wrong)} differ. Save it from this model"
            raise CacheFileError(msg)
        lengths = np.array(file.header["lengths"], np.int64)
        if len(lengths) not in (1, self.batch):
            msg = f"{file.path}: {len(lengths)} batch entries; this cache has {self.batch}. Save one entry, or as many"
            raise CacheFileError(msg)
        if lengths.max() > self.capacity:
            msg = f"{file.path}: {lengths.max()} tokens; this cache has room for {self.capacity}. Allocate more"
            raise CacheFileError(msg)
        return lengths

    def _valid_rows(self, tensor: CacheTensor, longest: int) -> NDArray[np.uint8]:
        """Rows up to the longest entry; those beyond an entry's own length are 0: dropped tokens are not saved."""
        rows = self.memory.read_rows(self._buffers[tensor.past], longest).copy()
        for entry, length in enumerate(self._lengths):
            rows[entry, :, length:] = 0
        return rows

    def _per_entry(self, tokens: int | Sequence[int] | Lengths) -> Lengths:
        numbers = np.asarray(tokens)
        if (
            numbers.shape not in ((), (self.batch,))
            or not np.issubdtype(numbers.dtype, np.integer)
            or numbers.min() < 0
        ):
            msg = f"tokens {tokens!r}: wants a number of at least 0, or {self.batch} of them, one per batch entry"
            raise CacheError(msg)
        return np.broadcast_to(numbers, (self.batch,)).astype(np.int64)

    def _move(self, lengths: Lengths, what: str) -> None:
        if lengths.min() < 0 or lengths.max() > self.capacity:
            msg = f"{what}: lengths {self._lengths.tolist()}, capacity {self.capacity}"
            raise CacheError(msg)
        self._lengths[:] = lengths


def _layer_kind(layer: CacheLayer) -> str:
    if not layer.quantized:
        return layer.cache_dtype
    return f"{layer.cache_dtype} {layer.key.granularity}/{layer.value.granularity}"


def _check_sizes(decoder: DecoderModel, batch: int, capacity: int) -> None:
    if batch < 1 or capacity < 1:
        msg = f"batch {batch}, capacity {capacity}: both must be at least 1"
        raise CacheError(msg)
    if not decoder.layers:
        msg = "the model has no GroupQueryAttention node, so there is no cache to allocate"
        raise CacheError(msg)
    for layer in decoder.layers:
        if isinstance(layer.capacity, int) and layer.capacity not in (0, capacity):
            msg = f"capacity {capacity}: {layer.key.past} of the model is fixed to {layer.capacity}"
            raise CacheError(msg)


def _static_scales(decoder: DecoderModel, given: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    """Static scales that are graph inputs, checked against what the model's nodes want."""
    wanted: dict[str, tuple[CacheLayer, CacheSide]] = {
        s.scale: (layer, s)
        for layer in decoder.layers
        for s in layer.sides
        if s.scale_is_input and s.granularity != PER_TOKEN
    }
    if set(wanted) != set(given):
        pairs = ((wanted, given), (given, wanted))
        missing, unknown = (", ".join(sorted(set(a) - set(b))) or "none" for a, b in pairs)
        msg = f"static_scales: missing {missing}; unknown to the model {unknown}"
        raise CacheError(msg)
    scales = {}
    for name, (layer, side) in wanted.items():
        kind = np.float16 if side.scale_type == TensorProto.FLOAT16 else np.float32
        scales[name] = np.ascontiguousarray(given[name], kind)
        if scales[name].shape != layer.scale_shape(side, 1, 1):
            msg = f"static_scales: {name} has shape {scales[name].shape}, wanted {layer.scale_shape(side, 1, 1)}"
            raise CacheError(msg)
    return scales
