"""Bytes and scales of a quantized KV cache.

A cache row holds the D values of one (token, KV head). Rows are quantized from float32 values; a stored scale is
float32, or float16 for a per-token scale cache. Every operation below is one IEEE float32 operation, so the bytes
that a kernel must produce are exact.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
U8: TypeAlias = NDArray[np.uint8]
ScaleType: TypeAlias = type[np.float32] | type[np.float16]

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
INT4_ZERO_BYTE = 0x88
FLOAT16_SCALE_MIN = 2.0**-24
FLOAT16_SCALE_MAX = 65504.0


class CacheDtype(StrEnum):
    """Values of the attribute kv_cache_dtype that name a quantized format."""

    INT8 = "int8"
    FP8 = "float8e4m3fn"
    INT4 = "int4"


class Granularity(StrEnum):
    """Values of the attributes k_quant_type and v_quant_type."""

    NONE = "NONE"
    PER_TENSOR = "PER_TENSOR"
    PER_CHANNEL = "PER_CHANNEL"
    PER_TOKEN = "PER_TOKEN"


QMAX = {CacheDtype.INT8: 127.0, CacheDtype.FP8: E4M3_MAX, CacheDtype.INT4: 7.0}
# Static scales use the whole two's complement range, as upstream does.
_STATIC_MIN = {CacheDtype.INT8: -128.0, CacheDtype.INT4: -8.0}


def row_bytes(dtype: CacheDtype, head_size: int) -> int:
    """Bytes of one cache row of head_size values."""
    return (head_size + 1) // 2 if dtype is CacheDtype.INT4 else head_size


def zero_code_byte(dtype: CacheDtype) -> int:
    """The byte in which every code is 0."""
    return INT4_ZERO_BYTE if dtype is CacheDtype.INT4 else 0


def _e4m3_magnitudes() -> F32:
    codes = np.arange(E4M3_NAN)
    exponent, mantissa = codes >> 3, codes & 7
    subnormal = mantissa * 2.0**-9
    normal = (8 + mantissa) * 2.0 ** (exponent - 10.0)
    return np.where(exponent == 0, subnormal, normal).astype(np.float32)


_MAGNITUDES = _e4m3_magnitudes()
# A midpoint of two neighbours has one mantissa bit more than they have: exact in float32.
_MIDPOINTS = ((_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2).astype(np.float32)
_DECODED = np.concatenate([_MAGNITUDES, [np.nan], -_MAGNITUDES, [np.nan]]).astype(np.float32)


def encode_e4m3(values: Array) -> U8:
    """Round float32 values to e4m3 (fn): nearest, ties to even, saturating at +-448; NaN becomes 0x7F."""
    values = np.asarray(values, np.float32)
    magnitude = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    below = np.searchsorted(_MIDPOINTS, magnitude, side="left")
    on_midpoint = _MIDPOINTS[np.minimum(below, len(_MIDPOINTS) - 1)] == magnitude
    codes: Array = below + (on_midpoint & (below % 2 == 1))
    codes = np.where(np.signbit(values), codes | 0x80, codes)
    return np.where(np.isnan(values), E4M3_NAN, codes).astype(np.uint8)


def decode_e4m3(codes: Array) -> F32:
    """The float32 values of e4m3 (fn) bytes."""
    decoded: F32 = _DECODED[np.asarray(codes).view(np.uint8)]
    return decoded


def pack(codes: Array, dtype: CacheDtype) -> Array:
    """Codes (..., D) -> cache rows: int8 bytes, uint8 e4m3 bytes, or uint8 nibble pairs (..., ceil(D / 2)).

    An int4 byte holds the even element plus 8 in its low and the odd element plus 8 in its high half.
    """
    if dtype is CacheDtype.INT8:
        return codes.astype(np.int8)
    if dtype is CacheDtype.FP8:
        return codes.astype(np.uint8)
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    nibbles = (codes.astype(np.int16) + 8).astype(np.uint8)
    return np.asarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), np.uint8)


def unpack(rows: Array, dtype: CacheDtype, head_size: int) -> F32:
    """Cache rows -> the values of their codes (..., D), before the scale."""
    if dtype is CacheDtype.INT8:
        return np.asarray(rows.view(np.int8), np.float32)
    if dtype is CacheDtype.FP8:
        return decode_e4m3(rows)
    nibbles = np.stack([rows & 15, rows >> 4], axis=-1).reshape(*rows.shape[:-1], -1)
    return np.asarray(nibbles[..., :head_size].astype(np.float32) - 8, np.float32)


def token_scales(values: Array, dtype: CacheDtype, scale_type: ScaleType) -> Array:
    """Values (..., D) float32 -> their stored scales (..., 1): amax / qmax, NaN and Inf kept."""
    amax = np.max(np.abs(values), axis=-1, keepdims=True)
    scale = (amax / np.float32(QMAX[dtype])).astype(np.float32)
    if scale_type is np.float32:
        return np.asarray(scale)
    clamped = np.clip(scale, np.float32(FLOAT16_SCALE_MIN), np.float32(FLOAT16_SCALE_MAX))
    stored = np.where(np.isfinite(scale), clamped, scale)
    return np.asarray(np.where(amax == 0, np.float32(0), stored), np.float16)


def encode(quotient: Array, dtype: CacheDtype, low: float) -> Array:
    """Round quotients value / scale to codes; integer codes are clamped to [low, qmax]. NaN is 0 or e4m3's NaN."""
    if dtype is CacheDtype.FP8:
        return encode_e4m3(quotient)
    rounded = np.clip(np.rint(quotient), low, QMAX[dtype])
    return np.where(np.isnan(quotient), 0, rounded).astype(np.int8)


def _quotient(values: Array, scales: Array) -> F32:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient: F32 = np.divide(values, scales.astype(np.float32), dtype=np.float32)
    return quotient


def quantize_per_token(values: Array, dtype: CacheDtype, scale_type: ScaleType) -> tuple[Array, Array]:
    """Values (..., D) float32 -> (cache rows, stored scales (..., 1)). Codes use the scale as it is stored."""
    scales = token_scales(values, dtype, scale_type)
    codes = encode(_quotient(values, scales), dtype, -QMAX[dtype])
    usable = np.isfinite(scales) & (scales != 0)
    return pack(np.where(usable, codes, 0), dtype), scales


def quantize_static(values: Array, scales: Array, dtype: CacheDtype) -> Array:
    """Values (..., Hkv, tokens, D) float32 and scales that broadcast to them -> cache rows."""
    codes = encode(_quotient(values, scales), dtype, _STATIC_MIN.get(dtype, 0.0))
    return pack(np.where(np.broadcast_to(scales, values.shape) == 0, 0, codes), dtype)


def dequantize(
    rows: Array, scales: Array, dtype: CacheDtype, head_size: int, precision: type[Any] = np.float64
) -> Array:
    """Cache rows and scales that broadcast to (..., D) -> values in the given precision."""
    with np.errstate(invalid="ignore", over="ignore"):
        values: Array = unpack(rows, dtype, head_size).astype(precision) * scales.astype(precision)
    return values


def codes_near(values: Array, scales: Array, dtype: CacheDtype, per_token: bool) -> tuple[Array, Array]:
    """The smallest and largest cache codes of quotients moved by two float32 units in the last place.

    They differ from the exact code only where the quotient lies at a rounding boundary. Unpacked, as encode().
    """
    low = -QMAX[dtype] if per_token else _STATIC_MIN.get(dtype, 0.0)
    quotient, step = _quotient(values, scales), np.float32(2.0**-22)
    usable = np.isfinite(scales) & (scales != 0)
    ends = [np.where(usable, encode(quotient * (1 + s), dtype, low), 0) for s in (-step, step)]
    return ends[0], ends[1]
