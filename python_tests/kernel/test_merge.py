"""Decode's merge through memory: the block of a unit that begins last waits for the words of all parts and adds them.

With 16 rows the first block that is through does half of them, but for one that is so before all have begun.

The block that will write a part clears it, so that nothing depends on what the scratch held; a part with a NaN has been
written as any other. A block that waits for ever ends the run: conftest.py's time_limit.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from python_tests.kernel.call import WORKSPACE_POISON, Call, Outcome
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Device
from python_tests.kernel.edges import FORMATS
from python_tests.kernel.test_repeat import same
from python_tests.kernel.test_values import ZERO_BYTE, rows_of, scales_of
from python_tests.kernel.verify import judge, verify
from python_tests.kernel.yardstick import expected_of
from python_tests.op.gqa_case import make_inputs, make_past
from python_tests.reference.format import U8, CacheDtype, Granularity
from python_tests.reference.step import Cache, Expected, Inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("time_limit")]


class Blocks(NamedTuple):
    """Blocks of an H200's plan: their warps, the tokens of a split, what they are planned for, and how many splits."""

    warps: int
    split_tokens: int
    arguments: dict[str, Any]
    splits: tuple[int, ...]


# Four query heads for a KV head unless said otherwise. Few, and as many as are merged so; 16 parts and fewer are read
# together, or in two or four shares of lanes: on both sides of each.
SPLITS = (2, 5, 9, 16, 17, 32)
# More than nine splits are wide.
NARROW = (2, 3, 9)
BLOCKS = {
    "wide-d64": Blocks(16, 256, {"head_size": 64, "seq": 2}, SPLITS),
    "wide-d128": Blocks(16, 256, {"head_size": 128, "seq": 2}, SPLITS),
    "wide-d256": Blocks(8, 128, {"head_size": 256, "seq": 2}, SPLITS),
    "wide-d128-1-row": Blocks(16, 256, {"head_size": 128, "heads": 1}, (3, 31)),
    "wide-d128-7-rows": Blocks(16, 256, {"head_size": 128, "heads": 7}, (8, 32)),
    "narrow-d64": Blocks(8, 128, {"head_size": 64, "seq": 2}, NARROW),
    "narrow-d128": Blocks(8, 128, {"head_size": 128, "seq": 2}, NARROW),
    "narrow-d256": Blocks(4, 128, {"head_size": 256, "seq": 2}, NARROW),
    "padded-d24": Blocks(8, 128, {"head_size": 24, "seq": 2}, (2, 17)),
    "padded-d72": Blocks(8, 128, {"head_size": 72, "seq": 2}, (9, 32)),
    "padded-d136": Blocks(4, 128, {"head_size": 136, "seq": 2}, (9, 32)),
    "16-rows-d64": Blocks(8, 128, {"head_size": 64, "seq": 4}, SPLITS),
    "16-rows-d128": Blocks(8, 128, {"head_size": 128, "seq": 4}, SPLITS),
    "16-rows-d72": Blocks(8, 128, {"head_size": 72, "seq": 4}, (9, 32)),
}
# (blocks, splits, whether a window leaves four parts of them at most)
VISITS = [(name, n, False) for name, blocks in BLOCKS.items() for n in blocks.splits]
VISITS += [(name, blocks.splits[-1], True) for name, blocks in BLOCKS.items()]
MOST = {name: blocks.splits[-1] for name, blocks in BLOCKS.items()}
# Entries of case_of: all parts; all, the last one of a token, which is the last query row's alone; half of them; two;
# and one part, full and of the new tokens alone. The lengths of the others do not fit.
ALL, LAST, HALF, TWO, ONE, NEW = range(6)
ENTRIES = 8
REPEATS = 3


def case_of(name: str, splits: int, dtype: CacheDtype, *, window: bool = False) -> KernelCase:
    """As many splits as the capacity has, each of as few tokens as there may be; entries of all numbers of parts."""
    blocks = BLOCKS[name]
    tokens, arguments = blocks.split_tokens, {"seq": 1, "heads": 4} | blocks.arguments
    # Narrow blocks: where wide ones would leave half a unit's share of the multiprocessors idle.
    multiprocessors = ENTRIES * (splits // 2) + ENTRIES // 2 if name.startswith("narrow") else ENTRIES * splits
    capacity = splits * tokens
    return KernelCase(
        id=f"merge-{name}-{splits}-window{window}-{dtype}", dtype=dtype, kv_heads=1, capacity=capacity, total=capacity,
        totals=(
            capacity, (splits - 1) * tokens + 1, splits // 2 * tokens + 5, tokens + 1, tokens, arguments["seq"],
            arguments["seq"] - 1, capacity + 1,
        ),
        window=3 * tokens - 40 if window else -1, v_quant=Granularity.PER_CHANNEL if window else Granularity.PER_TOKEN,
        sink=splits % 2 == 1, rotary="half", multiprocessors=multiprocessors, clusters=False, **arguments,
    )  # fmt: skip


def check_plan(call: Call, name: str, splits: int) -> None:
    """The block that begins last merges, and the blocks are what they are named for where a chip has wide ones."""
    assert call.plan.merge == "begins-last"
    if call.device.compute_capability >= 80:
        assert (call.plan.warps, call.plan.splits) == (BLOCKS[name].warps, splits)


def scratch_of(case: KernelCase, size: int) -> dict[str, U8]:
    """Contents of the scratch: words that look as if nobody had written them, and some that look like parts."""
    numbers = (case.rng("scratch").standard_normal(size // 4) * 1e4).astype(np.float32)
    return {
        "not written": np.full(size, WORKSPACE_POISON, np.uint8),
        "numbers": numbers.view(np.uint8),
        "zeros": np.zeros(size, np.uint8),
    }


def judge_any_scratch(call: Call, inputs: Inputs, past: Cache, repeats: int) -> tuple[Outcome, Expected]:
    """Right, and equal bits whatever the scratch held: scratch_of's contents, and what the call before left."""
    outcomes, poison = [], call.buffers["output"].read()[0]
    for contents in scratch_of(call.case, call.plan.workspace_bytes).values():
        for _ in range(repeats):
            call.buffers["workspace"].write(contents)
            for _ in ("those contents", "what the call before left"):
                call.buffers["output"].write(poison)
                call.launch()
                outcomes.append(call.outcome())
    expected = expected_of(call.case, inputs, past)
    judge(call.case, outcomes[0], expected, past)
    for other in outcomes[1:]:
        assert not other.stray
        same(outcomes[0], other)
    return outcomes[0], expected


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("name", "splits", "window"), VISITS)
def test_scratch_of_any_contents(name: str, splits: int, window: bool, dtype: CacheDtype, device: Device) -> None:
    """Entries of all numbers of parts; of those that do not fit the output is NaN."""
    case = case_of(name, splits, dtype, window=window)
    inputs, past = make_inputs(case), make_past(case)
    with Call(device, case, inputs, past) as call:
        check_plan(call, name, splits)
        outcome, expected = judge_any_scratch(call, inputs, past, REPEATS)
    assert expected.valid.tolist() == [True] * 6 + [False] * 2
    assert np.isnan(outcome.output[~expected.valid]).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", BLOCKS)
def test_calls_that_share_scratch(name: str, dtype: CacheDtype, device: Device) -> None:
    """One call behind the other without a wait between them, of different lengths and splits: the bits of each alone.

    The next call's blocks begin while the one before merges, and must not clear what that one reads.
    """
    cases = [case_of(name, splits, dtype) for splits in (MOST[name], BLOCKS[name].splits[0])]
    cases[1] = replace(cases[1], totals=cases[1].totals[::-1])
    inputs, pasts = [make_inputs(case) for case in cases], [make_past(case) for case in cases]
    with (
        Call(device, cases[0], inputs[0], pasts[0]) as large,
        Call(device, cases[1], inputs[1], pasts[1]) as small,
    ):
        calls, alone = (large, small), []
        for call in calls:
            call.launch()
            alone.append(call.outcome())
        assert large.plan.workspace_bytes >= small.plan.workspace_bytes
        assert large.plan.counters == small.plan.counters
        device.bind_workspace(small.plan, large.buffers["workspace"].address, small.params)
        small.params.counters = large.params.counters
        for call in calls:
            call.buffers["output"].write(np.zeros_like(call.buffers["output"].read()[0]))
        for _ in range(50):
            for call in calls:
                call.launch()
        together = [call.outcome() for call in calls]
    for case, given, past, first, second in zip(cases, inputs, pasts, alone, together, strict=True):
        judge(case, first, expected_of(case, given, past), past)
        assert not second.stray
        same(first, second)


def spoil(kind: str, name: str, case: KernelCase, inputs: Inputs, past: Cache) -> tuple[int, ...]:
    """Makes parts of some entries NaN, and returns the entries."""
    assert case.dtype is not None
    tokens, middle = BLOCKS[name].split_tokens, MOST[name] // 2
    if kind == "query":
        inputs.query.reshape(*inputs.query.shape[:2], case.heads, -1)[:TWO, :, 0, 3] = np.nan
        return tuple(range(TWO))
    if kind == "every word":
        for entry in (ALL, HALF, TWO):
            old = case.pasts[entry]
            # Each part's sums come from such numbers alone, but for the new tokens'.
            scales_of(past, "v").view(np.uint32)[entry, :, :old] = 0xFFFFFFFF
            rows_of(past, "v")[entry, :, :old] = ZERO_BYTE[case.dtype]
        return (ALL, HALF, TWO)
    places = {ALL: middle * tokens + 7, LAST: 0, TWO: tokens - 9}
    for entry, token in places.items():
        if kind == "code":
            rows_of(past, "v")[entry, :, token, 9] = 0x7F
            continue
        side = "k" if kind == "k" else "v"
        scales_of(past, side)[entry, :, token] = np.inf if kind == "infinity" else np.nan
        rows_of(past, side)[entry, :, token] = ZERO_BYTE[case.dtype]
    return tuple(places)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*product(("every word", "v", "k", "infinity", "query"), FORMATS), ("code", CacheDtype.FP8)]
)
@pytest.mark.parametrize("name", BLOCKS)
def test_parts_that_are_nan(name: str, kind: str, dtype: CacheDtype, device: Device) -> None:
    """A part that holds NaN, in one word or in all of them, is there: nobody waits for it, and it is in the output."""
    case = case_of(name, MOST[name], dtype)
    case = replace(case, id=f"{case.id}-{kind}")
    inputs, past = make_inputs(case), make_past(case)
    spoiled = spoil(kind, name, case, inputs, past)
    outcome, _, plan = verify(case, device, inputs=inputs, past=past)
    assert plan.merge == "begins-last"
    wrong = ~np.isfinite(outcome.output)
    for entry in (ALL, LAST, HALF, TWO, ONE, NEW):
        if entry not in spoiled:
            assert not wrong[entry].any(), entry
            continue
        of_kind = wrong[entry, ..., 9] if kind == "code" else wrong[entry, :, :1] if kind == "query" else wrong[entry]
        assert of_kind.all(), entry
        assert wrong[entry].sum() == of_kind.sum(), entry


# More blocks than run at once, in the order of their numbers: those of the last wave begin when others have ended.
WAVES: dict[str, dict[str, Any]] = {
    "wide-d256": {"head_size": 256, "kv_heads": 8, "heads": 16, "capacity": 1025, "entries": 7},
    "narrow-d128": {"head_size": 128, "kv_heads": 8, "heads": 16, "capacity": 1000, "entries": 17},
    "16-rows-d64": {"head_size": 64, "kv_heads": 8, "heads": 128, "capacity": 1000, "entries": 9},
    "16-rows-d128": {"head_size": 128, "kv_heads": 8, "heads": 128, "capacity": 1000, "entries": 9},
    "9-rows-d128": {"head_size": 128, "kv_heads": 8, "heads": 72, "capacity": 1000, "entries": 9},
}


def waves_of(name: str, dtype: CacheDtype) -> KernelCase:
    """Lengths of one part to all of them, and one that does not fit."""
    arguments = dict(WAVES[name])
    capacity, entries = arguments["capacity"], arguments.pop("entries")
    totals = tuple(int(t) for t in np.linspace(1, capacity, entries - 1))
    return KernelCase(
        id=f"merge-waves-{name}-{dtype}", dtype=dtype, totals=(*totals, capacity + 1), total=capacity,
        multiprocessors=132, clusters=False, **arguments,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", WAVES)
def test_more_blocks_than_run_at_once(name: str, dtype: CacheDtype, device: Device) -> None:
    """The block that begins last is one of the last wave: what it waits for runs or has ended."""
    case = waves_of(name, dtype)
    outcome, _, plan = verify(case, device)
    assert plan.merge == "begins-last"
    for _ in range(REPEATS):
        same(outcome, verify(case, device)[0])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", WAVES)
def test_whoever_merges(name: str, dtype: CacheDtype, device: Device) -> None:
    """Equal entries have equal bits, though blocks of some have all begun before one is through and of others not."""
    case = waves_of(name, dtype)
    capacity = case.capacity
    case = replace(case, id=f"{case.id}-equal", totals=(capacity - 7,) * case.batch)
    inputs, past = make_inputs(case), make_past(case)
    copied = [inputs.query, inputs.key, inputs.value]
    copied += [of(past, side) for of in (rows_of, scales_of) for side in ("k", "v")]
    for array in copied:
        assert array is not None
        array[1:] = array[:1]
    outcome, _, plan = verify(case, device, inputs=inputs, past=past)
    assert plan.merge == "begins-last"
    bits = outcome.output.view(np.uint16)
    assert (bits == bits[:1]).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", BLOCKS)
def test_rows_that_are_not_in_vectors(name: str, dtype: CacheDtype, device: Device) -> None:
    """Activations at two bytes off a boundary: the merged rows are written element by element."""
    _, _, plan = verify(case_of(name, MOST[name], dtype), device, activation_misalign=2)
    assert plan.merge == "begins-last"
    assert not plan.activation_vectors
