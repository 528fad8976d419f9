"""Whether a call did what it must: float64 attention over the cache as it is in memory, and the rows it appended.

Long caches have too many tokens to look at in full: a few (batch entry, KV head) pairs and query rows are compared,
each over all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from python_tests.bench.gqa_case import Case
from python_tests.bench.gqa_memory import from_stored
from python_tests.reference import format as kv
from python_tests.reference.format import F64, U8, Array, CacheDtype
from python_tests.reference.rotary import rotate

FORMATS = {"int8": CacheDtype.INT8, "fp8": CacheDtype.FP8, "int4": CacheDtype.INT4}
# Largest error of the output in units of its largest value, by activation type.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 4e-2}
# An appended value may lie one code beside the reference's: kernels may round K after rotary to 16 bit first.
CODES = 1.01
TOKENS_AT_ONCE = 32768
TOKENS_COMPARED = 2**17

# Bytes of a state tensor of the layer under test: (name, offset, size) -> bytes.
ReadState = Callable[[str, int, int], U8]


@dataclass(frozen=True)
class Errors:
    """output: in units of the largest value; appended: in codes, or in units of a 16-bit type's rounding."""

    output: float
    appended: float

    def fault(self, case: Case) -> str:
        """What is wrong, empty if nothing."""
        if not self.output <= TOLERANCE[case.activation]:
            return f"wrong output: relative error {self.output:.2e}"
        return "" if self.appended <= CODES else f"wrong cache: an appended value is {self.appended:.1f} codes off"


class Checker:
    """One layer after a call. values: the shared inputs' values by name; output: (B, S, N, D)."""

    def __init__(self, case: Case, values: dict[str, Array], read: ReadState) -> None:
        self.case, self.values, self.read = case, values, read
        m = case.model
        query, key, value = self._heads()
        self.value = value
        positions: Array = np.tile(case.tokens - case.seq + np.arange(case.seq), (case.batch, 1))
        angles = (values["cos_cache"], values["sin_cache"])
        self.query = rotate(query, *angles, positions, interleaved=False)
        self.key = rotate(key, *angles, positions, interleaved=False)
        self.scale = m.head_size**-0.5

    def _heads(self) -> tuple[Array, Array, Array]:
        m, lead = self.case.model, (self.case.batch, self.case.seq)
        if not self.case.packed:
            counts = (("query", m.heads), ("key", m.kv_heads), ("value", m.kv_heads))
            query, key, value = (self.values[n].reshape(*lead, count, m.head_size) for n, count in counts)
            return query, key, value
        heads = self.values["query"].reshape(*lead, m.heads + 2 * m.kv_heads, m.head_size)
        parts = np.split(heads, [m.heads, m.heads + m.kv_heads], axis=2)
        return parts[0], parts[1], parts[2]

    def _raw(self, name: str, entry: int, head: int, first: int, count: int) -> U8:
        tensor = self.case.state()[name]
        row = tensor.nbytes // (tensor.shape[0] * tensor.shape[1] * tensor.shape[2])
        start = (entry * tensor.shape[1] + head) * tensor.shape[2] + first
        return self.read(name, start * row, count * row).reshape(count, row)

    def scales(self, side: str, entry: int, head: int, first: int, count: int) -> Array:
        """Scales that broadcast to (count, D)."""
        name = f"{side[0]}_scale"
        if name in self.case.state():
            raw = self._raw(name, entry, head, first, count)
            return from_stored(raw.reshape(-1), self.case.scale_type).reshape(count, 1)
        static = self.values[name]
        return static if static.size == 1 else static[0, head]

    def stored(self, side: str, entry: int, head: int, first: int, count: int) -> F64:
        """Values (count, D) that the cache holds for K ("key") or V ("value")."""
        raw, d = self._raw(f"past_{side}", entry, head, first, count), self.case.model.head_size
        if not self.case.quantized:
            return np.asarray(from_stored(raw.reshape(-1), self.case.cache).reshape(count, d), np.float64)
        scale = self.scales(side, entry, head, first, count)
        return np.asarray(kv.dequantize(raw, scale, FORMATS[self.case.cache], d), np.float64)

    def pairs(self) -> list[tuple[int, int]]:
        """(batch entry, KV head) pairs to compare, the first and the last of all among them."""
        kv_heads = self.case.model.kv_heads
        total = self.case.batch * kv_heads
        count = min(total, max(2, min(8, TOKENS_COMPARED // self.case.attended)))
        return [divmod(int(i), kv_heads) for i in np.unique(np.linspace(0, total - 1, count).astype(int))]

    def query_rows(self) -> list[int]:
        """New tokens whose output is compared."""
        last = self.case.seq - 1
        return sorted({0, last // 2, last})

    def _blocks(self, entry: int, head: int, low: int, high: int) -> Iterator[tuple[int, F64, F64]]:
        """First token, K and V of consecutive tokens from low to high; a prompt's are the exact new rows."""
        for first in range(low, high, TOKENS_AT_ONCE):
            count = min(TOKENS_AT_ONCE, high - first)
            if self.case.prompt:
                cut = np.s_[entry, first : first + count, head]
                yield first, self.key[cut].astype(np.float64), self.value[cut].astype(np.float64)
            else:
                key, value = (self.stored(side, entry, head, first, count) for side in ("key", "value"))
                yield first, key, value

    def attention(self, entry: int, head: int, rows: list[int], window: int) -> F64:
        """Output (rows, G, D) of one KV head's query heads, softmax over blocks with a running maximum."""
        case, group = self.case, self.case.group
        heads = slice(head * group, (head + 1) * group)
        query = self.query[entry, rows, heads].astype(np.float64)
        at = np.array([case.tokens - case.seq + row for row in rows])
        peak: Array = np.full((len(rows), group, 1), -np.inf)
        if case.model.sinks:
            peak = np.broadcast_to(self.values["head_sink"][heads].astype(np.float64)[:, None], peak.shape).copy()
        total: Array = np.exp(peak - peak) if case.model.sinks else np.zeros_like(peak)
        result: Array = np.zeros_like(query)
        low = 0 if window < 0 else max(0, int(at[0]) - window)
        for first, key, value in self._blocks(entry, head, low, int(at[-1]) + 1):
            tokens = first + np.arange(len(key))
            seen = tokens[None] <= at[:, None]
            if window >= 0:
                seen &= tokens[None] >= at[:, None] - window
            scores = np.where(seen[:, None], query @ key.T * self.scale, -np.inf)
            now = np.maximum(peak, scores.max(axis=-1, keepdims=True))
            # A row that has seen no token yet has no maximum to subtract.
            base = np.where(np.isfinite(now), now, 0)
            weights, shrink = np.exp(scores - base), np.exp(peak - base)
            total, peak = total * shrink + weights.sum(axis=-1, keepdims=True), now
            result = result * shrink + weights @ value
        return np.asarray(result / total, np.float64)

    def output_error(self, output: Array, pairs: list[tuple[int, int]]) -> float:
        """Largest error over pairs and query rows. Releases differ by one token in what a window is: the better."""
        rows, group, largest = self.query_rows(), self.case.group, 0.0
        window = self.case.model.window
        for entry, head in pairs:
            got = output[entry, rows, head * group : (head + 1) * group].astype(np.float64)
            found = []
            for size in {window, window - 1 if window > 0 else window}:
                wanted = self.attention(entry, head, rows, size)
                found.append(float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted))))
            # NaN must not lose against a number.
            largest = float(np.maximum(largest, min(found)))
        return largest

    def append_error(self, pairs: list[tuple[int, int]]) -> float:
        """Largest distance of an appended value from the reference's, in codes at that value."""
        case, largest = self.case, 0.0
        new = [*range(min(case.seq, 32)), case.seq - 1]
        for entry, head in pairs:
            for side, exact in (("key", self.key), ("value", self.value)):
                values = np.asarray(exact[entry, new, head], np.float32)
                first = case.tokens - case.seq
                got = np.concatenate([self.stored(side, entry, head, first + row, 1) for row in new])
                wanted, step = self._appended(side, values, head)
                largest = float(np.maximum(largest, np.max(np.abs(got - wanted) / step)))
        return largest

    def _appended(self, side: str, values: Array, head: int) -> tuple[Any, Any]:
        """What the cache must hold for values (n, D), and the distance of two codes there."""
        case = self.case
        if not case.quantized:
            unit = {"fp32": 2.0**-20, "fp16": 2.0**-9, "bf16": 2.0**-6}[case.cache]
            return values.astype(np.float64), unit * np.maximum(np.abs(values), 2.0**-4)
        dtype = FORMATS[case.cache]
        if (case.k_mode if side == "key" else case.v_mode) == "PER_TOKEN":
            kind: Any = np.float16 if case.scale_type == "fp16" else np.float32
            codes, scales = kv.quantize_per_token(values, dtype, kind)
        else:
            scales = self.scales(side, 0, head, 0, 1)
            codes = kv.quantize_static(values, scales, dtype)
        wanted = kv.dequantize(codes, scales, dtype, case.model.head_size)
        scale = np.broadcast_to(scales.astype(np.float64), wanted.shape)
        if dtype is not CacheDtype.FP8:
            return wanted, scale
        return wanted, np.maximum(np.abs(wanted) / 8, scale * 2.0**-9)

    def errors(self, output: Array, first_only: bool = False) -> Errors:
        """Compare the output (B, S, N, D) and the appended rows."""
        pairs = self.pairs()[: 1 if first_only else None]
        if not np.isfinite(output.astype(np.float32)).all():
            return Errors(float("nan"), 0.0)
        return Errors(self.output_error(output, pairs), self.append_error(pairs))
