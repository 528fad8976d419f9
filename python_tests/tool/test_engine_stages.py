"""Stages: skipped when current, stamped last, continued after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild import stamps
from kvbuild.config import STAGES, Config
from kvbuild.errors import BuildError, UsageError
from kvbuild.stages import Outputs, Run, Stage, StageResult, plan, run_stages
from kvbuild.stamps import Stamp
from python_tests.tool.engine import REPO, make_base, make_cfg

LAST = STAGES.index("apply") + 1


class Pipeline:
    """Three stages; each writes a file, and depends on a word and on the stages before it, doctor excepted."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.words = dict.fromkeys(STAGES[:LAST], "word")
        self.fail: set[str] = set()
        self.ran: list[str] = []

    def file(self, name: str) -> Path:
        return self.cfg.base_dir / f"{name}.out"

    def stage(self, name: str) -> Stage:
        def digest(run: Run) -> str:
            before = {earlier: known for earlier, known in run.digests.items() if earlier != "doctor"}
            return stamps.digest_of([self.words[name], before])

        def execute(run: Run) -> Outputs:
            self.ran.append(name)
            self.file(name).parent.mkdir(parents=True, exist_ok=True)
            self.file(name).write_text("half")
            if name in self.fail:
                raise BuildError(name)
            self.file(name).write_text("whole")
            return {"z": 1, "a": list(run.outputs), "note": f"note of {name}"}

        def valid(run: Run, outputs: Outputs) -> bool:
            return self.file(name).exists() and self.file(name).read_text() == "whole"

        return Stage(digest=digest, execute=execute, valid=valid)

    def run(self, **changes: object) -> list[StageResult]:
        self.ran = []
        cfg = replace(self.cfg, **{"last": "apply", **changes})  # type: ignore[arg-type]
        return run_stages(Run(cfg=cfg, base=make_base()), self.table)

    @property
    def table(self) -> dict[str, Stage]:
        return {name: self.stage(name) for name in STAGES[:LAST]}

    def states(self) -> list[str]:
        return [state for _, state, _ in plan(Run(cfg=self.cfg, base=make_base()), self.table)]


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(make_cfg(tmp_path))


def test_second_run_is_cached(pipeline: Pipeline) -> None:
    assert [result.outcome for result in pipeline.run()] == ["ran"] * 3
    again = pipeline.run()
    assert [result.outcome for result in again] == ["cached"] * 3
    assert pipeline.ran == []
    assert again[-1].note == "note of apply"


def test_changed_input_runs_that_stage_and_those_behind_it(pipeline: Pipeline) -> None:
    pipeline.run()
    pipeline.words["fetch"] = "other"
    pipeline.run()
    assert pipeline.ran == ["fetch", "apply"]


def test_missing_output_runs_the_stage_again(pipeline: Pipeline) -> None:
    pipeline.run()
    pipeline.file("fetch").unlink()
    pipeline.run()
    assert pipeline.ran == ["fetch"]  # its digest is the same, so what follows stays current


def test_failure_leaves_no_stamp_and_the_next_run_goes_on(pipeline: Pipeline) -> None:
    pipeline.run()
    pipeline.words["fetch"] = "other"
    pipeline.fail = {"fetch"}
    with pytest.raises(BuildError):
        pipeline.run()
    # Back to the old inputs: the old stamp would vouch for outputs that the failed run has half overwritten.
    pipeline.words["fetch"] = "word"
    pipeline.fail = set()
    pipeline.run()
    assert pipeline.ran == ["fetch"]


def test_force_runs_what_is_current(pipeline: Pipeline) -> None:
    pipeline.run()
    pipeline.run(force=True, first="fetch", last="fetch")
    assert pipeline.ran == ["fetch"]


def test_single_stage_needs_the_ones_before(pipeline: Pipeline) -> None:
    with pytest.raises(UsageError, match="apply needs fetch") as caught:
        pipeline.run(first="apply")
    assert "--until apply" in caught.value.todo
    assert pipeline.ran == []


def test_single_stage_takes_over_outputs_and_tells_of_stale_ones(
    pipeline: Pipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline.run()
    pipeline.run(first="apply", force=True)
    assert "out of date" not in capfd.readouterr().err
    pipeline.words["fetch"] = "other"
    pipeline.run(first="apply", force=True)
    assert "fetch is out of date" in capfd.readouterr().err
    assert pipeline.ran == ["apply"]


def test_outputs_read_back_equal_in_order(tmp_path: Path) -> None:
    outputs = {"z": {"second": 1, "first": 2}, "a": [3, "ü"]}
    stamps.save(tmp_path / "s.json", Stamp(digest="d", seconds=1, outputs=outputs))
    loaded = stamps.load(tmp_path / "s.json")
    assert loaded is not None
    assert json.dumps(loaded.outputs) == json.dumps(outputs)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": "x"}', '{"unknown": 1}'])
def test_damaged_stamp_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    assert stamps.load(tmp_path / "s.json") is None


def test_plan_changes_nothing(pipeline: Pipeline) -> None:
    assert pipeline.states() == ["not run"] * 3
    assert not pipeline.cfg.work_dir.exists()
    pipeline.run()
    assert pipeline.states() == ["current"] * 3
    pipeline.words["fetch"] = "other"
    assert pipeline.states() == ["current", "out of date", "out of date"]
    pipeline.words |= {"doctor": "other", "fetch": "word"}
    assert pipeline.states() == ["out of date", "current", "current"]
    assert pipeline.ran == list(STAGES[:LAST])


def test_variants_do_not_share_stamps(tmp_path: Path) -> None:
    cfg = make_cfg(tmp_path)
    base = make_base()
    variants = [
        cfg,
        replace(cfg, profile="decoder"),
        replace(cfg, cuda_home=tmp_path),
        replace(cfg, python_tag="cp313"),
    ]
    assert len({Run(cfg=variant, base=base).stamp_path("build") for variant in variants}) == 4
    assert len({Run(cfg=variant, base=base).stamp_path("apply") for variant in variants}) == 1


def test_stamp_is_whole_at_any_moment(tmp_path: Path) -> None:
    """A writer is killed again and again; a reader finds the old stamp or the new one, and no leftovers pile up."""
    path = tmp_path / "s.json"
    code = (
        "import sys, itertools; from pathlib import Path; from kvbuild.stamps import save, Stamp\n"
        "for n in itertools.count():\n"
        "    save(Path(sys.argv[1]), Stamp(digest=str(n), seconds=n, outputs={'x': 'y' * 200000}))"
    )
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=REPO) as writer:
            deadline = time.monotonic() + 10
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            for _ in range(20):
                assert stamps.load(path) is not None
            writer.kill()
        found = stamps.load(path)
        assert found is not None
        assert len(found.outputs["x"]) == 200000
    assert len(os.listdir(tmp_path)) <= 2  # noqa: PTH208 - hidden files count
