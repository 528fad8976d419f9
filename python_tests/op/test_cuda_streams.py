"""Who waits for whom: a producer on its own stream writes what a step reads.

The contract: a session on the producer's stream (user_compute_stream) comes after it; a session on any other stream
comes after it where the caller makes it, with an event or a synchronization. Every run but a replay returns when the
work is done, unless disable_synchronize_execution_providers is set.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest

from python_tests.op.checks import check_cache, check_output
from python_tests.op.cuda_case import cuda_case
from python_tests.op.cuda_runtime import DeviceMemory, Stream
from python_tests.op.decode_loop import STATE, DecodeLoop, step_inputs
from python_tests.op.gqa_case import make_past
from python_tests.op.providers import Provider
from python_tests.reference.format import CacheDtype
from python_tests.reference.step import Cache, run_step

pytestmark = pytest.mark.gpu
FORMATS = list(CacheDtype)
LATE = 0.05


class Producer:
    """Writes a cache into a loop's buffers on a stream, late."""

    def __init__(self, stream: Stream, loop: DecodeLoop, cache: Cache) -> None:
        self.stream = stream
        arrays = dict(zip(STATE, (cache.key, cache.value, cache.k_scale, cache.v_scale), strict=True))
        self._copies = []
        for name, array in arrays.items():
            assert array is not None
            staged = DeviceMemory(array.nbytes)
            staged.write(array)
            self._copies.append((loop.ins[name].pointer, staged))

    def start(self) -> None:
        """Enqueue a pause and then the copies."""
        self.stream.pause(LATE)
        for pointer, staged in self._copies:
            self.stream.copy(pointer, staged.pointer, staged.size)


def unsynchronized() -> ort.RunOptions:
    """Run options with which a run returns before its work is done."""
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


@pytest.mark.parametrize("how", ["own-stream", "own-stream-later", "event", "wait", "synchronize-inputs"])
@pytest.mark.parametrize("graph", [0, 1], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_late_producer(dtype: CacheDtype, graph: int, how: str, cuda: Provider) -> None:
    """The cache arrives 50 ms after the step was asked for: the step waits, by each way that the contract names."""
    case = cuda_case(f"producer-{dtype}-{graph}-{how}", dtype=dtype, totals=(40, 23), capacity=160, total=160)
    producing, consuming = Stream(), Stream()
    provider = cuda.having(enable_cuda_graph=graph)
    if how != "wait" and how != "synchronize-inputs":
        used = consuming if how == "event" else producing
        provider = provider.having(user_compute_stream=used.handle)
    loop = DecodeLoop(case, provider)
    # Other rows than those that the buffers hold when the step runs, or is captured, for the first time.
    late = make_past(replace(case, id=f"{case.id}-late"))
    producer = Producer(producing, loop, late)
    inputs = step_inputs(case, case.totals)
    loop.step(inputs)
    producer.start()
    if how == "event":
        consuming.wait(producing.record())
    elif how == "wait":
        producing.synchronize()
    elif how == "synchronize-inputs":
        loop.binding.synchronize_inputs()
    loop.run(unsynchronized() if how == "own-stream-later" else None)
    producing.synchronize()
    expected = run_step(case.operator, inputs, late)
    check_cache(case, loop.cache(), expected)
    check_output(loop.output(), expected)


def test_a_late_producer_is_late(cuda: Provider) -> None:
    """Control: a copy behind a pause has not happened when the host goes on."""
    case = cuda_case("producer-control", totals=(40,), capacity=64, total=64)
    loop = DecodeLoop(case, cuda)
    held = loop.ins["past_key"].read()
    producer = Producer(Stream(), loop, make_past(replace(case, id="producer-control-late")))
    begun = time.perf_counter()
    producer.start()
    assert time.perf_counter() - begun < LATE
    producer.stream.synchronize()
    assert time.perf_counter() - begun >= LATE
    assert not np.array_equal(held, loop.ins["past_key"].read())
