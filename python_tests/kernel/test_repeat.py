"""The same call again: equal bits. And a captured one at other lengths: equal to an eager call and to the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from python_tests.kernel.call import Call, Outcome
from python_tests.kernel.case import KernelCase, to_bits
from python_tests.kernel.device import Device, Graph
from python_tests.kernel.edges import FORMATS, HALVES
from python_tests.kernel.verify import judge
from python_tests.kernel.yardstick import expected_of
from python_tests.op.gqa_case import as_type, make_inputs, make_past
from python_tests.reference.format import CacheDtype, Granularity
from python_tests.reference.half_attention import HalfName
from python_tests.reference.step import Cache, Expected, Inputs

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "decode": {"seq": 1},
    "decode-16": {"seq": 4},
    "prefill": {"seq": 20},
}


def same(left: Outcome, right: Outcome) -> None:
    """Outputs and caches have the same bits."""
    assert np.array_equal(left.output.view(np.uint8), right.output.view(np.uint8))
    for name in ("key", "value", "k_scale", "v_scale"):
        first, second = getattr(left.cache, name), getattr(right.cache, name)
        assert np.array_equal(first.view(np.uint8), second.view(np.uint8)), name


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_equal_bits(dtype: CacheDtype, half: HalfName, device: Device) -> None:
    """Five runs of a step, of a chunk and of a prompt, with many splits and with one: the merge has a fixed order."""
    for multiprocessors in (1, 132):
        for seq, totals, total in (
            (1, (700, 513), 701),
            (16, (700, 513), 701),
            (64, (700, 513), 701),
            (90, (90, 64), 90),
        ):
            case = KernelCase(
                id=f"equal-{dtype}-{half}-{multiprocessors}-{seq}", dtype=dtype, activation=half, seq=seq,
                totals=totals,
                total=total, capacity=720, multiprocessors=multiprocessors, heads=4, kv_heads=4, head_size=64,
            )  # fmt: skip
            inputs, past = make_inputs(case), make_past(case)
            outcomes = []
            for _ in range(5):
                with Call(device, case, inputs, past) as call:
                    call.launch()
                    outcomes.append(call.outcome())
            for other in outcomes[1:]:
                same(outcomes[0], other)


class Replay:
    """A captured call, an eager one with buffers of its own, and the reference's cache, fed with the same tokens."""

    def __init__(self, device: Device, case: KernelCase, captured: Call, eager: Call, graph: Graph) -> None:
        self.device, self.case, self.captured, self.eager, self.graph = device, case, captured, eager, graph
        self.cache: Cache = make_past(case)
        self._rng = case.rng("replay")

    def feed(self, totals: tuple[int, ...], *, amplitude: float = 1.0, reference: bool = True) -> Expected | None:
        """One step to the given lengths, its activations scaled by `amplitude`; both outcomes are compared."""
        case = replace(self.case, id=f"{self.case.id}-{totals}-{amplitude}", totals=totals)
        inputs = make_inputs(case)
        assert inputs.key is not None
        assert inputs.value is not None
        grown = [
            as_type(x.astype(np.float32) * np.float32(amplitude), case.activation) for x in (inputs.key, inputs.value)
        ]
        inputs = replace(inputs, key=grown[0], value=grown[1])
        for call in (self.captured, self.eager):
            self._write(call, inputs)
        self.graph.launch()
        self.eager.launch()
        outcome, other = self.captured.outcome(), self.eager.outcome()
        same(outcome, other)
        assert not outcome.stray
        if not reference:
            self.cache = other.cache
            return None
        expected = expected_of(case, inputs, self.cache)
        judge(case, outcome, expected, self.cache)
        self.cache = expected.cache
        return expected

    def _write(self, call: Call, inputs: Inputs) -> None:
        for name in ("query", "key", "value"):
            call.buffers[name].write(to_bits(getattr(inputs, name), self.case.half))
        call.buffers["seqlens_k"].write(inputs.seqlens_k.reshape(-1))


@contextmanager
def replaying(device: Device, case: KernelCase) -> Iterator[Replay]:
    """Captures the case's call without running it."""
    inputs, past = make_inputs(case), make_past(case)
    with ExitStack() as stack:
        captured, eager = (stack.enter_context(Call(device, case, inputs, past)) for _ in range(2))
        graph = Graph(device)
        with device.capture(graph):
            captured.launch()
        stack.callback(graph.close)
        yield Replay(device, case, captured, eager, graph)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_replay_to_capacity(dtype: CacheDtype, half: HalfName, shape: str, device: Device) -> None:
    """Captured at a short length, replayed to the last row and beyond it, every step checked; scales move."""
    capacity = 150
    for k, v in ((Granularity.PER_TOKEN, Granularity.PER_TOKEN), (Granularity.PER_CHANNEL, Granularity.PER_TOKEN)):
        seq = SHAPES[shape]["seq"]
        case = KernelCase(
            id=f"replay-{dtype}-{half}-{shape}-{k}", dtype=dtype, activation=half, seq=seq, totals=(seq + 4, seq),
            total=capacity, capacity=capacity, rotary="half", k_quant=k, v_quant=v, head_size=64,
        )  # fmt: skip
        with replaying(device, case) as replay:
            replay.cache = make_past(case)
            lengths = [*range(seq + 4, capacity, seq), capacity]
            for step, length in enumerate(lengths):
                amplitude = 4.0 ** (step % 5 - 2) if v is Granularity.PER_TOKEN and k is v else 1.0
                replay.feed((length, max(seq, length - 4)), amplitude=amplitude)
            over = replay.feed((capacity + 1, capacity))
            assert over is not None
            assert over.valid.tolist() == [False, True]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_replay_after_rewind(dtype: CacheDtype, shape: str, device: Device) -> None:
    """Smaller lengths: the rows behind them are ignored and then overwritten, codes and scales."""
    seq = SHAPES[shape]["seq"]
    case = KernelCase(
        id=f"rewind-{dtype}-{shape}", dtype=dtype, seq=seq, totals=(60, 60), total=100, capacity=100, head_size=64
    )
    with replaying(device, case) as replay:
        for length in (60, 60 + seq, 60, seq + 7, seq + 3, seq, 61, 100):
            replay.feed((length, length), amplitude=1.0 + length / 50)


@pytest.mark.parametrize("dtype", FORMATS)
def test_replay_from_5_to_262144(dtype: CacheDtype, device: Device) -> None:
    """A capacity of 262,144, captured at 5: no bound or stride of the launch came from the length."""
    capacity = 262_144
    case = KernelCase(
        id=f"replay-far-{dtype}", dtype=dtype, heads=2, kv_heads=1, head_size=64, totals=(capacity,), total=capacity,
        capacity=capacity,
    )  # fmt: skip
    past = make_past(case)
    start = replace(case, totals=(5,))
    with ExitStack() as stack:
        captured, eager = (stack.enter_context(Call(device, start, make_inputs(start), past)) for _ in range(2))
        graph = Graph(device)
        with device.capture(graph):
            captured.launch()
        stack.callback(graph.close)
        replay = Replay(device, start, captured, eager, graph)
        replay.cache = past
        for length in (5, 6, 131_073, 131_074, capacity):
            replay.feed((length,))


@pytest.mark.parametrize(
    ("heads", "multiprocessors", "capacity", "kernels"),
    [(8, 1, 8192, 1), (8, 132, 8192, 1), (8, 132, 1024, 1), (8, 132, 2048, 1), (1, 132, 8200, 2)],
    ids=["one split", "merged in place", "merged in clusters", "in wide clusters", "merge kernel"],
)
def test_graph_has_kernels_only(heads: int, multiprocessors: int, capacity: int, kernels: int, device: Device) -> None:
    """A step is one kernel, with many splits two, and with separate buffers a copy more; no memsets, no host nodes."""
    for in_place in (True, False):
        case = KernelCase(
            id=f"nodes-{heads}-{multiprocessors}-{capacity}-{in_place}", heads=heads, kv_heads=heads, totals=(40,),
            total=64, capacity=capacity, in_place=in_place, multiprocessors=multiprocessors,
        )  # fmt: skip
        past = make_past(case)
        present = None if in_place else make_past(case)
        with Call(device, case, make_inputs(case), past, present) as call:
            graph = Graph(device)
            with device.capture(graph):
                call.launch()
            assert graph.kernels == graph.nodes == kernels + (0 if in_place else 1)
            graph.close()
