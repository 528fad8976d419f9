"""Faults that users of quantized caches have met in public and that need a GPU: graphs, streams, devices, types.

As test_public_reports.py. test_cuda_graph.py, test_cuda_graph_sessions.py and test_cuda_streams.py have more of each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from python_tests.op import cuda_runtime
from python_tests.op.checks import verify
from python_tests.op.cuda_case import cuda_case
from python_tests.op.cuda_runtime import Stream
from python_tests.op.decode_loop import DecodeLoop, same_state, step_inputs
from python_tests.op.gqa_case import Case, make_inputs, make_past
from python_tests.op.gqa_model import call
from python_tests.op.providers import Provider
from python_tests.op.test_cuda_graph_sessions import decode, in_thread
from python_tests.op.test_cuda_streams import Producer
from python_tests.reference.format import CacheDtype, Granularity, decode_e4m3, encode_e4m3
from python_tests.reference.step import run_step

pytestmark = pytest.mark.gpu
FORMATS = list(CacheDtype)
ALL_CODES = np.arange(256, dtype=np.uint8)


def base(number: int, **changes: object) -> Case:
    """The base case under the report's own id."""
    return replace(cuda_case(f"report-{number}", total=64), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", list(Granularity)[1:])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_25(dtype: CacheDtype, granularity: Granularity, cuda: Provider) -> None:
    """A quantized K in a captured graph, 64 replays: each equals the eager step, each eighth the reference."""
    case = base(25, dtype=dtype, k_quant=granularity, totals=(1, 1), rotary="half")
    replayed, eager = DecodeLoop(case, cuda.having(enable_cuda_graph=1)), DecodeLoop(case, cuda)
    for t in range(64):
        inputs = step_inputs(case, (1 + t, 1 + t), 1.0 + t % 3)
        replayed.checked_step(inputs) if t % 8 == 7 else replayed.step(inputs)
        eager.step(inputs)
        same_state(replayed, eager, f"step {t}")


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("graph", [0, 1])
def test_report_31(graph: int, own_stream: bool, cuda: Provider) -> None:
    """Two sessions by turns, captured and not, with and without streams of the caller: no step does what a capture
    forbids."""
    loops = []
    for i in range(2):
        provider = cuda.having(enable_cuda_graph=graph)
        if own_stream:
            provider = provider.having(user_compute_stream=Stream(cuda.device_id).handle)
        case = base(31, totals=(20, 5), capacity=160, total=160)
        loops.append(DecodeLoop(replace(case, id=f"report-31-{i}"), provider))
    for t in range(8):
        for loop in loops:
            decode(loop, 1, start=t)


@pytest.mark.parametrize("waits", ["event", "stream"])
def test_report_32(waits: str, cuda: Provider) -> None:
    """A producer's late copy into the bound cache: seen where the session's stream is, or waits for, the producer's."""
    case = base(32, totals=(40, 23))
    producing, consuming = Stream(cuda.device_id), Stream(cuda.device_id)
    stream = producing if waits == "stream" else consuming
    loop = DecodeLoop(case, cuda.having(user_compute_stream=stream.handle))
    late = make_past(replace(case, id="report-32-late"))
    producer = Producer(producing, loop, late)
    inputs = step_inputs(case, case.totals)
    loop.load(inputs)
    producer.start()
    if waits == "event":
        consuming.wait(producing.record())
    loop.run()
    producing.synchronize()
    expected = run_step(case.operator, inputs, late)
    assert np.array_equal(loop.cache().key, expected.cache.key)


def test_report_52_decode(cuda: Provider) -> None:
    """Every fp8 code, whatever instructions this GPU has for it: one token a query, so that the output is its value."""
    case = base(52, dtype=CacheDtype.FP8, k_quant=Granularity.PER_TENSOR, v_quant=Granularity.PER_TENSOR, heads=2,
                head_size=256, totals=(3,), capacity=4, total=4, seq=2)  # fmt: skip
    past, inputs = make_past(case), make_inputs(case)
    assert past.v_scale is not None
    past.v_scale[...] = 1
    finite = np.isfinite(decode_e4m3(ALL_CODES))
    past.value[0, :, 0] = np.where(finite, ALL_CODES, 0)
    assert inputs.value is not None
    # Both queries attend token 0 and rows of zeros: the output is a known fraction of each code's value.
    inputs.value[...] = 0
    inputs.query[...] = 0
    outcome = call(case, inputs, past, None, cuda)
    values = np.where(finite, decode_e4m3(ALL_CODES), 0)
    for s in range(2):
        wanted = (values / (2 + s)).astype(np.float32)
        assert np.allclose(outcome.output[0, s].astype(np.float32), wanted, rtol=2e-3, atol=2.0**-24)
    # The two NaN codes are NaN where they are attended, and nothing else is.
    past.value[0, :, 0] = ALL_CODES
    output = call(case, inputs, past, None, cuda).output
    assert np.array_equal(np.isnan(output[0]), np.broadcast_to(~finite, output[0].shape))


@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
def test_report_52(activation: str, cuda: Provider) -> None:
    """fp8 codes of a sweep of activations, ties and the saturating end included: the reference's, all of them."""
    magnitudes = decode_e4m3(np.arange(0x7F, dtype=np.uint8))
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = np.concatenate([magnitudes, ties, [450.0, 464.0, 480.0, 65504.0, 2.0**-11]])
    values = np.concatenate([values, -values]).astype(np.float32)
    rows = -(-values.size // 256)
    values = np.resize(values, (1, rows, 256))
    case = base(52, dtype=CacheDtype.FP8, k_quant=Granularity.PER_TENSOR, v_quant=Granularity.PER_TENSOR, heads=1,
                kv_heads=1, head_size=256, seq=rows, totals=(rows,), total=64, activation=activation)  # fmt: skip
    past, inputs = make_past(case), make_inputs(case)
    assert past.k_scale is not None
    assert past.v_scale is not None
    assert inputs.key is not None
    assert inputs.value is not None
    past.k_scale[...] = past.v_scale[...] = 1
    kept = values if activation == "float16" else (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    inputs.key[...] = inputs.value[...] = kept
    outcome = call(case, inputs, past, None, cuda)
    wanted = encode_e4m3(inputs.key.astype(np.float32))
    for codes in (outcome.cache.key, outcome.cache.value):
        assert np.array_equal(codes[:, 0, :rows], wanted)


@pytest.mark.parametrize("device_id", [0, 1])
def test_report_53(device_id: int, cuda: Provider) -> None:
    """D 256 in a fresh thread, on the second device too; kernels with different needs of shared memory by turns."""
    if device_id >= cuda_runtime.device_count():
        pytest.skip("needs a second GPU")
    provider = cuda.on(device_id)
    small = base(53, capacity=160, total=160, totals=(9, 4), head_size=64)
    cases = [small, replace(small, id="report-53-large", head_size=256, seq=4, totals=(12, 30))]

    def work() -> None:
        for _ in range(2):
            for case in cases:
                verify(case, provider)
                verify(replace(case, seq=40, totals=(160, 41)), provider)

    in_thread(work)


@pytest.mark.parametrize("granularity", list(Granularity)[1:])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_56(dtype: CacheDtype, granularity: Granularity, cuda: Provider) -> None:
    """bfloat16 activations on every format: step, burst, chunk, prompt, with values that float16 does not have."""
    case = base(56, dtype=dtype, k_quant=granularity, v_quant=granularity, activation="bfloat16", rotary="half")
    for seq, totals, total in ((1, (21, 9), 64), (4, (40, 4), 64), (33, (60, 33), 64), (33, (33, 20), 33)):
        verify(replace(case, id=f"report-56-{seq}-{total}", seq=seq, totals=totals, total=total), cuda)


@pytest.mark.parametrize("prompt", [False, True], ids=["step", "prompt"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_report_56_range(dtype: CacheDtype, prompt: bool, cuda: Provider) -> None:
    """Keys around 2^20 and values around 2^30, which bfloat16 has and float16 has not."""
    case = base(56, dtype=dtype, activation="bfloat16", seq=20, totals=(20, 9), total=20)
    case = case if prompt else replace(case, seq=1, totals=(21, 9), total=64)
    inputs = make_inputs(case)
    assert inputs.key is not None
    assert inputs.value is not None
    inputs.key[...] *= 2.0**20
    inputs.value[...] *= 2.0**30
    inputs.query[...] *= 2.0**-20
    outcome, _ = verify(case, cuda, inputs=inputs)
    assert np.isfinite(outcome.output).all()
