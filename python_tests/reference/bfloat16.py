"""bfloat16 in NumPy, which has no such type: values in float32, stored bits in uint16."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from python_tests.reference.format import F32, Array

U16: TypeAlias = NDArray[np.uint16]

_QUIET_NAN = np.uint16(0x7FC0)


def pack_bfloat16(values: Array) -> U16:
    """The bits of float32 values, rounded to nearest, ties to even; beyond the range Inf. NaN stays NaN."""
    values = np.asarray(values, np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    # Half of the last kept unit, less one where that unit is even: a carry into the exponent is the right rounding.
    half_unit = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    with np.errstate(over="ignore"):
        rounded = ((bits + half_unit) >> np.uint32(16)).astype(np.uint16)
    sign = (bits >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)
    packed: U16 = np.where(np.isnan(values), sign | _QUIET_NAN, rounded).astype(np.uint16)
    return packed


def unpack_bfloat16(bits: Array) -> F32:
    """The float32 values of bfloat16 bits (uint16)."""
    bits = np.asarray(bits)
    wide = np.ascontiguousarray(bits).view(np.uint16).reshape(bits.shape).astype(np.uint32) << np.uint32(16)
    values: F32 = wide.view(np.float32)
    return values


def round_bfloat16(values: Array) -> F32:
    """Values as bfloat16 holds them, in float32."""
    return unpack_bfloat16(pack_bfloat16(values))
