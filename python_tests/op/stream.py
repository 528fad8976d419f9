"""A growing sequence: tokens with random activations, fed to one session in pieces of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from python_tests.op.checks import check_cache, check_output
from python_tests.op.gqa_case import Case, make_inputs, poisoned_cache
from python_tests.op.gqa_model import (
    Buffers,
    build_model,
    cached_session,
    input_buffers,
    output_buffers,
    run,
)
from python_tests.op.providers import Provider
from python_tests.reference.format import Array
from python_tests.reference.step import Cache, Inputs, run_step


@dataclass
class Stream:
    """`tokens` tokens of every batch entry and the in-place cache that has taken some of them.

    Lengths are one number per batch entry; the host's total is the capacity, so that no piece is a prompt, unless
    said otherwise.
    """

    case: Case
    inputs: Inputs
    buffers: Buffers
    provider: Provider
    threads: int = 2

    @classmethod
    def start(cls, case: Case, tokens: int, provider: Provider, threads: int = 2) -> Stream:
        """An empty, poisoned cache. case.seq and case.totals are replaced."""
        whole = replace(case, seq=tokens, totals=(tokens,) * case.batch, total=case.capacity)
        inputs = make_inputs(whole)
        buffers = input_buffers(whole, inputs, poisoned_cache(whole, case.capacity), provider)
        return cls(whole, inputs, buffers, provider, threads)

    def piece(self, starts: tuple[int, ...], length: int, total: int | None = None) -> tuple[Case, Inputs]:
        """The call that feeds tokens starts[b] .. starts[b] + length of every entry b."""
        totals = tuple(s + length for s in starts)
        case = replace(self.case, seq=length, totals=totals, total=self.case.capacity if total is None else total)
        rows = np.array(starts)[:, None] + np.arange(length)[None, :]
        entry = np.arange(case.batch)[:, None]
        cut = [None if x is None else x[entry, rows] for x in (self.inputs.query, self.inputs.key, self.inputs.value)]
        assert cut[0] is not None
        lengths = (np.array(totals) - 1).astype(np.int32).reshape(self.inputs.seqlens_k.shape)
        inputs = replace(
            self.inputs,
            query=cut[0],
            key=cut[1],
            value=cut[2],
            seqlens_k=lengths,
            total_sequence_length=case.host_total,
        )
        return case, inputs

    def feed(self, starts: tuple[int, ...], length: int, *, total: int | None = None, check: bool = False) -> Array:
        """Append and attend; returns the output (B, length, N, D). check: compare this call with the reference."""
        case, inputs = self.piece(starts, length, total)
        before = self.cache() if check else None
        ins = input_buffers(case, inputs, poisoned_cache(case, 0), self.provider) | self._state()
        outs = output_buffers(case, ins, None, self.provider)
        run(cached_session(build_model(case), self.provider, "ORT_ENABLE_ALL", self.threads), ins, outs)
        output = outs["output"].read().reshape(case.batch, length, case.heads, case.head_size)
        if before is not None:
            expected = run_step(case.operator, inputs, before)
            check_cache(case, self.cache(), expected, exact_ties=self.provider.exact_ties)
            check_output(output, expected)
        return output

    def _state(self) -> Buffers:
        names = ("past_key", "past_value", "k_scale", "v_scale")
        return {name: self.buffers[name] for name in names if name in self.buffers}

    def cache(self) -> Cache:
        """A copy of the cache as it is now."""
        state = {name: buffer.read() for name, buffer in self._state().items()}
        return Cache(state["past_key"], state["past_value"], state.get("k_scale"), state.get("v_scale"))

    def stray_writes(self) -> list[str]:
        """Names of cache buffers around which something was written."""
        return [name for name, buffer in self._state().items() if buffer.stray_writes()]
