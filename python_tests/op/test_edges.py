"""Lengths, sizes and layouts at the ends of what is allowed.

The CPU kernel works on tiles of 128 tokens and blocks of 64 query rows (S times the group).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from python_tests.op.checks import verify
from python_tests.op.gqa_case import Case, make_inputs, make_past
from python_tests.op.gqa_model import build_model, cached_session, input_buffers, output_buffers, run
from python_tests.op.providers import Provider, selected
from python_tests.reference.format import CacheDtype, Granularity

TILE = 128
CAPACITY = 300
FORMATS = list(CacheDtype)
SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_size": 64, "capacity": CAPACITY}
PASTS = (0, 1, TILE - 1, TILE, TILE + 1)
MIXED = (1, 2, 17, 63, 127, 128, 129, 255, 256)
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, TILE - 1, TILE, TILE + 1)


def params(cases: list[Case]) -> list[Any]:
    """pytest parameters whose ids are the cases'."""
    return [pytest.param(case, id=case.id) for case in cases]


def rotating_formats(i: int) -> dict[str, Any]:
    """Formats for lists where each edge needs one of them; the pairwise table has the combinations."""
    return {"dtype": FORMATS[i % 3]}


STEPS = [
    Case(id=f"step-s{s}-past{p}", seq=s, totals=(p + s, s), total=CAPACITY, **SMALL, **rotating_formats(i + j))
    for i, s in enumerate(LENGTHS)
    for j, p in enumerate(PASTS)
]
PROMPTS = [
    Case(id=f"prompt-{dtype}-s{s}", dtype=dtype, seq=s, totals=(s, (s + 1) // 2), **SMALL)
    for dtype in FORMATS
    for s in (*LENGTHS, 255, 256, 257, CAPACITY - 1, CAPACITY)
]
ENDS = [
    Case(id=f"end-{dtype}-s{s}-total{t}", dtype=dtype, seq=s, totals=(t, s), total=CAPACITY, **SMALL)
    for dtype in FORMATS
    for s in (1, 5)
    for t in (CAPACITY - 1, CAPACITY, CAPACITY + 1, CAPACITY + 5, 2**31, -(2**31) + 1)
]
GROUPS = [
    Case(
        id=f"group{g}-s{s}-{dtype}", dtype=dtype, heads=g, kv_heads=1, head_size=64, seq=s, totals=(140,), capacity=200
    )
    for g in (1, 3, 4, 7, 8, 16, 63, 64)
    for s, dtype in ((1, CacheDtype.INT8), (3, CacheDtype.INT4), (1, CacheDtype.FP8))
]
HEAD_SIZES = [
    Case(
        id=f"head-size{d}-{dtype}-{activation}", dtype=dtype, head_size=d, heads=4, kv_heads=2, totals=(133, 5),
        capacity=140, activation=activation,
    )
    for d in (8, 16, 24, 40, 64, 72, 80, 88, 96, 128, 192, 248, 256)
    for dtype in FORMATS
    for activation in selected().activations
]  # fmt: skip
RAGGED = [
    Case(id=f"ragged-s{s}-{dtype}", dtype=dtype, seq=s, totals=tuple(t + s - 1 for t in MIXED), total=CAPACITY, **SMALL)
    for s in (1, 4)
    for dtype in FORMATS
]
LONG = [
    Case(id=f"long-{t}-{dtype}", dtype=dtype, totals=(t,), capacity=t + 3, heads=8, kv_heads=1, head_size=64, window=w)
    for t, w in ((2048, -1), (2049, -1), (8191, -1), (8192, 700))
    for dtype in FORMATS
]
WINDOWS = [
    Case(id=f"window{w}-s{s}", window=w, seq=s, totals=(t, s), total=CAPACITY, **SMALL, **rotating_formats(i))
    for i, w in enumerate((1, 2, TILE - 2, TILE - 1, TILE, TILE + 1, CAPACITY, 2**31 - 2, 2**31 - 1, 2**62))
    for s, t in ((1, 260), (5, 260), (70, 260))
]


@pytest.mark.parametrize("case", params(STEPS + PROMPTS + ENDS + GROUPS + HEAD_SIZES + RAGGED + LONG + WINDOWS))
def test_edge(case: Case, provider: Provider) -> None:
    """Output, bytes, scales, guards and untouched rows of one call."""
    _, expected = verify(case, provider)
    fits = [case.prompt or case.seq <= t <= case.present_capacity for t in case.totals]
    assert expected.valid.tolist() == fits


@pytest.mark.parametrize("dtype", FORMATS)
def test_past_grows(dtype: CacheDtype, provider: Provider) -> None:
    """Separate buffers, past of exactly P rows, present of P + S: old rows and scales are copied, new ones added."""
    for past, seq in ((5, 1), (0, 3), (127, 2), (128, 1)):
        case = Case(
            id=f"grow-{dtype}-{past}-{seq}", dtype=dtype, capacity=past, seq=seq, totals=(past + seq,) * 2,
            in_place=False, total=past + seq + (past == 0),
        )  # fmt: skip
        verify(case, provider)


@pytest.mark.parametrize("granularity", [Granularity.PER_TOKEN, Granularity.PER_CHANNEL])
@pytest.mark.parametrize("dtype", FORMATS)
def test_element_alignment_is_enough(dtype: CacheDtype, granularity: Granularity, provider: Provider) -> None:
    """Buffers that start one element behind a 64-byte boundary."""
    if provider.device != "cpu":
        pytest.skip("test_cuda_layout.py has the alignments of the CUDA kernels")
    for activation in provider.activations:
        case = Case(
            id=f"misaligned-{dtype}-{granularity}", dtype=dtype, k_quant=granularity, v_quant=granularity, seq=3,
            activation=activation, rotary="half", totals=(40, 17),
        )  # fmt: skip
        for variant in (case, replace(case, in_place=False)):
            verify(variant, provider, misalign=lambda name, element_size: element_size)


@pytest.mark.parametrize("shape", [(2, 0), (0, 1)], ids=["no-rows", "no-batch"])
def test_empty_call(shape: tuple[int, int], provider: Provider) -> None:
    """No new token, or no batch entry: an error or an empty output, and in both cases an untouched cache."""
    batch, seq = shape
    case = Case(id="empty", seq=seq, totals=(20,) * batch, total=64)
    inputs, past = make_inputs(case), make_past(case)
    ins = input_buffers(case, inputs, past, provider)
    outs = output_buffers(case, ins, None, provider)
    message = "query"
    try:
        run(cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2), ins, outs)
    except RuntimeError as error:
        message = str(error)
    assert "query" in message
    assert np.array_equal(outs["present_key"].read(), past.key)
    assert np.array_equal(outs["present_value"].read(), past.value)
    assert not [name for name, buffer in (ins | outs).items() if buffer.stray_writes()]


def test_all_entries_invalid(provider: Provider) -> None:
    """Nothing is written anywhere and the whole output is NaN, in place and with separate buffers."""
    case = Case(id="all-invalid", seq=4, totals=(3, 0, 65, -7), total=64)
    for variant in (case, replace(case, in_place=False)):
        outcome, _ = verify(variant, provider)
        assert np.isnan(outcome.output).all()


def test_invalid_prompt_lengths(provider: Provider) -> None:
    """A prompt whose seqlens_k is beyond S or below -1; its neighbours are right."""
    case = Case(id="prompt-invalid", seq=6, totals=(6, 7, -1, 0, 3), total=6)
    _, expected = verify(case, provider)
    assert expected.valid.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", FORMATS)
def test_thread_counts(dtype: CacheDtype, threads: int, provider: Provider) -> None:
    """One long head: the tokens are what is left to split over threads."""
    case = Case(
        id=f"threads-{dtype}", dtype=dtype, totals=(4097,), capacity=5000, heads=4, kv_heads=1, head_size=128,
    )  # fmt: skip
    _, expected = verify(case, provider, threads=threads)
    assert expected.valid.all()
