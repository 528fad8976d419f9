"""Captured steps of several graphs, sessions, streams, threads and devices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import onnxruntime as ort
import pytest

from python_tests.op import cuda_runtime
from python_tests.op.cuda_case import cuda_case
from python_tests.op.decode_loop import DecodeLoop, same_state, step_inputs
from python_tests.op.gqa_case import Case, make_inputs, poisoned_cache
from python_tests.op.gqa_model import build_model, make_session
from python_tests.op.providers import Provider
from python_tests.reference.format import CacheDtype

pytestmark = pytest.mark.gpu
FORMATS = list(CacheDtype)
CAPACITY = 160


def small(name: str, **changes: object) -> Case:
    """A short ragged decode whose steps have several splits."""
    sizes: dict[str, Any] = {"totals": (3, 1), "capacity": CAPACITY, "total": CAPACITY, "rotary": "half"}
    return cuda_case(name, **sizes | changes)


def decode(loop: DecodeLoop, steps: int, options: ort.RunOptions | None = None, *, start: int = 0) -> None:
    """Steps that are all compared with the reference."""
    for t in range(start, start + steps):
        totals = tuple(min(n + t, loop.case.capacity) for n in loop.case.totals)
        loop.checked_step(step_inputs(loop.case, totals, 1.0 + t), options)


def graph_id(number: int) -> ort.RunOptions:
    """Run options that name a graph; -1 runs without one."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


@pytest.mark.parametrize("dtype", FORMATS)
def test_several_graphs_of_one_session(dtype: CacheDtype, cuda: Provider) -> None:
    """One model, one session, a graph per shape: a step of 2 entries, one of 3, a burst of 4; and none, by turns."""
    case = small(f"ids-{dtype}", dtype=dtype)
    session = make_session(build_model(case), cuda.having(enable_cuda_graph=1))
    shapes = {1: case, 2: replace(case, totals=(9, 1, 30)), 3: replace(case, seq=4, totals=(4, 7)), -1: case}
    loops = {n: DecodeLoop(replace(c, id=f"{case.id}-{n}"), cuda, session=session) for n, c in shapes.items()}
    for t in range(6):
        for number, loop in loops.items():
            decode(loop, 1, graph_id(number), start=t)


@pytest.mark.parametrize("dtype", FORMATS)
def test_prompt_then_captured_steps(dtype: CacheDtype, cuda: Provider) -> None:
    """Generation as it is done: an eager prompt and captured steps of one session on one cache; then a new prompt."""
    case = small(f"generate-{dtype}", dtype=dtype, totals=(1, 1))
    session = make_session(build_model(case), cuda.having(enable_cuda_graph=1))
    steps = DecodeLoop(case, cuda, session=session, past=poisoned_cache(case, CAPACITY))
    for i, lengths in enumerate(((24, 9), (13, 24))):
        prompt = replace(case, id=f"{case.id}-prompt-{i}", seq=24, totals=lengths, total=24)
        first = DecodeLoop(prompt, cuda, session=session, cache_of=steps)
        first.checked_step(make_inputs(prompt), graph_id(-1))
        for t in range(1, 8):
            totals = tuple(n + t for n in lengths)
            steps.checked_step(step_inputs(replace(case, id=f"{case.id}-{i}"), totals), graph_id(1))


@pytest.mark.parametrize("graph", [0, 1], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_user_stream(dtype: CacheDtype, graph: int, cuda: Provider) -> None:
    """Work goes to the caller's stream, captured or not."""
    stream = cuda_runtime.Stream()
    provider = cuda.having(user_compute_stream=stream.handle, enable_cuda_graph=graph)
    decode(DecodeLoop(small(f"stream-{dtype}", dtype=dtype), provider), 12)


@pytest.mark.parametrize("graph", [0, 1], ids=["eager", "graph"])
def test_two_sessions(graph: int, cuda: Provider) -> None:
    """Two sessions of one model and one of another by turns, one of them on a stream of the caller."""
    provider = cuda.having(enable_cuda_graph=graph)
    other = provider.having(user_compute_stream=cuda_runtime.Stream().handle)
    int8, int4 = small("two-int8"), small("two-int4", dtype=CacheDtype.INT4, head_size=64)
    loops = [DecodeLoop(int8, provider), DecodeLoop(replace(int8, id="two-again"), other), DecodeLoop(int4, provider)]
    for t in range(10):
        for loop in loops:
            decode(loop, 1, start=t)


def in_thread(work: Callable[[], None]) -> None:
    """Run in a thread that has not used CUDA before; what it raises is raised here."""
    caught: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


def test_replay_in_another_thread(cuda: Provider) -> None:
    """A thread has a graph of its own: it captures again, and both go on with one cache."""
    loop = DecodeLoop(small("threads"), cuda.having(enable_cuda_graph=1))
    decode(loop, 4)
    in_thread(lambda: decode(loop, 4, start=4))
    decode(loop, 4, start=8)


@pytest.mark.parametrize("graph", [0, 1], ids=["eager", "graph"])
@pytest.mark.parametrize("device_id", [0, 1])
def test_fresh_thread_on_a_device(device_id: int, graph: int, cuda: Provider) -> None:
    """Session, capture and steps in a new thread, on either device; head size 256 needs the most shared memory.

    Kernels by turns: 8 and 16 query rows, more, and a prompt, each with settings of its own per device.
    """
    if device_id >= cuda_runtime.device_count():
        pytest.skip("needs a second GPU")
    provider = cuda.on(device_id).having(enable_cuda_graph=graph)
    base = small(f"device-{device_id}-{graph}", head_size=256)
    cases = [
        replace(base, seq=seq, totals=(seq, 2 * seq), total=total, dtype=dtype)
        for seq, total in ((1, CAPACITY), (4, CAPACITY), (20, CAPACITY), (12, 12))
        for dtype in (CacheDtype.INT8, CacheDtype.INT4)
        if total != 12 or seq == 12
    ]
    cases = [replace(c, totals=(12, 5)) if c.prompt else c for c in cases]

    def work() -> None:
        loops = [DecodeLoop(case, provider) for case in cases]
        for t in range(2):
            for loop in loops:
                decode(loop, 1, start=0 if loop.case.prompt else t)

    in_thread(work)


def test_both_devices_by_turns(cuda: Provider) -> None:
    """One process, a graph on each device, the same steps: equal bits."""
    if cuda_runtime.device_count() < 2:
        pytest.skip("needs a second GPU")
    case = small("both-devices", head_size=256)
    loops = [DecodeLoop(case, cuda.on(n).having(enable_cuda_graph=1)) for n in range(2)]
    for t in range(6):
        for loop in loops:
            decode(loop, 1, start=t)
        same_state(loops[0], loops[1], f"step {t}")


@pytest.mark.parametrize("graph", [0, 1], ids=["eager", "graph"])
def test_no_allocation_after_the_first_call(graph: int, cuda: Provider) -> None:
    """300 steps at growing lengths leave the device's free memory as the first one left it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other workers use the same GPU's memory: run without pytest-xdist")
    case = small("no-allocation", capacity=4096, total=4096, rotary="none")
    loop = DecodeLoop(case, cuda.having(enable_cuda_graph=graph), past=poisoned_cache(case, 4096))
    loop.step(step_inputs(case, case.totals))
    inputs = [step_inputs(case, (3 + 13 * t, 1 + 13 * t)) for t in range(1, 301)]
    before = cuda_runtime.memory_info()[0]
    for x in inputs:
        loop.step(x)
    assert cuda_runtime.memory_info()[0] == before
