"""A captured step replayed at other lengths: what a replay leaves is what an eager call leaves.

With enable_cuda_graph the first call warms up, captures and replays; every later one replays what was captured, so it
sees new lengths and activations only through device memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from python_tests.op.checks import check_rows
from python_tests.op.cuda_case import cuda_case
from python_tests.op.decode_loop import DecodeLoop, same_state, step_inputs
from python_tests.op.gqa_case import Case, poisoned_cache
from python_tests.op.providers import Provider
from python_tests.reference.format import CacheDtype, Granularity

pytestmark = pytest.mark.gpu
FORMATS = list(CacheDtype)
# Scales of new rows must be computed anew, whatever those at the capture were.
AMPLITUDES = (1.0, 100.0, 0.01, 3.0, 0.5)
MODES: dict[str, dict[str, Any]] = {
    "int8": {"dtype": CacheDtype.INT8},
    "fp8": {"dtype": CacheDtype.FP8},
    "int4": {"dtype": CacheDtype.INT4},
    "half-scales": {"dtype": CacheDtype.INT8, "scale_type": "float16"},
    "bfloat16": {"dtype": CacheDtype.INT4, "activation": "bfloat16"},
    "static": {"dtype": CacheDtype.FP8, "k_quant": Granularity.PER_CHANNEL, "v_quant": Granularity.PER_TENSOR},
    "mixed": {"dtype": CacheDtype.INT4, "k_quant": Granularity.PER_CHANNEL},
    "features": {
        "dtype": CacheDtype.INT8, "window": 33, "softcap": 5.0, "sink": True, "rotary": "interleaved", "head_size": 80,
    },
}  # fmt: skip


def pair(case: Case, provider: Provider) -> tuple[DecodeLoop, DecodeLoop]:
    """A loop that replays and one that does not, each with a cache of its own that holds the same."""
    return DecodeLoop(case, provider.having(enable_cuda_graph=1)), DecodeLoop(case, provider)


@pytest.mark.parametrize("mode", list(MODES))
def test_replay_equals_eager(mode: str, cuda: Provider) -> None:
    """Captured at 3 and 1 tokens, replayed to the capacity of 96: equal bits each step, the reference each 12th."""
    options = {"rotary": "half"} | MODES[mode]
    case = cuda_case(f"graph-{mode}", totals=(3, 1), capacity=96, total=96, **options)
    replayed, eager = pair(case, cuda)
    for t in range(94):
        inputs = step_inputs(case, (3 + t, 1 + t), AMPLITUDES[t % 5])
        if t % 12 == 0:
            replayed.checked_step(inputs)
        else:
            replayed.step(inputs)
        eager.step(inputs)
        same_state(replayed, eager, f"step {t}")
    assert not replayed.stray_writes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
def test_long_decode(dtype: CacheDtype, cuda: Provider) -> None:
    """4,096 steps from one capture: equal outputs at each, the whole cache and the reference at each 512th."""
    steps = 4096
    case = cuda_case(
        f"graph-long-{dtype}", dtype=dtype, totals=(1,), capacity=steps, total=steps, heads=4, kv_heads=1, head_size=64,
        rotary="half",
    )  # fmt: skip
    replayed, eager = pair(case, cuda)
    recorded = [step_inputs(case, (1 + t,), AMPLITUDES[t]) for t in range(5)]
    for t in range(steps):
        # Only the length is new in most steps: making activations takes longer than a step.
        inputs = replace(recorded[t % 5], seqlens_k=np.array([t], np.int32))
        check = t % 512 == 511
        replayed.checked_step(inputs) if check else replayed.step(inputs)
        eager.step(inputs)
        if check:
            same_state(replayed, eager, f"step {t}")
        assert replayed.output().tobytes() == eager.output().tobytes(), f"output at step {t}"


@pytest.mark.parametrize("dtype", FORMATS)
def test_rewind(dtype: CacheDtype, cuda: Provider) -> None:
    """From 20 tokens back to 10 and on with others: rows from 10 on are overwritten with their scales, no others."""
    case = cuda_case(f"graph-rewind-{dtype}", dtype=dtype, totals=(1, 1), capacity=64, total=64)
    replayed, eager = pair(case, cuda)
    for t in range(20):
        for loop in (replayed, eager):
            loop.step(step_inputs(case, (1 + t, 1 + t)))
    old = replayed.cache()
    changed = replace(case, id=f"{case.id}-changed")
    for t in range(10, 14):
        inputs = step_inputs(changed, (1 + t, 1 + t), 7.0)
        replayed.checked_step(inputs)
        eager.step(inputs)
        same_state(replayed, eager, f"after the rewind, step {t}")
    now = replayed.cache()
    for before, after in zip(vars(old).values(), vars(now).values(), strict=True):
        assert (before[:, :, 10:14] != after[:, :, 10:14]).any()
        assert before[:, :, :10].tobytes() == after[:, :, :10].tobytes()
        assert before[:, :, 14:20].tobytes() == after[:, :, 14:20].tobytes()


@pytest.mark.parametrize("heads", [4, 8, 24], ids=lambda h: f"{h}-query-heads")
@pytest.mark.parametrize("dtype", FORMATS)
def test_bursts(dtype: CacheDtype, heads: int, cuda: Provider) -> None:
    """Four tokens at once, captured after 0 and replayed after 13, 40, 60 and 3: causal within the four.

    With 2, 4 and 12 query heads per KV head: 8, 16 and 48 query rows, of which the last are not a decode step's.
    """
    case = cuda_case(
        f"graph-burst-{dtype}-{heads}", dtype=dtype, seq=4, heads=heads, totals=(4, 4), capacity=64, total=64
    )
    replayed, eager = pair(case, cuda)
    lengths = [(4 + 4 * i, 4 + 4 * i) for i in range(15)] + [(17, 44), (64, 20), (7, 63), (4, 64)]
    for i, totals in enumerate(lengths):
        inputs = step_inputs(case, totals, AMPLITUDES[i % 5])
        replayed.checked_step(inputs)
        eager.step(inputs)
        same_state(replayed, eager, f"burst {i}")


@pytest.mark.parametrize("dtype", FORMATS)
def test_capture_says_nothing_about_the_length(dtype: CacheDtype, cuda: Provider) -> None:
    """Capacity 262,144: captured at 5 tokens, replayed at 131,073, at the capacity, and at 6."""
    capacity = 262144
    case = cuda_case(
        f"graph-262144-{dtype}", dtype=dtype, totals=(capacity,), capacity=capacity, total=capacity, heads=2,
        kv_heads=1, head_size=32,
    )  # fmt: skip
    replayed = DecodeLoop(case, cuda.having(enable_cuda_graph=1))
    for total in (5, 131073, capacity, 6):
        replayed.checked_step(step_inputs(case, (total,)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_full_cache(dtype: CacheDtype, cuda: Provider) -> None:
    """Filled to the last row, then one step more: NaN, and not a byte is written; after a rewind all is well."""
    case = cuda_case(f"graph-full-{dtype}", dtype=dtype, totals=(1, 1), capacity=8, total=8)
    replayed = DecodeLoop(case, cuda.having(enable_cuda_graph=1), past=poisoned_cache(case, 8))
    for t in range(8):
        replayed.checked_step(step_inputs(case, (1 + t, 1 + t)))
    full = replayed.cache()
    for totals in ((9, 9), (9, 3), (1000, 0), (2**31, -5)):
        replayed.checked_step(step_inputs(case, totals))
        if max(totals) > 8 and min(totals) != 3:
            assert np.isnan(replayed.output()).all()
            check_rows(replayed.cache().key, full.key, "key")
        full = replayed.cache()
    replayed.checked_step(step_inputs(case, (4, 8)))
    assert np.isfinite(replayed.output()).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_non_finite_token(dtype: CacheDtype, cuda: Provider) -> None:
    """One NaN in one entry at one replay: that entry's KV head is NaN from then on, until the token is overwritten."""
    case = cuda_case(f"graph-nan-{dtype}", dtype=dtype, totals=(1, 1), capacity=64, total=64)
    replayed = DecodeLoop(case, cuda.having(enable_cuda_graph=1), past=poisoned_cache(case, 64))
    for t in range(12):
        inputs = step_inputs(case, (1 + t, 1 + t))
        if t == 6:
            assert inputs.value is not None
            inputs.value[1, 0, 130] = np.nan
        replayed.checked_step(inputs)
        output = replayed.output()
        assert np.isfinite(output[0]).all()
        assert np.isfinite(output[1, :, :4]).all()
        assert np.isnan(output[1, :, 4:]).all() == (t >= 6)
    replayed.checked_step(step_inputs(case, (7, 7)))
    assert np.isfinite(replayed.output()).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_chunks(dtype: CacheDtype, cuda: Provider) -> None:
    """A chunk of 40 tokens, captured at the start of the cache and replayed wherever it fits."""
    case = cuda_case(
        f"graph-chunk-{dtype}",
        dtype=dtype,
        seq=40,
        totals=(40, 40),
        capacity=300,
        total=300,
        rotary="half",
        packed=True,
    )
    replayed, eager = pair(case, cuda)
    for totals in ((40, 40), (80, 80), (120, 60), (160, 100), (200, 40), (240, 79), (280, 119), (300, 130)):
        inputs = step_inputs(case, totals)
        replayed.checked_step(inputs)
        eager.step(inputs)
        same_state(replayed, eager, f"chunk {totals}")


@pytest.mark.parametrize("dtype", FORMATS)
def test_prompts(dtype: CacheDtype, cuda: Provider) -> None:
    """A right-padded prompt of 24, captured with 1 and 24 tokens and replayed with others, none included."""
    case = cuda_case(f"graph-prompt-{dtype}", dtype=dtype, seq=24, totals=(1, 24), capacity=64, total=24, rotary="half")
    replayed, eager = pair(case, cuda)
    for totals in ((1, 24), (24, 24), (13, 2), (0, 17), (24, 0)):
        inputs = step_inputs(case, totals)
        replayed.checked_step(inputs)
        eager.step(inputs)
        same_state(replayed, eager, f"prompt {totals}")


@pytest.mark.parametrize("dtype", FORMATS)
def test_separate_buffers(dtype: CacheDtype, cuda: Provider) -> None:
    """The copy of the old rows is part of the graph: it follows the length, and what past holds at the replay."""
    case = cuda_case(
        f"graph-separate-{dtype}", dtype=dtype, totals=(30, 30), capacity=64, total=64, in_place=False, rotary="half"
    )
    replayed, eager = pair(case, cuda)
    for i, totals in enumerate(((5, 2), (30, 30), (1, 17), (12, 30))):
        inputs = step_inputs(case, totals, AMPLITUDES[i])
        replayed.checked_step(inputs)
        eager.step(inputs)
        same_state(replayed, eager, f"lengths {totals}")
    byte = replayed.ins["past_key"].read()
    byte[:, :, 3] ^= 1
    for loop in (replayed, eager):
        loop.ins["past_key"].write(byte)
    inputs = step_inputs(case, (20, 20))
    replayed.checked_step(inputs)
    eager.step(inputs)
    same_state(replayed, eager, "after past was changed")
