"""Runs stages in order: skips what is current, stamps what has finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvbuild import log, stamps
from kvbuild.config import STAGES, Base, Config
from kvbuild.errors import UsageError
from kvbuild.stamps import Stamp

Outcome = Literal["ran", "cached"]
State = Literal["current", "out of date", "not run"]
Outputs = dict[str, Any]
"""What a stage hands to later ones: JSON values. `note` is shown to the user."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pass over the stages. `outputs` and `digests` fill as stages finish or are found finished."""

    cfg: Config
    base: Base
    outputs: dict[str, Outputs] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def log_path(self, stage: str) -> Path:
        return self.cfg.logs / f"{STAGES.index(stage) + 1:02d}-{stage}.log"

    def stamp_path(self, stage: str) -> Path:
        """The patched source is shared by all variants of a base, everything else is not."""
        return self.cfg.stamps / (f"{stage}.json" if stage == "apply" else f"{stage}-{self.cfg.variant}.json")

    def accept(self, stage: str, stamp: Stamp) -> None:
        self.outputs[stage] = stamp.outputs
        self.digests[stage] = stamp.digest


@dataclass(frozen=True, kw_only=True)
class Stage:
    digest: Callable[[Run], str]
    """covers the inputs, among them the digests of earlier stages"""
    execute: Callable[[Run], Outputs]
    valid: Callable[[Run, Outputs], bool]
    """whether what the outputs stand for is still there"""


Table = Mapping[str, Stage]

_DOCTOR = "doctor"
"""Only looks, so no stage depends on it."""


@dataclass(frozen=True, kw_only=True)
class StageResult:
    name: str
    outcome: Outcome
    seconds: float
    note: str


def run_stages(run: Run, table: Table) -> list[StageResult]:
    """Run `cfg.first` to `cfg.last`, skipping what is current."""
    names = list(table)
    first, last = names.index(run.cfg.first), names.index(run.cfg.last)
    for name in names[:first]:
        if name != _DOCTOR:
            _adopt(run, name, table[name])
    return [_run_one(run, name, table[name]) for name in names[first : last + 1]]


def plan(run: Run, table: Table) -> list[tuple[str, State, Stamp | None]]:
    """What a run would find, without changing anything: a stage behind one that is not current is not either."""
    rows: list[tuple[str, State, Stamp | None]] = []
    for name, stage in table.items():
        stamp = stamps.load(run.stamp_path(name))
        state: State = "not run" if stamp is None else "out of date"
        ready = all(state == "current" for earlier, state, _ in rows if earlier != _DOCTOR)
        if stamp and ready and _is_current(run, stage, stage.digest(run), stamp):
            state = "current"
            run.accept(name, stamp)
        rows.append((name, state, stamp))
    return rows


def _is_current(run: Run, stage: Stage, digest: str, stamp: Stamp) -> bool:
    return stamp.digest == digest and stage.valid(run, stamp.outputs)


def _adopt(run: Run, name: str, stage: Stage) -> None:
    """Take over a stage that comes before the first one asked for."""
    stamp = stamps.load(run.stamp_path(name))
    if stamp is None:
        msg = f"{run.cfg.first} needs {name}, which has not finished for {run.cfg.base} ({run.cfg.variant})"
        raise UsageError(msg, todo=f"run build.py --until {run.cfg.first}")
    if not _is_current(run, stage, stage.digest(run), stamp):
        log.warn(f"{name} is out of date: its inputs changed; build.py --from {name} brings it up to date")
    run.accept(name, stamp)


def _run_one(run: Run, name: str, stage: Stage) -> StageResult:
    start = time.monotonic()
    path, digest = run.stamp_path(name), stage.digest(run)
    stamp = stamps.load(path)
    if stamp and not run.cfg.force and _is_current(run, stage, digest, stamp):
        run.accept(name, stamp)
        log.info(f"{name}: cached")
        return _result(name, "cached", start, stamp.outputs)
    path.unlink(missing_ok=True)  # from here on the old outputs may be half replaced
    run.log_path(name).unlink(missing_ok=True)
    with log.step(name):
        outputs = stage.execute(run)
    stamp = Stamp(digest=digest, seconds=time.monotonic() - start, outputs=outputs)
    stamps.save(path, stamp)
    run.accept(name, stamp)
    return _result(name, "ran", start, outputs)


def _result(name: str, outcome: Outcome, start: float, outputs: Outputs) -> StageResult:
    note = str(outputs.get("note", ""))
    return StageResult(name=name, outcome=outcome, seconds=time.monotonic() - start, note=note)
