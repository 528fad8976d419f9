"""A model of several GB is converted, checked and loaded in little memory and without disk space for its weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from onnxruntime.transformers.kv_cache_footprint import PRESETS, model_footprint
from onnxruntime.transformers.kv_cache_model import read_decoder

from python_tests.transformers.installed import command
from python_tests.transformers.models import LLAMA_8B, Shape, save_sparse, save_tiled

HOLE = 6 << 30
# An interpreter with NumPy, onnx and onnxruntime takes about 100 MB.
MEMORY = 500 << 20
_MEASURE = (
    "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; "
    "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024); sys.exit(code)"
)


def peak_of(args: list[str]) -> int:
    """Peak resident bytes of a tool that must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *args], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded by CPUExecutionProvider" in done.stdout
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory and files with holes as Linux does")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside the input", "in another folder"])
def test_large_model_in_little_memory(tmp_path: Path, elsewhere: bool) -> None:
    source = save_sparse(Shape(layers=4), tmp_path / "in" / "model.onnx", HOLE)
    data = source.with_name("model.onnx.data")
    assert data.stat().st_size > HOLE
    target = tmp_path / "out" / "int8.onnx" if elsewhere else source.with_name("int8.onnx")
    peak = peak_of(command("kv_cache_quantizer", "convert", source, target, "--kv-cache-dtype", "int8"))
    assert peak < MEMORY, f"{peak:,} bytes"
    assert target.stat().st_size < 1 << 20
    brought = [p for p in target.parent.iterdir() if p.name.endswith(".data")]
    assert sum(p.stat().st_blocks * 512 for p in brought) < 64 << 20
    assert (brought[0].samefile(data)) is not elsewhere


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux does")
def test_8b_shaped_model(tmp_path: Path) -> None:
    source = save_tiled(LLAMA_8B, tmp_path / "model.onnx", hollow=True)
    target = tmp_path / "int8.onnx"
    args = ("convert", source, target, "--kv-cache-dtype", "int8", "--keep-layers", "0,31")
    peak = peak_of(command("kv_cache_quantizer", *args))
    assert peak < MEMORY, f"{peak:,} bytes"
    found, preset = model_footprint(target), PRESETS["llama-3.1-8b"].footprint("8b")
    assert found.caches == preset.caches
    # The rotary table, which lies in the file, is what the preset does not count.
    assert found.weights == preset.weights + 2 * 2 * LLAMA_8B.table * 64 + 16
    assert (found.hidden, found.intermediate, found.vocabulary) == (4096, 14336, 128256)
    assert read_decoder(target).bytes_per_token == 30 * 8 * 2 * (128 + 4) + 2 * 8 * 4 * 128
