"""A case of the operator tests on the CUDA kernels: 16-bit activations, and the device that the plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from python_tests.op.gqa_case import Case
from python_tests.op.providers import FloatName
from python_tests.reference.attention import NO_LIMIT
from python_tests.reference.bfloat16 import pack_bfloat16, unpack_bfloat16
from python_tests.reference.format import Array
from python_tests.reference.half_attention import HalfName


@dataclass(frozen=True, kw_only=True)
class KernelCase(Case):
    """multiprocessors: what the plan is made for, so that one GPU runs every number of splits; 0: the GPU's own.
    clusters: whether the plan may have any.
    """

    activation: FloatName = "float16"
    half_products: bool = True
    multiprocessors: int = 0
    clusters: bool = True

    @property
    def half(self) -> HalfName:
        """The activation type."""
        assert self.activation != "float32"
        return self.activation

    @property
    def window_argument(self) -> int:
        """local_window_size as the kernels get it: int32, no limit is -1."""
        return self.window if self.window < NO_LIMIT else -1


def to_bits(array: Array, half: HalfName) -> Array:
    """Activations as the device stores them."""
    return pack_bfloat16(array) if half == "bfloat16" else np.asarray(array, np.float16)


def from_bits(bits: Array, half: HalfName) -> Array:
    """Stored activations as values."""
    return unpack_bfloat16(bits) if half == "bfloat16" else bits
