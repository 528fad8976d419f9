"""Cases of the tests that run on a GPU whatever provider the rest of the run is for."""

from __future__ import annotations

from dataclasses import replace

from python_tests.op.gqa_case import Case

_BASE = Case(id="cuda", activation="float16", half_products=True)


def cuda_case(name: str, **changes: object) -> Case:
    """A case for the CUDA provider: float16 activations unless the changes say otherwise."""
    return replace(_BASE, id=name, **changes)  # type: ignore[arg-type]
