"""Prompts: attention over the exact new keys and values, the cache gets the quantized rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, HALVES, HEAD_SIZES, SINKS, params
from python_tests.kernel.verify import verify
from python_tests.op.gqa_case import RotaryName, make_inputs
from python_tests.reference.format import CacheDtype, Granularity
from python_tests.reference.half_attention import HalfName

pytestmark = pytest.mark.gpu

ROTARIES: list[RotaryName] = ["none", "half"]
LAYOUTS: list[tuple[bool, RotaryName, CacheDtype]] = [
    (False, "none", CacheDtype.INT8),
    (True, "interleaved", CacheDtype.INT4),
]
LENGTHS = [
    KernelCase(
        id=f"prompt-s{s}-{half}-{rotary}",
        activation=half,
        seq=s,
        totals=(s, (s + 1) // 2, 0),
        capacity=s + 3,
        rotary=rotary,
    )
    for s in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 257)
    for half in HALVES
    for rotary in ROTARIES
]
GROUPS = [
    KernelCase(
        id=f"prompt-g{g}-s{s}-{half}", activation=half, heads=2 * g, kv_heads=2, head_size=64, seq=s, totals=(s, s - 1),
        capacity=200,
    )
    for g, s in (
        (1, 70), (3, 22), (5, 13), (7, 19), (8, 8), (12, 6), (24, 3), (33, 2), (63, 2), (64, 1), (64, 3), (1, 127),
        (1, 129), (3, 43), (5, 51), (16, 8), (16, 9),
    )
    for half in HALVES
]  # fmt: skip
SIZES = [
    KernelCase(
        id=f"prompt-d{d}-{half}-packed{packed}", activation=half, head_size=d, seq=37, totals=(37, 20), packed=packed,
        rotary=rotary, dtype=dtype,
    )
    for d in HEAD_SIZES
    for half in HALVES
    for packed, rotary, dtype in LAYOUTS
]  # fmt: skip
WINDOWS = [
    KernelCase(id=f"prompt-window{w}-d{d}", window=w, seq=150, totals=(150, 131), capacity=150, head_size=d)
    for w in (1, 2, 7, 31, 32, 33, 62, 63, 64, 65, 127, 128, 129, 148, 149, 150, 2**31 - 1)
    for d in (64, 256)
]
FEATURES = [
    KernelCase(
        id=f"prompt-{sink}-cap{cap}-scale{scale}-{half}", activation=half, softcap=cap, scale=scale, seq=20,
        totals=(20, 3),
        **SINKS[sink],
    )
    for sink in SINKS
    for cap in (0.0, 0.5, 30.0)
    for scale in (0.0, 0.02, 1.0, -0.1)
    for half in HALVES
]  # fmt: skip
STORED = [
    KernelCase(
        id=f"prompt-{dtype}-{k}-{v}", dtype=dtype, k_quant=k, v_quant=v, seq=40, totals=(40, 39), capacity=64,
        rotary="half", in_place=in_place,
    )
    for dtype in FORMATS
    for k, v, in_place in (
        (Granularity.PER_TENSOR, Granularity.PER_TOKEN, True),
        (Granularity.PER_CHANNEL, Granularity.PER_TENSOR, False),
        (Granularity.PER_TOKEN, Granularity.PER_CHANNEL, True),
    )
]  # fmt: skip
INVALID = [
    KernelCase(
        id=f"prompt-invalid-{half}-{rotary}", activation=half, seq=6, totals=(6, 7, -1, 0, 3, 2**31), total=6,
        rotary=rotary,
        cos_rows=5,
    )
    for half in HALVES
    for rotary in ROTARIES
]  # fmt: skip


@pytest.mark.parametrize("case", params(LENGTHS + GROUPS + SIZES + WINDOWS + FEATURES + STORED + INVALID))
def test_prompt(case: KernelCase, device: Device) -> None:
    """Output within the bound, 0 in padding, NaN in entries that do not fit; bytes and scales exact."""
    verify(case, device)


@pytest.mark.parametrize("half", HALVES)
def test_padding_is_not_read(half: HalfName, device: Device) -> None:
    """Rows behind a prompt's length hold NaN and Inf; rows before it are right, and the padding's output is 0."""
    case = KernelCase(
        id=f"prompt-padding-{half}", activation=half, seq=70, totals=(70, 3, 8, 64, 0), capacity=70, rotary="half"
    )
    for bad in (np.nan, np.inf):
        inputs = make_inputs(case)
        assert inputs.key is not None
        assert inputs.value is not None
        for b, total in enumerate(case.totals):
            for tensor in (inputs.query, inputs.key, inputs.value):
                tensor[b, total:] = bad
        outcome, _, _ = verify(case, device, inputs=inputs)
        for b, total in enumerate(case.totals):
            assert (outcome.output[b, total:] == 0).all()
            assert np.isfinite(outcome.output[b, :total]).all()


@pytest.mark.parametrize("window", [-1, 10])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("side", ["key", "value"])
def test_one_bad_token(side: str, half: HalfName, window: int, device: Device) -> None:
    """A NaN, and an Inf of V, poisons the rows that attend it: none before it, and none past the window."""
    for head_size in (64, 256):
        case = KernelCase(
            id=f"prompt-bad-{side}-{half}-{window}-{head_size}", activation=half, seq=150, totals=(150, 150),
            window=window,
            head_size=head_size, capacity=150,
        )  # fmt: skip
        for token, bad in ((0, np.nan), (77, np.nan), (64, np.inf), (149, -np.inf)):
            if side == "key":
                # A score of -Inf would rightly count nothing.
                bad = np.nan
            inputs = make_inputs(case)
            tensor = inputs.key if side == "key" else inputs.value
            assert tensor is not None
            tensor[0, token, 5] = bad
            outcome, _, _ = verify(replace(case, id=f"{case.id}-{token}"), device, inputs=inputs)
            attended = np.zeros(150, bool)
            attended[token : None if window < 0 else token + window + 1] = True
            bad_rows = ~np.isfinite(outcome.output[0]).all(axis=(1, 2))
            # Query heads of the other KV head stay finite, so rows are judged by whether any value is bad.
            assert np.array_equal(bad_rows, attended)
            assert np.isfinite(outcome.output[1]).all()
