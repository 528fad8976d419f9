"""Times of replays: what the host does before and after a replay must not be in them. On a made-up stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from python_tests.bench.gqa_timing import ReplayTimer, host_read_bandwidth

WORK = 0.002


@dataclass(frozen=True)
class MadeUpEvent:
    """Passes at a time of the host's clock."""

    at: float

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def seconds_since(self, start: MadeUpEvent) -> float:
        return self.at - start.at


@dataclass
class MadeUpStream:
    """Work in order, each piece begun when the one before has ended. record_delay: seconds a record takes the host."""

    end: float = 0.0
    record_delay: float = 0.0
    paused: list[float] = field(default_factory=list)

    def enqueue(self, seconds: float) -> None:
        self.end = max(self.end, time.perf_counter()) + seconds

    def record(self) -> MadeUpEvent:
        time.sleep(self.record_delay)
        self.enqueue(0)
        return MadeUpEvent(self.end)

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self.enqueue(seconds)

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.end - time.perf_counter()))


def timer(stream: MadeUpStream, *, waits: bool, work: float = WORK) -> ReplayTimer:
    """A replay of `work` seconds, with a slow host before it; waits: it returns when the work is done, and late.

    What the timer found out about the length of a replay is replaced: a busy machine makes it any number.
    """

    def replay() -> None:
        time.sleep(0.0005)
        stream.enqueue(work)
        if waits:
            stream.synchronize()
            time.sleep(0.001)

    it = ReplayTimer(cast(Any, stream), replay)
    it.seconds = 2 * work
    return it


@pytest.mark.parametrize("waits", [True, False])
def test_queued_replay_is_its_work_alone(waits: bool) -> None:
    """Where the other thread woke in time. A busy machine may wake it too late, which is then counted."""
    stream = MadeUpStream()
    it = timer(stream, waits=waits)
    on_time = 0
    while it.samples < 40 and on_time < 3:
        late = it.late
        found = it.milliseconds()
        assert found > 1e3 * WORK - 1e-6
        if it.late == late:
            assert found == pytest.approx(1e3 * WORK, abs=1e-6)
            on_time += 1
    assert len(stream.paused) == it.samples
    assert on_time
    it.close()


def test_late_events_are_counted() -> None:
    """An event that is recorded after the pause says nothing: the sample is measured plainly."""
    stream = MadeUpStream()
    it = timer(stream, waits=True)
    stream.record_delay = 0.05
    assert it.milliseconds() > 1e3 * WORK
    assert (it.samples, it.late) == (1, 1)
    it.close()


def test_long_replays_are_not_paused() -> None:
    """Where the host's part is small beside the work."""
    stream = MadeUpStream()
    it = timer(stream, waits=True, work=0.03)
    assert it.milliseconds() >= 30
    assert stream.paused == []
    assert it.late == 0
    it.close()


def test_host_bandwidth() -> None:
    """A plausible number."""
    rate, method = host_read_bandwidth(1, 2**24)
    assert 0.01 < rate < 1000
    assert method == "host threads"
