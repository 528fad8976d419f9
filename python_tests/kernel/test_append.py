"""LaunchAppend alone: bytes and scales are equal to the reference, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from python_tests.kernel.call import Call
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.verify import verify
from python_tests.kernel.yardstick import check_cache
from python_tests.op.gqa_case import make_inputs, poisoned_cache
from python_tests.op.pairwise import Choice, pairwise
from python_tests.op.providers import FloatName
from python_tests.reference.bfloat16 import round_bfloat16
from python_tests.reference.format import Array, CacheDtype, Granularity, quantize_per_token
from python_tests.reference.half_attention import HalfName
from python_tests.reference.step import split_heads

pytestmark = pytest.mark.gpu

FORMATS = list(CacheDtype)
ROTARY: dict[str, dict[str, Any]] = {
    "none": {},
    "half": {"rotary": "half"},
    "interleaved": {"rotary": "interleaved"},
    "half-part": {"rotary": "half", "rotary_dim": 16},
    "interleaved-part": {"rotary": "interleaved", "rotary_dim": 16},
    # Eight elements in a row that rotate in different ways.
    "half-uneven": {"rotary": "half", "rotary_dim": 24},
    "interleaved-uneven": {"rotary": "interleaved", "rotary_dim": 20},
}
# (S, tokens after the call, host total)
LENGTHS: dict[str, tuple[int, tuple[int, ...], int | None]] = {
    "prompt": (13, (13, 5, 0), None),
    "prompt-invalid": (5, (6, 5, -1), 5),
    "step": (1, (40, 1, 23), 48),
    "burst": (5, (48, 5, 30), None),
    "invalid": (4, (49, 3, 48), 48),
    "far": (1, (2**31, -(2**31) + 1, 48), 48),
}
PARAMETERS: dict[str, list[Any]] = {
    "head_size": [8, 16, 24, 40, 64, 72, 80, 96, 128, 192, 248, 256],
    "lengths": list(LENGTHS),
    "rotary": list(ROTARY),
    "dtype": FORMATS,
    "k_quant": list(Granularity)[1:],
    "v_quant": list(Granularity)[1:],
    "scale_type": ["float32", "float16"],
    "activation": ["float16", "bfloat16"],
    "kv_heads": [1, 2, 5],
    "packed": [False, True],
    "in_place": [True, False],
}


def forbidden(left: Choice, right: Choice) -> bool:
    """A scale cache of float16 excludes static scales; a rotated part must fit the head."""
    if left == ("scale_type", "float16") and right[0] in ("k_quant", "v_quant"):
        return right[1] is not Granularity.PER_TOKEN
    return left[0] == "head_size" and right[0] == "rotary" and left[1] < ROTARY[right[1]].get("rotary_dim", 0)


def case_of(row: dict[str, Any]) -> KernelCase:
    """The case of one table row."""
    seq, totals, total = LENGTHS[row["lengths"]]
    rest = {k: v for k, v in row.items() if k not in ("lengths", "rotary")}
    return KernelCase(
        id="append-" + "-".join(map(str, row.values())), seq=seq, totals=totals, total=total, capacity=48,
        heads=2 * row["kv_heads"], **ROTARY[row["rotary"]], **rest,
    )  # fmt: skip


CASES = [case_of(row) for row in pairwise(PARAMETERS, forbidden)]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_pair(case: KernelCase, device: Device) -> None:
    """Every pair of head size, lengths, rotary, format, granularities, types and layouts."""
    # A separate present gets its old rows from the other launcher.
    verify(case, device, ("append",) if case.in_place else ("copy_past", "append"))


def special_rows(head_size: int) -> Array:
    """Rows that quantize in every odd way: zero, tiny, huge, ties, one outlier, NaN, Inf."""
    ties = np.array([127, 0.5, 1.5, -0.5, -1.5, 2.5, -126.5, 6.5], np.float32)
    ramp = np.linspace(-1, 1, head_size, dtype=np.float32)
    rows = [np.tile(ties, head_size // 8), np.zeros(head_size), -np.zeros(head_size), np.full(head_size, 0.3), ramp]
    rows += [ramp * 6e-8, ramp * 1e-5, ramp * 6e4, np.full(head_size, 65504.0), np.full(head_size, -6e-8), ramp * 7]
    for value in (np.nan, np.inf, -np.inf, 1000.0, -7.0):
        for place in (0, head_size - 1):
            row = ramp.copy()
            row[place] = value
            rows.append(row)
    return np.array(rows, np.float32)


@pytest.mark.parametrize(
    ("granularity", "scale_type"),
    [
        (Granularity.PER_TENSOR, "float32"),
        (Granularity.PER_CHANNEL, "float32"),
        (Granularity.PER_TOKEN, "float32"),
        (Granularity.PER_TOKEN, "float16"),
    ],
)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_size", [24, 128, 256])
def test_special_rows(
    head_size: int, dtype: CacheDtype, half: HalfName, scale_type: FloatName, granularity: Granularity, device: Device
) -> None:
    """Ties, zeros, subnormals, the largest values and values that are not finite, on both sides."""
    special = special_rows(head_size)
    case = KernelCase(
        id=f"special-{head_size}-{dtype}-{half}-{scale_type}-{granularity}", dtype=dtype, head_size=head_size,
        activation=half,
        scale_type=scale_type, k_quant=granularity, v_quant=granularity, seq=len(special),
        totals=(len(special) + 3,), capacity=48, total=48,
    )  # fmt: skip
    inputs = make_inputs(case)
    with np.errstate(over="ignore"):
        values = special.astype(np.float16) if half == "float16" else round_bfloat16(special)
    key = np.stack([values, values[::-1]], axis=1).reshape(1, len(special), -1)
    inputs = replace(inputs, key=key, value=np.ascontiguousarray(key[:, ::-1]))
    verify(case, device, ("append",), inputs=inputs)


@pytest.mark.parametrize("dtype", FORMATS)
def test_bfloat16_range(dtype: CacheDtype, device: Device) -> None:
    """Rows far beyond float16's range in both directions, in both types of scale cache."""
    for scale_type in ("float32", "float16"):
        case = KernelCase(
            id=f"bf16-range-{dtype}-{scale_type}", dtype=dtype, activation="bfloat16", seq=8, totals=(8,), total=64,
            scale_type="float16" if scale_type == "float16" else "float32",
        )  # fmt: skip
        inputs = make_inputs(case)
        assert inputs.key is not None
        factors = np.array([1e-38, 1e-30, 1e-10, 1e-6, 1e6, 1e10, 1e30, 1e38], np.float32)[None, :, None]
        with np.errstate(over="ignore"):
            key = round_bfloat16(np.sign(inputs.key) * np.minimum(np.abs(inputs.key), 3) * factors)
        verify(case, device, ("append",), inputs=replace(inputs, key=key, value=key))


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_prompt_key(half: HalfName, rotary: str, device: Device) -> None:
    """In a prompt the rotated keys are kept for attention; padding keeps its scratch."""
    for head_size in (24, 64, 200, 256):
        case = KernelCase(
            id=f"prompt-key-{half}-{rotary}-{head_size}", activation=half, head_size=head_size, seq=9, totals=(9, 4,
            0, 10),
            total=9, **ROTARY[rotary],
        )  # fmt: skip
        outcome, _, _ = verify(case, device, ("append",))
        assert (outcome.prompt_key is None) == (rotary == "none")


@pytest.mark.parametrize("misalign", [2, 4, 8, 16, 32])
def test_activations_at_any_address(misalign: int, device: Device) -> None:
    """Activations that start off a 16-byte boundary, separate and packed."""
    for packed in (False, True):
        for rotary in ("none", "half", "interleaved"):
            case = KernelCase(
                id=f"misaligned-{misalign}-{packed}-{rotary}", packed=packed, rotary=rotary, seq=3, totals=(40, 17),
                head_size=72, total=64,
            )  # fmt: skip
            verify(case, device, ("append",), activation_misalign=misalign)


@pytest.mark.parametrize("dtype", FORMATS)
def test_cache_rows_at_their_alignment(dtype: CacheDtype, device: Device) -> None:
    """Caches that start on the least boundary that MakePlan accepts."""
    for head_size in (64, 72, 128):
        case = KernelCase(
            id=f"least-aligned-{dtype}-{head_size}", dtype=dtype, head_size=head_size, seq=3, totals=(40, 17), total=64
        )
        for in_place in (True, False):
            placed = replace(case, in_place=in_place)
            kernels: Any = ("append",) if in_place else ("copy_past", "append")
            verify(placed, device, kernels, misalign=4 if dtype is CacheDtype.INT4 else 8)


@pytest.mark.parametrize(("batch", "seq", "kv_heads"), [(1, 150_000, 1), (3, 1, 50_000), (50_000, 1, 3)])
def test_many_rows(batch: int, seq: int, kv_heads: int, device: Device) -> None:
    """More than 65,535 blocks, along each of the three dimensions."""
    case = KernelCase(
        id=f"append-many-{batch}-{seq}", head_size=8, heads=kv_heads, kv_heads=kv_heads, seq=seq,
        totals=(seq + 1,) * batch, capacity=seq + 2, total=seq + 2,
    )  # fmt: skip
    inputs, before = make_inputs(case), poisoned_cache(case, case.capacity)
    with Call(device, case, inputs, before) as call:
        call.launch("append")
        outcome = call.outcome()
    assert not outcome.stray
    _, key, value = (x.astype(np.float32).swapaxes(1, 2) for x in split_heads(case.operator, inputs))
    for values, rows, scales in ((key, before.key, before.k_scale), (value, before.value, before.v_scale)):
        assert scales is not None
        rows[:, :, 1 : seq + 1], scales[:, :, 1 : seq + 1] = quantize_per_token(values, CacheDtype.INT8, np.float32)
    check_cache(outcome.cache, before)
