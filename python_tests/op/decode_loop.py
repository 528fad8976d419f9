"""A node with fixed buffers, as a decoder binds them: every step writes activations and lengths into them and runs."""

from __future__ import annotations

from dataclasses import replace

import onnxruntime as ort

from python_tests.op.checks import check_cache, check_output, first_difference
from python_tests.op.gqa_case import Case, as_type, make_inputs, make_past
from python_tests.op.gqa_model import (
    bind,
    build_model,
    input_buffers,
    make_session,
    output_buffers,
    read_cache_buffers,
)
from python_tests.op.providers import Provider
from python_tests.reference.format import Array
from python_tests.reference.step import Cache, Expected, Inputs, run_step

WRITTEN = ("query", "key", "value", "seqlens_k")
STATE = ("past_key", "past_value", "k_scale", "v_scale")


def step_inputs(case: Case, totals: tuple[int, ...], amplitude: float = 1.0) -> Inputs:
    """Activations for tokens that end at `totals`, other ones for other totals; K and V times amplitude.

    What a step does not write, such as the sink, is what make_inputs gives for the case.
    """
    inputs = make_inputs(replace(case, id=f"{case.id}-{totals}", totals=totals))
    if case.sink:
        inputs = replace(inputs, head_sink=make_inputs(case).head_sink)
    if inputs.key is None or inputs.value is None:
        return inputs
    key, value = (as_type(x * x.dtype.type(amplitude), case.activation) for x in (inputs.key, inputs.value))
    return replace(inputs, key=key, value=value)


class DecodeLoop:
    """One node, one binding, buffers that stay where they are; past is present unless the case says otherwise.

    past: what the cache holds at first; by default what make_past gives. cache_of: a loop whose buffers are this one's,
    too, as a prompt's and a step's are.
    """

    def __init__(
        self,
        case: Case,
        provider: Provider,
        *,
        session: ort.InferenceSession | None = None,
        past: Cache | None = None,
        cache_of: DecodeLoop | None = None,
    ) -> None:
        assert case.total is not None, "the host's total is the same for all steps"
        self.case, self.provider = case, provider
        self.session = make_session(build_model(case), provider) if session is None else session
        past = make_past(case) if past is None else past
        self.ins = input_buffers(case, make_inputs(case), past, provider)
        if cache_of is not None:
            self.ins |= {name: cache_of.ins[name] for name in STATE if name in self.ins}
        present = None if case.in_place else past
        self.outs = output_buffers(case, self.ins, present, provider)
        self.binding = bind(self.session, self.ins, self.outs)

    def load(self, inputs: Inputs) -> None:
        """Write a step's activations and lengths into the bound buffers."""
        for name in WRITTEN:
            array = getattr(inputs, name)
            if array is not None:
                self.ins[name].write(array)

    def run(self, options: ort.RunOptions | None = None) -> None:
        """Run, or replay, on what the buffers hold."""
        self.session.run_with_iobinding(self.binding, options)

    def step(self, inputs: Inputs, options: ort.RunOptions | None = None) -> Array:
        """Load and run; the output (B, S, N, D)."""
        self.load(inputs)
        self.run(options)
        return self.output()

    def output(self) -> Array:
        """The output as it is now."""
        shape = (self.case.batch, self.case.seq, self.case.heads, self.case.head_size)
        return self.outs["output"].read().reshape(shape)

    def cache(self) -> Cache:
        """A copy of present and its scales as they are now."""
        return read_cache_buffers(self.ins, self.outs)

    def past(self) -> Cache:
        """A copy of past and its scales as they are now."""
        scales = [self.ins[n].read() if n in self.ins else None for n in ("k_scale", "v_scale")]
        return Cache(self.ins["past_key"].read(), self.ins["past_value"].read(), scales[0], scales[1])

    def checked_step(self, inputs: Inputs, options: ort.RunOptions | None = None) -> Expected:
        """A step whose output, cache bytes, scales and guards are compared with the reference."""
        past, present = self.past(), None if self.case.in_place else self.cache()
        output = self.step(inputs, options)
        expected = run_step(self.case.operator, inputs, past, present)
        check_cache(self.case, self.cache(), expected, exact_ties=self.provider.exact_ties)
        check_output(output, expected)
        assert not self.stray_writes()
        return expected

    def stray_writes(self) -> list[str]:
        """Names of buffers around which something was written."""
        return [name for name, buffer in (self.ins | self.outs).items() if buffer.stray_writes()]


def same_bits(actual: Array, expected: Array, what: str) -> None:
    """Both hold the same bits; `what` says where the difference is."""
    bits = f"u{expected.dtype.itemsize}"
    same = actual.view(bits) == expected.view(bits)
    assert same.all(), f"{what}: {first_difference(actual, expected, same)}"


def same_state(left: DecodeLoop, right: DecodeLoop, what: str) -> None:
    """Outputs and caches of two loops hold the same bits."""
    same_bits(left.output(), right.output(), f"{what}, output")
    pairs = zip(vars(left.cache()).items(), vars(right.cache()).values(), strict=True)
    for (name, ours), theirs in pairs:
        if ours is not None and theirs is not None:
            same_bits(ours, theirs, f"{what}, {name}")
