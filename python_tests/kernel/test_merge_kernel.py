"""The merge kernel, of more splits than one block merges: blocks of 64 elements of a row, and of a whole row.

Its threads read the numerators in rounds, before they know which splits had tokens: entries whose splits all have some,
or only the first, and numbers of splits on both sides of a round.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from python_tests.kernel.call import Call
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS, HALVES
from python_tests.kernel.test_merge import judge_any_scratch
from python_tests.kernel.test_values import ZERO_BYTE, rows_of, scales_of
from python_tests.kernel.verify import verify
from python_tests.op.gqa_case import make_inputs, make_past
from python_tests.reference.format import CacheDtype, Granularity

pytestmark = pytest.mark.gpu

# What 256 and 512 threads read of 64 elements in a round, and more; one more than a block of decode merges.
SPLITS = (33, 128, 129, 256, 257)
# Of whole rows, 512 threads read 64 splits of 256 elements in a round.
WHOLE_SPLITS = (33, 65)
HEAD_SIZES = (64, 72, 128, 136, 256)
VISITS = [(d, splits, False) for d in HEAD_SIZES for splits in SPLITS]
VISITS += [(d, splits, True) for d in HEAD_SIZES if d > 64 for splits in WHOLE_SPLITS]
LAST_OF_ONE = 1  # the entry of case_of whose last split has one token


def case_of(d: int, splits: int, dtype: CacheDtype, *, whole: bool = False) -> KernelCase:
    """As many splits as the capacity has. Entries: all are full; the last has one token; only the first; too long.

    whole: so many rows that each has one block of the merge kernel.
    """
    heads = 4 if not whole else 8 if d > 128 else 16
    tokens = 256 if d in (64, 128) and heads <= 8 else 128  # of a split, at least: blocks are wide
    capacity = splits * tokens
    totals = (capacity, (splits - 1) * tokens + 1, tokens, capacity + 1, *([1] if whole else []))
    return KernelCase(
        id=f"merge-kernel-d{d}-{splits}-whole{whole}-{dtype}", dtype=dtype, kv_heads=1, heads=heads, head_size=d,
        capacity=capacity, total=capacity, totals=totals, rotary="half", sink=splits % 2 == 0,
        v_quant=Granularity.PER_CHANNEL if splits % 2 else Granularity.PER_TOKEN, activation=HALVES[splits % 2],
        multiprocessors=len(totals) * splits, clusters=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("d", "splits", "whole"), VISITS)
def test_scratch_of_any_contents(d: int, splits: int, whole: bool, dtype: CacheDtype, device: Device) -> None:
    """What the scratch holds of splits without tokens is read and not used."""
    case = case_of(d, splits, dtype, whole=whole)
    inputs, past = make_inputs(case), make_past(case)
    with Call(device, case, inputs, past) as call:
        assert call.plan.merge == "merge-kernel"
        judge_any_scratch(call, inputs, past, 1)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("d", "splits", "whole"), [v for v in VISITS if v[1] in (33, 65, 129)])
def test_parts_that_are_nan(d: int, splits: int, whole: bool, dtype: CacheDtype, device: Device) -> None:
    """NaN in V's scale of a token of the last split but one: in that entry's output, and in no other's."""
    case = case_of(d, splits, dtype, whole=whole)
    case = replace(case, id=f"{case.id}-nan", v_quant=Granularity.PER_TOKEN)
    past, token = make_past(case), case.capacity // splits * (splits - 1) - 1
    scales_of(past, "v")[LAST_OF_ONE, :, token] = np.nan
    rows_of(past, "v")[LAST_OF_ONE, :, token] = ZERO_BYTE[dtype]
    outcome, expected, _ = verify(case, device, past=past)
    wrong = ~np.isfinite(outcome.output)
    assert wrong[LAST_OF_ONE].all()
    assert not np.delete(wrong, LAST_OF_ONE, axis=0)[np.delete(expected.valid, LAST_OF_ONE)].any()
