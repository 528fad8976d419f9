"""The unquantized operator beside the quantized one on the CUDA provider: same path, same graph, same neighbours.

That its bits are those of the unpatched release is what test_unquantized.py shows under --provider cuda.
"""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.op.checks import check_output
from python_tests.op.cuda_case import cuda_case
from python_tests.op.decode_loop import DecodeLoop, same_state, step_inputs
from python_tests.op.gqa_case import Case
from python_tests.op.providers import FloatName, Provider
from python_tests.op.two_nodes import verify_two
from python_tests.reference.format import CacheDtype
from python_tests.reference.step import run_step

pytestmark = pytest.mark.gpu


def plain(activation: FloatName) -> Case:
    """An unquantized decode."""
    return cuda_case(
        f"plain-{activation}", dtype=None, activation=activation, totals=(9, 3), capacity=64, total=64, head_size=64
    )


@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
def test_replay(activation: FloatName, cuda: Provider) -> None:
    """A captured unquantized step replays as it runs: equal bits, and within the reference's bound."""
    case = plain(activation)
    replayed, eager = DecodeLoop(case, cuda.having(enable_cuda_graph=1)), DecodeLoop(case, cuda)
    for t in range(20):
        inputs = step_inputs(case, (9 + t, 3 + t))
        before = replayed.cache()
        output = replayed.step(inputs)
        eager.step(inputs)
        same_state(replayed, eager, f"step {t}")
        check_output(output, run_step(case.operator, inputs, before))
    assert not replayed.stray_writes()


@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_both_in_one_session(dtype: CacheDtype, activation: FloatName, cuda: Provider) -> None:
    """A quantized and an unquantized node in one model: kernel lookup tells them apart by the type of the cache."""
    quantized = cuda_case(f"beside-{dtype}", dtype=dtype, activation=activation, totals=(21, 9), total=64)
    verify_two(quantized, plain(activation), cuda)


def test_float16_cache_is_not_taken_for_a_quantized_one(cuda: Provider) -> None:
    """The plain cache after a step holds the new row as it was given."""
    case = plain("float16")
    loop = DecodeLoop(case, cuda)
    inputs = step_inputs(case, case.totals)
    loop.step(inputs)
    assert inputs.key is not None
    key = inputs.key.reshape(2, 2, 64)
    for b, total in enumerate(case.totals):
        assert np.array_equal(loop.cache().key[b, :, total - 1], key[b])
