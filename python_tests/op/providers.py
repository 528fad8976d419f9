"""Execution providers that the operator tests run on."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

FloatName: TypeAlias = Literal["float32", "float16", "bfloat16"]
# Set by conftest.py from --provider before tests are collected; processes that tests start inherit it.
SELECTED = "KVQ_TEST_PROVIDER"


@dataclass(frozen=True)
class Provider:
    """An execution provider under test: its name, where its buffers lie, and the activation types it has.

    exact_ties: whether a code at a rounding boundary must be the reference's, too.
    independent_rows: whether one row's output bits cannot depend on values of other rows or tokens.
    half_products: whether matrix products have 16-bit operands; float32 otherwise.
    options: provider options of its sessions, beside the device.
    """

    name: str
    device: str
    activations: tuple[FloatName, ...]
    exact_ties: bool
    independent_rows: bool
    half_products: bool
    device_id: int = 0
    options: tuple[tuple[str, str], ...] = ()

    def on(self, device_id: int) -> Provider:
        """The provider on another device."""
        return replace(self, device_id=device_id)

    def having(self, **options: object) -> Provider:
        """The provider with more options."""
        merged = dict(self.options) | {name: str(value) for name, value in options.items()}
        return replace(self, options=tuple(sorted(merged.items())))

    @property
    def session_entry(self) -> tuple[str, dict[str, str]]:
        """What onnxruntime.InferenceSession takes in its list of providers."""
        where = {} if self.device == "cpu" else {"device_id": str(self.device_id)}
        return self.name, where | dict(self.options)


CPU = Provider(
    "CPUExecutionProvider", "cpu", ("float32", "float16"),
    exact_ties=True, independent_rows=True, half_products=False,
)  # fmt: skip
CUDA = Provider(
    "CUDAExecutionProvider", "cuda", ("float16", "bfloat16"),
    exact_ties=True, independent_rows=False, half_products=True,
)  # fmt: skip
PROVIDERS = {"cpu": CPU, "cuda": CUDA}


def selected() -> Provider:
    """The provider of this test run."""
    return PROVIDERS[os.environ.get(SELECTED, "cpu")]
