"""The benchmark's checker agrees with the reference of the operator tests, and sees what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from python_tests.bench.gqa_case import Case, with_cache
from python_tests.bench.gqa_expected import FORMATS, Checker
from python_tests.bench.gqa_memory import Allocator, activation_values, as_stored, from_stored, state_kind
from python_tests.reference.attention import AttentionOptions
from python_tests.reference.format import U8, Array, Granularity
from python_tests.reference.step import Cache, Inputs, Operator, run_step

CASES = {
    "int8": with_cache(Case(tokens=40, batch=2), "int8"),
    "fp8-fp16-scales": with_cache(Case(tokens=40, preset="qwen2.5-7b"), "fp8", "fp16"),
    "int4-burst": with_cache(Case(tokens=40, seq=4, packed=False, batch=2), "int4"),
    "int8-static": with_cache(Case(tokens=40, activation="fp32"), "int8:PER_TENSOR"),
    "int4-channel": with_cache(Case(tokens=40, activation="fp32"), "int4:PER_CHANNEL"),
    "mixed": with_cache(Case(tokens=40, activation="fp32"), "int8:PER_CHANNEL/PER_TOKEN"),
    "window": with_cache(Case(tokens=40, preset="mistral", window=9, seq=3), "int8"),
    "sinks": with_cache(Case(tokens=40, preset="gpt-oss"), "int8"),
    "prompt": with_cache(Case(tokens=20, seq=20, prompt=True, batch=2), "int8"),
    "room": with_cache(Case(tokens=40, capacity=64, preset="gemma-8-1", batch=2), "int8"),
    "plain": with_cache(Case(tokens=40, activation="fp32", batch=2), "plain"),
}


@dataclass
class Called:
    """A case's tensors after the reference ran it: state by name, and the output (B, S, N, D)."""

    case: Case
    values: dict[str, Array]
    state: dict[str, Array]
    output: Array

    def errors(self, output: Array | None = None) -> Any:  # noqa: ANN401 - Errors
        """What the checker finds."""
        raw = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in self.state.items()}

        def read(name: str, offset: int, size: int) -> U8:
            return raw[name][offset : offset + size]

        return Checker(self.case, self.values, read).errors(self.output if output is None else output)


def random_state(case: Case) -> dict[str, Array]:
    """Caches as the benchmark fills them, in the types of the reference."""
    allocator, state = Allocator("cpu", None), {}
    for number, (name, tensor) in enumerate(case.state().items()):
        memory = allocator.make(tensor.nbytes)
        allocator.fill(memory, tensor.nbytes, *state_kind(case, name), number)
        raw = memory.read()
        if name.endswith("_scale"):
            state[name] = from_stored(raw, case.scale_type).reshape(tensor.shape)
        elif not case.quantized:
            state[name] = from_stored(raw, case.cache).reshape(tensor.shape)
        else:
            state[name] = raw.view(np.int8 if case.cache == "int8" else np.uint8).reshape(tensor.shape)
    return state


def called(case: Case) -> Called:
    """The reference's step on random contents."""
    m, values, state = case.model, activation_values(case), random_state(case)
    operator = Operator(
        num_heads=m.heads, kv_num_heads=m.kv_heads, head_size=m.head_size, dtype=FORMATS.get(case.cache),
        k_quant=Granularity(case.k_mode or "NONE"), v_quant=Granularity(case.v_mode or "NONE"), do_rotary=True,
        attention=AttentionOptions(local_window_size=m.window),
    )  # fmt: skip
    inputs = Inputs(
        query=values["query"], key=values.get("key"), value=values.get("value"), seqlens_k=values["seqlens_k"],
        total_sequence_length=case.total, cos_cache=values["cos_cache"], sin_cache=values["sin_cache"],
        head_sink=values.get("head_sink"),
    )  # fmt: skip
    scales = [state.get(name, values.get(name)) for name in ("k_scale", "v_scale")]
    step = run_step(operator, inputs, Cache(state["past_key"], state["past_value"], scales[0], scales[1]))
    after = {"past_key": step.cache.key, "past_value": step.cache.value, "k_scale": step.cache.k_scale}
    after["v_scale"] = step.cache.v_scale
    kept = {name: array for name, array in after.items() if name in state and array is not None}
    return Called(case, values, kept, step.output)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_checker_agrees_with_the_reference(case: Case) -> None:
    """float64 on both sides: nothing but the order of sums is different."""
    errors = called(case).errors()
    assert errors.output < 1e-9
    assert errors.appended < 1e-6
    assert errors.fault(case) == ""


@pytest.mark.parametrize("name", ["int8", "int4-burst", "int8-static", "prompt", "plain"])
def test_checker_sees_wrong_outputs(name: str) -> None:
    """Zero, NaN, the heads of another group, and a wrong last token."""
    it = called(CASES[name])
    last = it.output.copy()
    last[-1, -1] = 0
    nan = it.output.copy()
    nan[0, 0, 0, 0] = np.nan
    for output in (np.zeros_like(it.output), nan, np.roll(it.output, 1, axis=2), last):
        assert it.errors(output).fault(it.case).startswith("wrong output")


@pytest.mark.parametrize("name", ["int8", "fp8-fp16-scales", "int4-burst", "int4-channel", "plain"])
def test_checker_sees_a_wrong_cache(name: str) -> None:
    """A token that was not appended; scales twice as large; K and V exchanged."""
    it = called(CASES[name])
    rows = it.case.tokens - it.case.seq
    missing = {**it.state, "past_key": it.state["past_key"].copy()}
    missing["past_key"][:, :, rows:] = missing["past_key"][:, :, :1]
    faults = [missing, {**it.state, "past_key": it.state["past_value"], "past_value": it.state["past_key"]}]
    if "k_scale" in it.state:
        faults.append({**it.state, "k_scale": 2 * it.state["k_scale"]})
    for state in faults:
        assert Called(it.case, it.values, state, it.output).errors().fault(it.case)


def test_stored_types() -> None:
    """Values survive the bytes they are stored in."""
    values = np.array([1.5, -2.0, 0.0], np.float32)
    for kind, size in (("fp32", 12), ("fp16", 6), ("bf16", 6)):
        raw = as_stored(values, kind).view(np.uint8)
        assert raw.size == size
        assert from_stored(raw, kind).tolist() == values.tolist()
