"""What a run says at its end, and what `status` says: tables on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbuild import log
from kvbuild.config import STAGES, Config
from kvbuild.stages import StageResult, State
from kvbuild.stamps import Stamp


def summary(results: Sequence[StageResult], outputs: Mapping[str, Mapping[str, Any]]) -> str:
    """Stage, time, ran or cached; then the wheel."""
    rows = [(result.name, log.format_seconds(result.seconds), result.outcome, result.note) for result in results]
    lines = table(("stage", "time", "", ""), rows)
    if results[-1].name in ("wheel", "test"):
        wheel = outputs["wheel"]
        lines += ["", f"wheel   {wheel['path']}", f"size    {wheel['size'] / 1e6:.1f} MB"]
        lines += [f"sha256  {wheel['sha256']}", f"build   {wheel['build_info']}"]
    return "\n".join(lines)


def status(rows: Sequence[tuple[str, State, Stamp | None]]) -> str:
    """Stage, state, and when it finished."""
    cells = [
        (name, state, stamp.finished, log.format_seconds(stamp.seconds), str(stamp.outputs.get("note", "")))
        if stamp
        else (name, state, "", "", "")
        for name, state, stamp in rows
    ]
    return "\n".join(table(("stage", "state", "finished", "took", ""), cells))


def dry_run(cfg: Config, rows: Sequence[tuple[str, State, Stamp | None]]) -> str:
    """Which of the stages asked for would run."""
    chosen = STAGES[STAGES.index(cfg.first) : STAGES.index(cfg.last) + 1]
    cells = [
        (name, "run" if cfg.force or state != "current" else "skip", state) for name, state, _ in rows if name in chosen
    ]
    return "\n".join(table(("stage", "would", "state"), cells))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with left-aligned columns."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
