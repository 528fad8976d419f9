"""A test case of the operator: shapes, formats and features, and the tensors that follow from them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from python_tests.op.providers import FloatName, selected
from python_tests.reference import format as kv
from python_tests.reference.attention import AttentionOptions
from python_tests.reference.bfloat16 import round_bfloat16
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.step import Cache, Inputs, Operator

POISON_BYTE = 0x7F
RotaryName: TypeAlias = Literal["none", "half", "interleaved"]
FloatType: TypeAlias = type[np.float32] | type[np.float16]
# NumPy has no bfloat16: its values are kept in float32.
FLOAT_TYPES: dict[FloatName, FloatType] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float32}


def as_type(values: Array, name: FloatName) -> Array:
    """Values rounded to a type, in its NumPy type."""
    return round_bfloat16(values) if name == "bfloat16" else np.asarray(values, FLOAT_TYPES[name])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Lengths: `totals` are the tokens T_b after it, one per batch entry; `capacity` rows are in past.

    total: the host's total_sequence_length, None = max(totals). A call with total == seq is a prompt.
    rotary_dim None: the whole head. activation and half_products, see Operator.half: those of the provider under test.
    """

    id: str
    dtype: CacheDtype | None = CacheDtype.INT8
    k_quant: Granularity = Granularity.PER_TOKEN
    v_quant: Granularity = Granularity.PER_TOKEN
    scale_type: FloatName = "float32"
    activation: FloatName = field(default_factory=lambda: selected().activations[0])
    half_products: bool = field(default_factory=lambda: selected().half_products)
    fp8_as_uint8: bool = False
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128
    capacity: int = 64
    seq: int = 1
    totals: tuple[int, ...] = (21, 21)
    total: int | None = None
    rotary: RotaryName = "none"
    rotary_dim: int | None = None
    cos_rows: int | None = None
    window: int = -1
    softcap: float = 0.0
    smooth: bool = False
    sink: bool = False
    scale: float = 0.0
    packed: bool = False
    in_place: bool = True
    seqlens_2d: bool = False

    @property
    def batch(self) -> int:
        """Batch entries."""
        return len(self.totals)

    @property
    def host_total(self) -> int:
        """The value of the input total_sequence_length."""
        return max(self.totals) if self.total is None else self.total

    @property
    def prompt(self) -> bool:
        """Whether the call is a prompt: attention then reads the exact keys and values."""
        return self.seq == self.host_total

    @property
    def present_capacity(self) -> int:
        """Rows of present."""
        return max(self.host_total, self.capacity)

    @property
    def pasts(self) -> tuple[int, ...]:
        """P_b: tokens before the call."""
        return tuple(0 if self.prompt else t - self.seq for t in self.totals)

    @property
    def activation_type(self) -> FloatType:
        """NumPy type of activations."""
        return FLOAT_TYPES[self.activation]

    @property
    def operator(self) -> Operator:
        """The reference's view of the node."""
        options = AttentionOptions(
            scale=self.scale, softcap=self.softcap, local_window_size=self.window, smooth_softmax=self.smooth
        )
        return Operator(
            num_heads=self.heads, kv_num_heads=self.kv_heads, head_size=self.head_size, dtype=self.dtype,
            k_quant=self.k_quant, v_quant=self.v_quant, do_rotary=self.rotary != "none",
            rotary_interleaved=self.rotary == "interleaved", attention=options,
            half=self.activation if self.half_products and self.activation != "float32" else None,
        )  # fmt: skip

    def rng(self, purpose: str) -> np.random.Generator:
        """Random numbers that depend on the id and the purpose only."""
        digest = hashlib.sha256(f"{self.id}/{purpose}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def _rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal values (..., D) whose amplitude differs between rows and between elements, as real K and V do."""
    row = np.exp(rng.normal(0, 0.6, (*shape[:-1], 1)))
    element = np.exp(rng.normal(0, 0.3, shape[-1:]))
    values: Array = (rng.standard_normal(shape) * row * element).astype(np.float32)
    return values


def make_inputs(case: Case) -> Inputs:
    """Activations, lengths and caches of angles for one call."""
    rng, kind = case.rng("inputs"), case.activation
    shape = (case.batch, case.seq)
    query = as_type(rng.standard_normal((*shape, case.heads, case.head_size)), kind)
    key, value = (as_type(_rows(rng, (*shape, case.kv_heads, case.head_size)), kind) for _ in range(2))
    if case.packed:
        joined = np.concatenate([query, key, value], axis=2)
        packed = joined.reshape(*shape, joined.shape[2] * case.head_size)
    flat = [x.reshape(*shape, x.shape[2] * case.head_size) for x in (query, key, value)]
    seqlens = np.array(case.totals, np.int64).astype(np.int32) - 1
    cos, sin = _angles(case)
    return Inputs(
        query=packed if case.packed else flat[0],
        key=None if case.packed else flat[1],
        value=None if case.packed else flat[2],
        seqlens_k=seqlens.reshape(-1, 1) if case.seqlens_2d else seqlens,
        total_sequence_length=case.host_total,
        cos_cache=cos,
        sin_cache=sin,
        head_sink=as_type(rng.normal(0, 2, case.heads), kind) if case.sink else None,
    )


def _angles(case: Case) -> tuple[Array | None, Array | None]:
    if case.rotary == "none":
        return None, None
    half = (case.rotary_dim or case.head_size) // 2
    rows = case.cos_rows or case.present_capacity + 1
    angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(half)[None, :] / half)
    return as_type(np.cos(angles), case.activation), as_type(np.sin(angles), case.activation)


def static_scale(case: Case, granularity: Granularity, purpose: str) -> Array:
    """A static scale that uses the range and lets the largest values saturate."""
    rng = case.rng(purpose)
    dtype = case.dtype or CacheDtype.INT8
    shape = (1,) if granularity is Granularity.PER_TENSOR else (1, case.kv_heads, 1, case.head_size)
    top = {CacheDtype.INT8: 127.0, CacheDtype.FP8: 448.0, CacheDtype.INT4: 7.0}[dtype]
    return (rng.uniform(3.0, 6.0, shape) / top).astype(np.float32)


def poisoned_cache(case: Case, capacity: int) -> Cache:
    """A cache whose every row holds 0x7F bytes and NaN scales; static scales are as in make_past."""
    shape = (case.batch, case.kv_heads, capacity, case.head_size)
    if case.dtype is None:
        return Cache(*(np.full(shape, np.nan, case.activation_type) for _ in range(2)))
    row = kv.row_bytes(case.dtype, case.head_size)
    storage = np.int8 if case.dtype is CacheDtype.INT8 else np.uint8
    codes = [np.full((*shape[:3], row), POISON_BYTE, storage) for _ in range(2)]
    scales: list[Array] = []
    for granularity, name in ((case.k_quant, "k_scale"), (case.v_quant, "v_scale")):
        if granularity is Granularity.PER_TOKEN:
            scales.append(np.full((*shape[:3], 1), np.nan, FLOAT_TYPES[case.scale_type]))
        else:
            scales.append(static_scale(case, granularity, name))
    return Cache(codes[0], codes[1], scales[0], scales[1])


def make_past(case: Case) -> Cache:
    """past: P_b quantized random rows in every batch entry, poison behind them."""
    cache, rng = poisoned_cache(case, case.capacity), case.rng("past")
    sides = ((cache.key, cache.k_scale, case.k_quant), (cache.value, cache.v_scale, case.v_quant))
    for rows, scale, granularity in sides:
        for b, past in enumerate(case.pasts):
            count = min(max(past, 0), case.capacity)
            values = _rows(rng, (case.kv_heads, count, case.head_size))
            fill_rows(case, rows[b, :, :count], scale, granularity, values, b)
    return cache


def fill_rows(case: Case, rows: Array, scale: Array | None, granularity: Granularity, values: Array, b: int) -> None:
    """Quantize values (Hkv, n, D) into the first rows of batch entry b."""
    if case.dtype is None or scale is None:
        rows[...] = as_type(values, case.activation)
    elif granularity is Granularity.PER_TOKEN:
        codes, scales = kv.quantize_per_token(values, case.dtype, scale.dtype.type)
        rows[...] = codes
        scale[b, :, : values.shape[1]] = scales
    else:
        rows[...] = kv.quantize_static(values, scale[0] if scale.ndim == 4 else scale, case.dtype)
