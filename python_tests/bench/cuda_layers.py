"""Layers of a decoder on the device for benchmarks of the kernels alone: one call each, with caches of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from python_tests.kernel.device import Device
from python_tests.kernel.params import FORMATS, MODES, GqaParams, GqaPlan, KvSide
from python_tests.reference import format as kv
from python_tests.reference.format import F64, Array, CacheDtype, Granularity
from python_tests.reference.rotary import rotate

_PTR_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer. After the call a sequence has `tokens`, of which the last `seq` are new; seq == tokens: a prompt."""

    dtype: CacheDtype
    tokens: int
    seq: int = 1
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128

    @property
    def prompt(self) -> bool:
        """Attention over the new tokens only."""
        return self.seq == self.tokens and self.seq > 1

    @property
    def rows(self) -> int:
        """Cache rows of K or V."""
        return self.batch * self.kv_heads * self.tokens

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a cache row."""
        return kv.row_bytes(self.dtype, self.head_size)

    @property
    def cache_bytes(self) -> int:
        """Codes and float32 scales of K and V: what a step reads at least."""
        return 2 * self.rows * (self.row_bytes + 4)

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, masked ones left out."""
        visible = self.seq * (self.tokens - self.seq) + self.seq * (self.seq + 1) // 2
        return 4 * self.batch * self.heads * self.head_size * visible


@dataclass
class Layers:
    """`count` layers of one shape with random contents. Inputs, scratch and output are shared, caches are not."""

    device: Device
    shape: Shape
    count: int
    params: list[GqaParams] = field(default_factory=list)
    plan: GqaPlan = field(default_factory=GqaPlan)
    _addresses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        common = self._common()
        for layer in range(self.count):
            p = GqaParams.from_buffer_copy(common)
            for number, side in enumerate((p.k, p.v)):
                self._fill_side(side, 2 * layer + number)
            self.params.append(p)
        device = self.device
        self.plan = device.make_plan(self.params[0], device.multiprocessors, device.compute_capability, device.clusters)
        workspace = self._allocate(self.plan.workspace_bytes)
        counters = self._put(np.zeros(self.plan.counters, np.uint32))
        for p in self.params:
            device.bind_workspace(self.plan, workspace, p)
            p.counters = counters
        device.synchronize()

    def _allocate(self, size: int) -> int:
        self._addresses.append(self.device.allocate(max(size, _PTR_BYTES)))
        return self._addresses[-1]

    def _put(self, array: Array) -> int:
        address = self._allocate(array.nbytes)
        self.device.upload(address, np.ascontiguousarray(array))
        return address

    def _common(self) -> GqaParams:
        s, rng = self.shape, np.random.default_rng(1)
        sizes = (s.heads * s.head_size, s.kv_heads * s.head_size, s.kv_heads * s.head_size)
        self.inputs = [rng.standard_normal((s.batch, s.seq, n)).astype(np.float16) for n in sizes]
        half = s.head_size // 2
        angles = np.arange(s.tokens)[:, None] * 10000.0 ** (-np.arange(half)[None, :] / half)
        self.angles = (np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16))
        query, key, value = (self._put(x) for x in self.inputs)
        p = GqaParams(
            batch_size=s.batch, sequence_length=s.seq, num_heads=s.heads, kv_num_heads=s.kv_heads,
            group_size=s.heads // s.kv_heads, head_size=s.head_size, row_bytes=s.row_bytes, capacity=s.tokens,
            past_capacity=s.tokens, is_prompt=s.prompt, format=FORMATS[s.dtype], query=query, key=key, value=value,
            query_stride=sizes[0], kv_stride=sizes[1], rotary_dim=s.head_size, rotary_rows=s.tokens,
            scale=s.head_size**-0.5, local_window_size=-1,
        )  # fmt: skip
        p.seqlens_k = self._put(np.full(s.batch, s.tokens - 1, np.int32))
        p.cos_cache, p.sin_cache = (self._put(x) for x in self.angles)
        p.output = self._allocate(2 * s.batch * s.seq * sizes[0])
        return p

    def _fill_side(self, side: KvSide, seed: int) -> None:
        """Random codes, and scales around 1 / 100 that give values of about 1."""
        s, device = self.shape, self.device
        side.mode = MODES[Granularity.PER_TOKEN]
        side.codes, side.token_scale = self._allocate(s.rows * s.row_bytes), self._allocate(4 * s.rows)
        device.random_codes(side.codes, s.rows * s.row_bytes, seed)
        top = kv.QMAX[s.dtype]
        device.uniform(side.token_scale, s.rows, 0.5 / top, 2 / top, seed)

    def check(self) -> float:
        """Run the first layer; largest error of entry 0's last token in units of its largest value. Not for prompts."""
        s, p = self.shape, self.params[0]
        self.device.launch("gqa", p, self.plan)
        size = 2 * s.seq * s.heads * s.head_size
        got = self.device.download(p.output, size).view(np.float16).reshape(s.seq, s.heads, s.head_size)[-1]
        query = self.inputs[0][:1].reshape(1, s.seq, s.heads, s.head_size)
        positions = np.arange(s.tokens - s.seq, s.tokens)[None]
        rotated = rotate(query, *self.angles, positions, interleaved=False)[0, -1]
        group = s.heads // s.kv_heads
        wanted = np.concatenate([self._attend(h, rotated[h * group : (h + 1) * group]) for h in range(s.kv_heads)])
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    def _attend(self, head: int, query: Array) -> F64:
        """One KV head of entry 0, over the cache as it is on the device."""
        key, value = (self._values(side, head) for side in (self.params[0].k, self.params[0].v))
        scores = (query @ key.T * self.params[0].scale).astype(np.float64)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        output: F64 = weights @ value / weights.sum(axis=1, keepdims=True)
        return output

    def _values(self, side: KvSide, head: int) -> Array:
        s = self.shape
        size = s.tokens * s.row_bytes
        codes = self.device.download(side.codes + head * size, size).reshape(s.tokens, s.row_bytes)
        scales = self.device.download(side.token_scale + 4 * head * s.tokens, 4 * s.tokens).view(np.float32)
        return kv.dequantize(codes, scales[:, None], s.dtype, s.head_size, np.float32)

    def close(self) -> None:
        """Frees all memory."""
        for address in self._addresses:
            self.device.free(address)
