# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""A decoder model and its KV cache, run call by call: a prompt, chunks of one, steps, bursts of several tokens.

    decoder = DecodeSession("model.onnx", capacity=4096, device="cuda")
    logits = decoder.prompt([[12, 7, 99]])            # (B, V) float32, after each entry's last token
    logits = decoder.step(logits.argmax(-1))          # captured into a CUDA graph, then replayed

Inputs that it knows: input_ids, attention_mask, position_ids, and seqlens_k and total_sequence_length where they are
graph inputs. Letters: B batch, S tokens of a call, V vocabulary, C cache capacity in tokens.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from .kv_cache_inputs import DecodeError, InputNames, as_float32, check_rotary_tables
from .kv_cache_layers import ELEMENT_BYTES
from .kv_cache_memory import session_provider
from .kv_cache_model import read_decoder
from .quantized_kv_cache import CacheError, QuantizedKvCache, model_fingerprint

F32 = NDArray[np.float32]
Ids = NDArray[np.int64]
# Calls of up to so many tokens keep their buffers, and on CUDA their graph.
MAX_CAPTURED_TOKENS = 16


class DecodeSession:
    """One model with one cache. captured: use CUDA graphs for steps (default: on CUDA). threads: 0 lets ORT choose.

    Raises DecodeError for inputs it does not know and for a capacity beyond the rotary table, CacheModelError for
    caches of another kind, kv_cache_memory.DeviceError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        capacity: int,
        batch: int = 1,
        device: str = "cpu",
        device_id: int = 0,
        captured: bool | None = None,
        threads: int = 0,
        static_scales: dict[str, ArrayLike] | None = None,
    ) -> None:
        provider = session_provider(device, device_id)
        self.captured = device == "cuda" if captured is None else captured
        if self.captured and device != "cuda":
            msg = f"captured steps need device 'cuda', not {device!r}: graphs are CUDA's"
            raise DecodeError(msg)
        self.model = read_decoder(model).require()
        self.names = InputNames(self.model)
        check_rotary_tables(self.model, capacity)
        self.cache = QuantizedKvCache(
            self.model, batch, capacity, device, device_id,
            static_scales=static_scales, fingerprint=model_fingerprint(model),
        )  # fmt: skip
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if self.captured:
            provider = session_provider(device, device_id, enable_cuda_graph=1)
        self.session = ort.InferenceSession(str(model), options, providers=[provider])
        # Branches share the session, and so its graphs.
        self._graph_ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._long_call: tuple[tuple[int, bool], _Call] | None = None
        # The last token of each entry, and the length that it had then.
        self._last_ids: Ids = np.zeros(batch, np.int64)
        self._last_lengths: Ids = np.zeros(batch, np.int64)

    @property
    def batch(self) -> int:
        """B."""
        return self.cache.batch

    @property
    def capacity(self) -> int:
        """C."""
        return self.cache.capacity

    def prompt(self, prompts: Sequence[Sequence[int]], chunk: int = 0) -> F32:
        """Append one token list per batch entry, of any lengths from 1; logits (B, V) after the last token of each.

        With an empty cache and chunk 0, or a chunk that holds the longest list, it is one call in which attention reads
        exact keys and values. Otherwise calls of `chunk` tokens (default: all at once), of which all but a first one
        read the quantized cache. A chunk also bounds the memory of the logits, which the model makes for every token.
        Raises DecodeError.
        """
        ids, counts = self._padded(prompts)
        longest, start = ids.shape[1], 0
        logits = np.empty((self.batch, self.names.vocabulary), np.float32)
        while start < longest:
            size = min(chunk or longest, longest - start)
            first = not self.cache.lengths.any()
            if not first:
                # Padding is appended and rewound, so it needs room, too.
                size = min(size, max(1, self.capacity - int(self.cache.lengths.max())))
            fresh = np.clip(counts - start, 0, size)
            rows = self._append(
                ids[:, start : start + size], fresh, as_prompt=first, wanted=_any_end(counts, start, size)
            )
            for entry in np.flatnonzero((counts > start) & (counts <= start + size)):
                assert rows is not None
                logits[entry] = rows[entry, counts[entry] - start - 1]
            start += size
        # Logits of many tokens are large.
        self._long_call = None
        return logits

    def step(self, ids: ArrayLike, active: ArrayLike | None = None) -> F32:
        """Append one token (B,) per entry; logits (B, V). active (B,) bool: entries that are False stay as they are."""
        tokens = np.asarray(ids, np.int64).reshape(self.batch, 1)
        fresh = np.ones(self.batch, np.int64) if active is None else np.asarray(active, np.int64)
        rows = self._append(tokens, fresh, as_prompt=False, wanted=True)
        assert rows is not None
        return rows[:, 0]

    def burst(self, ids: ArrayLike) -> F32:
        """Append S tokens (B, S) per entry, such as guesses; logits (B, S, V). cache.rewind() drops the wrong ones."""
        tokens = np.asarray(ids, np.int64).reshape(self.batch, -1)
        fresh = np.full(self.batch, tokens.shape[1], np.int64)
        rows = self._append(tokens, fresh, as_prompt=False, wanted=True)
        assert rows is not None
        return rows

    def reset(self) -> None:
        """Forget all tokens."""
        self.cache.reset()

    def branch(self) -> DecodeSession:
        """A second decoder over the same model, weights shared, that goes on from here with a cache of its own."""
        other = copy.copy(self)
        other.cache = self.cache.clone()
        other._calls, other._long_call = {}, None
        return other

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Ids, Ids]:
        """Token ids (B, longest), padded by 0, and their numbers (B,)."""
        if len(prompts) != self.batch or not all(len(p) for p in prompts):
            msg = f"{len(prompts)} prompts of {[len(p) for p in prompts]} tokens: wants {self.batch}, none empty"
            raise DecodeError(msg)
        counts = np.array([len(p) for p in prompts], np.int64)
        after = self.cache.lengths + counts
        if after.max() > self.capacity:
            msg = f"the prompt would make {after.max()} tokens; the cache has room for {self.capacity}. Allocate more"
            raise DecodeError(msg)
        ids = np.zeros((self.batch, counts.max()), np.int64)
        for row, tokens in zip(ids, prompts, strict=True):
            row[: len(tokens)] = tokens
        return ids, counts

    def _append(self, ids: Ids, fresh: Ids, *, as_prompt: bool, wanted: bool) -> F32 | None:
        """Run tokens (B, S), of which the first `fresh` (B,) of each entry count; logits (B, S, V) if wanted."""
        size, before = ids.shape[1], self.cache.lengths
        unknown = ids[(ids < 0) | (ids >= self.names.vocabulary)]
        if unknown.size:
            msg = f"token {unknown[0]}: the model's vocabulary has {self.names.vocabulary}"
            raise DecodeError(msg)
        if not as_prompt:
            self._check_append(size)
        # Beyond an entry's own tokens come others, in rows that are dropped again.
        after = before + (fresh if as_prompt else size)
        if size == 1:
            # Only a full entry that waits has no row for that: it repeats its last token.
            full = (fresh == 0) & (before == self.capacity)
            if (full & (self._last_lengths != before)).any():
                msg = f"a full entry (lengths {before.tolist()}) cannot wait after a load: allocate one token more"
                raise DecodeError(msg)
            ids = np.where(full[:, None], self._last_ids[:, None], ids)
            after = np.where(full, before, after)
        if after.max() > self.capacity:
            msg = f"{size} more tokens do not fit: lengths {before.tolist()}, capacity {self.capacity}"
            raise CacheError(msg)
        call = self._call(size, as_prompt)
        call.write(ids, after)
        call.run()
        self.cache.advance(fresh)
        # The last token that counted; an entry without new ones keeps its own.
        last = np.take_along_axis(ids, np.maximum(fresh - 1, 0)[:, None], 1)[:, 0]
        self._last_ids = np.where(fresh > 0, last, self._last_ids)
        self._last_lengths = np.where(fresh > 0, self.cache.lengths, self._last_lengths)
        return call.logits() if wanted else None

    def _check_append(self, size: int) -> None:
        if size > 1 and self.batch > 1:
            for layer in self.model.layers:
                if not layer.quantized:
                    msg = (
                        f"{layer.node}: its {layer.cache_dtype} cache takes several tokens after the first ones for "
                        f"one batch entry only, and there are {self.batch}. Use chunk=1, batch 1, or quantize the layer"
                    )
                    raise DecodeError(msg)

    def _call(self, size: int, as_prompt: bool) -> _Call:
        if not as_prompt and size >= self.capacity:
            msg = f"{size} tokens, a cache for {self.capacity}: a call that is not a whole prompt needs room beyond it"
            raise DecodeError(msg)
        columns = size if as_prompt else self.capacity
        if as_prompt or size > MAX_CAPTURED_TOKENS:
            if self._long_call is None or self._long_call[0] != (size, as_prompt):
                self._long_call = None
                self._long_call = (size, as_prompt), _Call(self, size, columns, graph=0)
            return self._long_call[1]
        if size not in self._calls:
            self._calls[size] = _Call(self, size, columns, graph=next(self._graph_ids))
        return self._calls[size]


class _Call:
    """Buffers and binding of calls of S tokens. columns: width of the mask, which is total_sequence_length.

    graph: the number of its CUDA graph; 0 runs without one.
    """

    def __init__(self, owner: DecodeSession, size: int, columns: int, graph: int) -> None:
        self.owner, self.size, self.columns = owner, size, columns
        cache, names, batch = owner.cache, owner.names, owner.batch
        self.device, self.device_id = cache.memory.device, cache.memory.device_id
        self.binding = owner.session.io_binding()
        cache.bind(self.binding)
        shapes: dict[str, tuple[int, ...]] = {
            names.ids: (batch, size),
            names.mask: (batch, columns),
            names.positions: (batch, size),
        }
        shapes[owner.model.lengths] = (batch, 1)[: names.lengths_rank]
        self._arrays = {n: np.zeros(s, names.types[n]) for n, s in shapes.items() if n}
        self._values = {n: self._place(array) for n, array in self._arrays.items()}
        for name, value in self._values.items():
            self.binding.bind_ortvalue_input(name, value)
        if owner.model.total:
            self._total = np.array([columns], names.types[owner.model.total])
            self.binding.bind_cpu_input(owner.model.total, self._total)
        width = names.vocabulary * ELEMENT_BYTES[names.logits_type]
        self._logits = cache.memory.zeros((batch, size, width))
        shape = [batch, size, names.vocabulary]
        where = self.device, self.device_id
        self.binding.bind_output(names.logits, *where, names.logits_type, shape, self._logits.data_ptr())
        for name in names.unused_outputs:
            self.binding.bind_output(name, *where)
        self._options = ort.RunOptions()
        if owner.captured:
            self._options.add_run_config_entry("gpu_graph_id", str(graph or -1))

    def _place(self, array: NDArray[Any]) -> ort.OrtValue:
        """On the CPU the array itself."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.device, self.device_id)

    def write(self, ids: Ids, after: Ids) -> None:
        """Fill the inputs. ids (B, S); after (B,): tokens of each entry when the call is done."""
        names = self.owner.names
        values: dict[str, NDArray[Any]] = {names.ids: ids}
        values[names.mask] = np.arange(self.columns) < after[:, None]
        values[names.positions] = np.maximum(after[:, None] - self.size, 0) + np.arange(self.size)
        values[self.owner.model.lengths] = after - 1
        for name, array in self._arrays.items():
            array[...] = values[name].reshape(array.shape)
            if self.device != "cpu":
                self._values[name].update_inplace(array)

    def run(self) -> None:
        """Run the model; returns when the device is done."""
        self.owner.session.run_with_iobinding(self.binding, self._options)

    def logits(self) -> F32:
        """(B, S, V) float32, copied to the host."""
        return as_float32(self._logits.numpy(), self.owner.names.logits_type)


def _any_end(counts: Ids, start: int, size: int) -> bool:
    return bool(((counts > start) & (counts <= start + size)).any())
