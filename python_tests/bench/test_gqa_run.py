"""The whole benchmark on the CPU provider of the installed wheel, small: rows, checks, reasons, and its own table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from python_tests.bench import bench_rows
from python_tests.bench.bench_rows import Row
from python_tests.bench.gqa_case import Case, with_cache
from python_tests.bench.gqa_site import Place, Worker
from python_tests.bench.layers_model import build

pytest.importorskip("onnxruntime")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Two sites, both this interpreter; int8 in two layers, static int4, and sinks, which plain caches do not have."""
    file = tmp_path_factory.mktemp("bench") / "rows.json"
    command = [sys.executable, "-m", "python_tests.bench.bench_gqa", "--provider", "cpu", "--threads", "1"]
    command += ["--preset", "gpt-oss", "--cache", "plain", "int8", "int4:PER_CHANNEL", "--tokens", "24"]
    command += ["--layers", "2", "--rounds", "4", "--json", str(file)]
    command += [word for name in ("a", "b") for word in ("--site", f"{name}={sys.executable}")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no bar speaks" in done.stdout
    return list(bench_rows.loads(file.read_text(encoding="utf-8")).rows)


def test_rows_of_a_run(rows: list[Row]) -> None:
    """Each site has each case; what ran has its rounds, a small error, and a bandwidth beside it."""
    assert [(row.site, row.cache) for row in rows] == [(s, c) for c in ("fp32", "int8", "int4") for s in ("a", "b")]
    for row in rows:
        if row.quantized:
            assert len(row.us) >= 4
            assert 0 < row.error < 1e-4
            assert row.read_gb_s > 0
            assert (row.layers, row.ours, row.reason) == (2, True, "")
            assert f"--site {row.site}=" in row.command
        else:
            assert not row.ran
            assert "head_sink" in row.reason


def test_worker_survives_what_it_cannot_run(tmp_path: Path) -> None:
    """A model that is none and a provider that is not there are answers, and the next case runs."""
    worker = Worker(Place("this"), "cpu", 1, None)
    case = with_cache(Case(activation="fp32", cache="fp32", tokens=16), "int8")
    broken, model = tmp_path / "broken.onnx", tmp_path / "model.onnx"
    broken.write_bytes(b"no model")
    model.write_bytes(build(case, 1))
    assert "reason" in worker.load(broken, case, 1)
    assert "reason" not in worker.load(model, case, 1)
    assert len(worker.ask(measure=2)["us"]) == 2
    assert worker.ask(unload=True) == {}
    assert "reason" in worker.ask(measure=1)
    worker.close()


def test_worker_is_started_again(tmp_path: Path) -> None:
    """A process that ends is said, and another takes its place."""
    worker = Worker(Place("this"), "cpu", 1, None)
    worker._process.kill()
    assert "the process ended" in worker.ask(unload=True)["reason"]
    assert json.dumps(worker.ask(unload=True)) == "{}"
    worker.close()


def test_cuda_is_missed_with_a_reason(tmp_path: Path) -> None:
    """On a machine without a GPU the rows of the CUDA provider say so."""
    worker = Worker(Place("this"), "cuda", 1, None)
    if "reason" not in worker.about:
        worker.close()
        pytest.skip("there is a GPU")
    assert worker.about["reason"]
    worker.close()
