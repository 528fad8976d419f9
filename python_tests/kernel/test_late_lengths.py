"""Lengths that the kernel before writes late: the decode kernel has begun with what was there, and begins again.

A kernel lets the next one begin at once and stores the lengths some cycles later: the probes below see that blocks of
the next one read what was there before. Other lengths between a block's two reads must leave no trace.

Aimed at: the guess used without the check (outputs of other tokens; the new row at the guessed position, with its
angle); new rows written before the check (the guessed row of the cache changes); a block that stays away because its
split was empty at the guess, or that stays after it has become empty (outputs, or a merge that waits for ever); NaN
written for a guess that does not fit; counters or inboxes that count the first attempt. What a first attempt brings is
NaN as codes, scales and floats: rows behind the late length are 0xFF.

Two races are too rare to be seen here, though looked for: planted, they left it green on an H200. Warps of a block that
each read a guess of their own (4 blocks of 3,960 see two lengths), and asynchronous copies of the first attempt that
land in the second one's tiles or sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import pytest

from python_tests.kernel.call import Call, Outcome
from python_tests.kernel.case import KernelCase
from python_tests.kernel.device import Buffer, Device, Graph
from python_tests.kernel.edges import FORMATS
from python_tests.kernel.params import Merge
from python_tests.kernel.test_repeat import same
from python_tests.kernel.verify import judge
from python_tests.kernel.yardstick import expected_of
from python_tests.op.gqa_case import make_inputs, make_past
from python_tests.reference.format import Array, CacheDtype
from python_tests.reference.step import Cache

pytestmark = pytest.mark.gpu

# Cycles from when the next kernel may begin to the store. A launch follows within some thousands, captured or not.
DELAY = 200_000
SWEEP = range(0, 16_000, 250)  # before its blocks read, while they do, and after
KEPT = 200  # tokens of the batch entry whose length does not change
BEYOND = 2**31


class Way(NamedTuple):
    """What an H200 plans for a case with these arguments."""

    merge: Merge
    warps: int
    arguments: dict[str, Any]


# Two batch entries and two KV heads, of 128 elements unless said otherwise.
WAYS = {
    "one-split": Way("one-split", 8, {"multiprocessors": 1, "capacity": 1000}),
    "one-split-wide": Way("one-split", 16, {"multiprocessors": 4, "capacity": 1000, "clusters": False}),
    "begins-last": Way("begins-last", 8, {"multiprocessors": 6, "capacity": 1300, "clusters": False}),
    "begins-last-wide": Way("begins-last", 16, {"multiprocessors": 132, "capacity": 1300, "clusters": False}),
    "cluster": Way("cluster", 8, {"multiprocessors": 132, "capacity": 1000}),
    "cluster-wide": Way("cluster", 16, {"multiprocessors": 132, "capacity": 2048}),
    "merge-kernel": Way("merge-kernel", 8, {"multiprocessors": 264, "capacity": 8200, "head_size": 72}),
    "merge-kernel-wide": Way("merge-kernel", 16, {"multiprocessors": 132, "capacity": 8200}),
}
# Of the other sizes of a head, and of 16 query rows.
D64, D256, ROWS_16 = {"head_size": 64}, {"head_size": 256}, {"heads": 32}
ALONE = {"clusters": False}
OTHER_WAYS = {
    "begins-last-wide-d64": Way("begins-last", 16, {"multiprocessors": 132, "capacity": 1300} | ALONE | D64),
    "cluster-d64": Way("cluster", 8, {"multiprocessors": 132, "capacity": 1000} | D64),
    "cluster-wide-d64": Way("cluster", 16, {"multiprocessors": 132, "capacity": 2048} | D64),
    "one-split-d256": Way("one-split", 4, {"multiprocessors": 1, "capacity": 1000} | D256),
    "one-split-wide-d256": Way("one-split", 8, {"multiprocessors": 4, "capacity": 1000} | ALONE | D256),
    "begins-last-d256": Way("begins-last", 4, {"multiprocessors": 6, "capacity": 1300} | ALONE | D256),
    "begins-last-wide-d256": Way("begins-last", 8, {"multiprocessors": 132, "capacity": 1300} | D256),
    "cluster-d256": Way("cluster", 4, {"multiprocessors": 132, "capacity": 1000} | D256),
    "cluster-wide-d256": Way("cluster", 8, {"multiprocessors": 20, "capacity": 1300} | D256),
    "merge-kernel-wide-d256": Way("merge-kernel", 8, {"multiprocessors": 264, "capacity": 8200} | D256),
    "one-split-16-rows": Way("one-split", 8, {"multiprocessors": 4, "capacity": 1000} | ROWS_16),
    "begins-last-16-rows": Way("begins-last", 8, {"multiprocessors": 132, "capacity": 2049} | ROWS_16),
    "begins-last-16-rows-d64": Way("begins-last", 8, {"multiprocessors": 132, "capacity": 2049} | ROWS_16 | D64),
    "cluster-16-rows": Way("cluster", 8, {"multiprocessors": 132, "capacity": 1000} | ROWS_16),
    "merge-kernel-16-rows": Way("merge-kernel", 8, {"multiprocessors": 264, "capacity": 8200} | ROWS_16),
}


class Change(NamedTuple):
    """Tokens of the changing entry: what the kernel first finds, and what it must use."""

    early: int
    late: int
    window: int = -1
    seq: int = 1


# Splits have 128 (wide: 256) tokens where there are at least as many splits as these lengths need.
CHANGES = {
    "more-splits": Change(100, 600),
    "fewer-splits": Change(600, 100),
    "all-splits": Change(1, 1000),
    "to-the-first-token": Change(1000, 1),
    "window-moves-back": Change(900, 330, window=290),
    "from-empty": Change(0, 300),
    "to-beyond": Change(300, BEYOND),
}
OTHER_CHANGES = {
    "longer": Change(40, 57),
    "shorter": Change(57, 40),
    "longer-by-one": Change(16, 17),
    "shorter-by-one": Change(33, 32),
    "last-split-filled": Change(128, 129),
    "last-split-emptied": Change(129, 128),
    "last-wide-split-filled": Change(256, 257),
    "last-wide-split-emptied": Change(257, 256),
    "rows-of-two-splits": Change(300, 257, seq=2),
    "rows-of-two-splits-later": Change(90, 129, seq=2),
    "window-moves-on": Change(300, 650, window=290),
    "from-beyond": Change(BEYOND, 300),
    "to-empty": Change(300, 0),
    "from-empty-to-beyond": Change(0, BEYOND),
}
# Every change for each way to merge, the first ones for the other ways.
VISITS = [
    *((way, change) for way in WAYS for change in CHANGES | OTHER_CHANGES),
    *((way, change) for way in OTHER_WAYS for change in CHANGES),
]
SANITIZED = "to-the-first-token"  # copies of tiles that the second attempt has not


def case_of(way: str, change: str, dtype: CacheDtype) -> KernelCase:
    """The case at its late lengths."""
    numbers = (CHANGES | OTHER_CHANGES)[change]
    arguments = {"head_size": 128, "heads": 8} | (WAYS | OTHER_WAYS)[way].arguments
    return KernelCase(
        id=f"late-{way}-{dtype}-{change}", dtype=dtype, seq=numbers.seq, kv_heads=2, totals=(numbers.late, KEPT),
        total=arguments["capacity"], window=numbers.window, rotary="half", **arguments,
    )  # fmt: skip


class Crowd(NamedTuple):
    """Many blocks, so that some always begin while something is stored, and that they wait for memory. Four KV heads.

    Without rotary: the second attempt has no angles to wait for, while copies of the first one may be on their way.
    """

    way: Way
    entries: int


CROWDS = {
    "one-split-d64": Crowd(Way("one-split", 8, {"multiprocessors": 66, "capacity": 600} | D64), 33),
    "one-split-wide-d64": Crowd(Way("one-split", 16, {"multiprocessors": 132, "capacity": 600} | D64), 33),
    "one-split-wide-d128": Crowd(Way("one-split", 16, {"multiprocessors": 132, "capacity": 600}), 33),
    "one-split-d72": Crowd(Way("one-split", 8, {"multiprocessors": 66, "capacity": 300, "head_size": 72}), 33),
    "cluster-d256": Crowd(Way("cluster", 4, {"multiprocessors": 132, "capacity": 200} | D256), 33),
    "begins-last-wide-d64": Crowd(Way("begins-last", 16, {"multiprocessors": 132, "capacity": 1300} | ALONE | D64), 8),
    "begins-last-d128": Crowd(Way("begins-last", 8, {"multiprocessors": 132, "capacity": 1300} | ALONE), 7),
    "begins-last-d256": Crowd(Way("begins-last", 4, {"multiprocessors": 132, "capacity": 1300} | ALONE | D256), 7),
    "begins-last-wide-d256": Crowd(Way("begins-last", 8, {"multiprocessors": 132, "capacity": 1300} | ALONE | D256), 8),
    "begins-last-16-rows": Crowd(
        Way("begins-last", 8, {"multiprocessors": 132, "capacity": 2400, "heads": 64} | ALONE), 3
    ),
    "cluster-d64": Crowd(Way("cluster", 8, {"multiprocessors": 132, "capacity": 900} | D64), 7),
    "cluster-wide-d128": Crowd(Way("cluster", 16, {"multiprocessors": 132, "capacity": 2048}), 3),
    "merge-kernel-wide-d64": Crowd(Way("merge-kernel", 16, {"multiprocessors": 132, "capacity": 8448} | D64), 1),
}


def crowd_of(name: str, dtype: CacheDtype) -> tuple[KernelCase, tuple[int, ...]]:
    """The case at its late lengths, and the early ones."""
    crowd = CROWDS[name]
    arguments = {"head_size": 128, "heads": 8} | crowd.way.arguments
    most = arguments["capacity"] - 9
    pairs = [
        (most, 1), (1, most), (most, 17), (most, 0), (0, most), (most, 40), (BEYOND, most), (most, BEYOND),
        (most, most - 1), (most // 2, most), (most, most // 2), (most, 2),
    ]  # fmt: skip
    early, late = zip(*islice(cycle(pairs), crowd.entries), strict=True)
    case = KernelCase(
        id=f"late-crowd-{name}-{dtype}", dtype=dtype, kv_heads=4, totals=late, total=arguments["capacity"],
        **arguments,
    )  # fmt: skip
    return case, early


def seqlens(*totals: int) -> Array:
    """As the operator gets them."""
    return (np.array(totals, np.int64) - 1).astype(np.int32)


def past_of(case: KernelCase) -> Cache:
    """make_past, with rows behind the late lengths whose bytes are NaN as a float as well."""
    past = make_past(case)
    for b, rows in enumerate(case.pasts):
        for side in (past.key, past.value):
            side.view(np.uint8)[b, :, max(rows, 0) :] = 0xFF
    return past


@contextmanager
def captured(device: Device, enqueue: Callable[[], None]) -> Iterator[Graph]:
    """What is enqueued, as a graph."""
    graph = Graph(device)
    with device.capture(graph):
        enqueue()
    try:
        yield graph
    finally:
        graph.close()


class Late:
    """A call whose lengths are `rows` (rows, B), one row after the other; the last one is the right one."""

    def __init__(self, device: Device, call: Call, rows: Array) -> None:
        self.device, self.call, self.rows = device, call, rows.shape[0]
        self.lengths, self.values = call.buffers["seqlens_k"], Buffer(device, rows)

    def enqueue(self, cycles: int) -> None:
        """The kernel that stores a row every so many cycles, and the call behind it."""
        count = self.call.case.batch
        self.device.store_late(self.lengths.address, self.values.address, self.rows, count, cycles)
        self.call.launch()

    def __enter__(self) -> Late:
        return self

    def __exit__(self, *_: object) -> None:
        self.values.close()


def check_plan(device: Device, call: Call, way: Way) -> None:
    """It is what the way is named for, where there are clusters."""
    if any(device.clusters):
        assert (call.plan.merge, call.plan.warps) == (way.merge, way.warps)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("way", "change"),
    [pytest.param(*visit, marks=[pytest.mark.sanitizer] if visit[1] == SANITIZED else []) for visit in VISITS],
)
def test_late_lengths(way: str, change: str, dtype: CacheDtype, device: Device) -> None:
    """Captured and launched directly: the result is that of the late lengths alone, in output and cache."""
    numbers = (CHANGES | OTHER_CHANGES)[change]
    case = case_of(way, change, dtype)
    inputs, past = make_inputs(case), past_of(case)
    right = seqlens(numbers.late, KEPT)
    assert np.array_equal(right, inputs.seqlens_k)
    outcomes = []
    for as_graph in (True, False):
        with Call(device, case, inputs, past) as call, Late(device, call, right[None]) as late:
            check_plan(device, call, (WAYS | OTHER_WAYS)[way])
            late.lengths.write(seqlens(numbers.early, KEPT))
            if as_graph:
                with captured(device, partial(late.enqueue, DELAY)) as graph:
                    assert graph.kernels == graph.nodes == (2 if call.plan.merge != "merge-kernel" else 3)
                    graph.launch()
                    device.synchronize()
            else:
                late.enqueue(DELAY)
            outcomes.append(call.outcome())
            assert np.array_equal(late.lengths.read()[0], right)
    expected = expected_of(case, inputs, past)
    for outcome in outcomes:
        judge(case, outcome, expected, past)
    assert np.isnan(expected.output[0]).all() == (numbers.late in (0, BEYOND))


class Memory:
    """Empties L2, but for what the second attempt must not wait for: else it is too late to be disturbed."""

    def __init__(self, device: Device) -> None:
        self.device, self.size = device, 2 * device.l2_bytes
        self.other, self.total = device.allocate(self.size), device.allocate(16)

    def empty(self, call: Call) -> None:
        """Enqueues it."""
        self.device.fill(self.other, 0, self.size)
        for name in ("query", "key", "value", "seqlens_k"):
            buffer = call.buffers[name]
            size = int(np.prod(buffer.shape)) * buffer.dtype.itemsize
            self.device.read(buffer.address, size, 1, self.total)

    def close(self) -> None:
        """Frees it."""
        self.device.free(self.other)
        self.device.free(self.total)


def check_crowd(
    device: Device, name: str, dtype: CacheDtype, delays: Iterable[int], *, flickers: int = 0, cold: bool = False
) -> None:
    """Whatever the delay is: the bits of a call whose lengths were right from the start, which the reference judges.

    flickers: rows that are stored before the right one, each a delay after the one before.
    """
    case, early = crowd_of(name, dtype)
    inputs, past = make_inputs(case), past_of(case)
    first, right = seqlens(*early), inputs.seqlens_k
    others = np.stack([first, right, seqlens(*np.roll(early, 1)), seqlens(*np.roll(case.totals, 1))])
    rows = np.concatenate([np.resize(others, (flickers, case.batch)), right[None]]).astype(np.int32)
    memory = Memory(device) if cold else None
    with Call(device, case, inputs, past) as call, Late(device, call, rows) as late:
        restored = ("output", "workspace", "k_past", "v_past", "k_scale", "v_scale")
        start = {key: call.buffers[key].read()[0] for key in restored}
        check_plan(device, call, CROWDS[name].way)
        call.launch()
        wanted: Outcome = call.outcome()
        judge(case, wanted, expected_of(case, inputs, past), past)
        for delay in delays:
            for key, array in start.items():
                call.buffers[key].write(array)
            late.lengths.write(first)
            with captured(device, partial(late.enqueue, delay)) as graph:
                if memory:
                    memory.empty(call)
                graph.launch()
                device.synchronize()
            outcome = call.outcome()
            assert not outcome.stray, delay
            same(outcome, wanted)
    if memory:
        memory.close()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_lengths_written_while_blocks_begin(crowd: str, dtype: CacheDtype, device: Device) -> None:
    """Some blocks find the early lengths and some the late ones."""
    check_crowd(device, crowd, dtype, SWEEP)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_lengths_that_flicker(crowd: str, dtype: CacheDtype, device: Device) -> None:
    """While blocks begin the lengths change every hundred cycles or two: whichever a warp reads, its block has one."""
    check_crowd(device, crowd, dtype, range(100, 400, 10), flickers=80)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_late_lengths_from_memory(crowd: str, dtype: CacheDtype, device: Device) -> None:
    """What was loaded for the early lengths comes slowly, and must not come into what is loaded for the late ones."""
    check_crowd(device, crowd, dtype, [*SWEEP[::3], *[DELAY] * 12], cold=True)


def probe(device: Device, rows: Array, cycles: int, blocks: int = 132) -> Array:
    """What 16 warps of each block (2, blocks, 16) read before their wait and after it, where 0 was before `rows`."""
    zero, unseen = np.zeros(1, np.int32), np.full((2, blocks, 16), -1, np.int32)
    with Buffer(device, zero) as at, Buffer(device, rows) as values, Buffer(device, unseen) as seen:

        def enqueue() -> None:
            device.store_late(at.address, values.address, rows.size, 1, cycles)
            device.read_twice(at.address, seen.address, blocks)

        with captured(device, enqueue) as graph:
            graph.launch()
            device.synchronize()
        found, stray = seen.read()
    assert not stray
    assert (found[1] == rows[-1]).all()
    return found


def test_the_guess_is_early(device: Device) -> None:
    """A kernel that is launched as decode is reads the old value before its wait; those of the sweep see either."""
    overlaps = device.compute_capability >= 90
    late = np.ones(1, np.int32)
    found = [probe(device, late, DELAY)[0] for _ in range(3)]
    # Once at least: whoever shares the GPU may come between the two launches.
    assert any((before == 0).all() for before in found) == overlaps
    seen = [probe(device, late, cycles)[0] for cycles in SWEEP]
    assert any((before == 1).any() for before in seen), "the sweep begins too late"
    assert any((before == 0).any() for before in seen) == overlaps, "the sweep ends too early"


def test_flickers_are_seen(device: Device, record_property: Callable[[str, object], None]) -> None:
    """Blocks read different values, and so would warps of one if they read for themselves."""
    if device.compute_capability < 90:
        pytest.skip("before sm_90 nothing overlaps")
    rows = np.arange(1, 82, dtype=np.int32)
    seen = [probe(device, rows, cycles)[0] for cycles in range(100, 400, 10)]
    assert any(np.unique(before[:, 0]).size > 1 for before in seen)
    mixed = sum(int((before != before[:, :1]).any(axis=1).sum()) for before in seen)
    record_property("blocks whose warps read different values", mixed)
    print(f"{mixed} of {len(seen) * seen[0].shape[0]} blocks have warps that read different values")
    if mixed == 0:
        pytest.skip("no warps of a block read different values: the flicker cannot show that they may")
