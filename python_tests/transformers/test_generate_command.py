"""The command line of the decode loop: what it prints, a saved prefix, exit codes and reasons."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import onnx
import pytest
from onnx import helper
from onnxruntime.transformers.kv_cache_generate import main

from python_tests.transformers import installed
from python_tests.transformers.decoders import random_ids, write_tiny


def test_command_line(tmp_path: Path) -> None:
    """Numbers in, numbers out; a saved prefix goes on as if it had been the prompt; refusals say why."""
    model, prefix = write_tiny(tmp_path, "int8"), tmp_path / "prefix.kv"
    ids, more = random_ids(9), "7,8"
    prompt = " ".join(map(str, ids))
    common = ("--tokenizer", "ids", "--max-new-tokens", "6", "--chunk", "1", "--threads", "1")
    whole = installed.run("kv_cache_generate", "generate", model, "--prompt", f"{prompt} 7 8", *common)
    assert whole.returncode == 0, whole.stderr
    assert len(whole.stdout.split()) == len(ids) + 2 + 6
    assert "int8 PER_TOKEN/PER_TOKEN" in whole.stderr
    assert "tokens/s" in whole.stderr
    first = installed.run("kv_cache_generate", "generate", model, "--prompt", prompt, "--save-prefix", prefix, *common)
    assert first.returncode == 0, first.stderr
    rest = installed.run("kv_cache_generate", "generate", model, "--prompt", more, "--load-prefix", prefix, *common)
    assert rest.returncode == 0, rest.stderr
    assert rest.stdout.split()[1:] == whole.stdout.split()[-6:]


def test_model_that_does_not_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What onnxruntime itself refuses ends as a reason, not as a traceback."""
    model = onnx.load(write_tiny(tmp_path, "int8"))
    model.graph.node[-1].op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / "broken.onnx")
    assert main(["generate", str(tmp_path / "broken.onnx"), "--prompt", "a"]) == 1
    assert "refused: " in (said := capsys.readouterr().err)
    assert "NoSuchOperator" in said


def test_capacity_beyond_the_rotary_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reason before anything runs, whether the capacity is given or follows from the tokens."""
    model = write_tiny(tmp_path, "int8", positions=32)
    for options in (("--max-new-tokens", "2", "--capacity", "33"), ("--max-new-tokens", "32")):
        assert main(["generate", str(model), "--prompt", "a", *options]) == 1
        assert capsys.readouterr().err.startswith("refused: capacity 33 is beyond the rotary table of /layers.0/")


def test_refusal_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What only the operator sees, here a table that the model computes, ends as a reason, too."""
    model = onnx.load(write_tiny(tmp_path, "int8", positions=32))
    model.graph.node.insert(0, helper.make_node("Identity", ["cos_cache"], ["computed_table"]))
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[7] = "computed_table"
    path = tmp_path / "computed.onnx"
    onnx.save(model, path)
    assert main(["generate", str(path), "--prompt", "a", "--max-new-tokens", "2", "--capacity", "33"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("refused: ")
    assert "'cos_cache' has shape {32,8}; expected at least total_sequence_length = 33 rows" in said


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (("--prompt", "1 x"), 1, "refused: 'x' is no token id"),
        ((), 1, "refused: no prompt"),
        (("--prompt", "1", "--capacity", "3"), 1, "the cache has room for 3"),
        (("--prompt", "1", "--temperature", "-1"), 1, "wants temperature >= 0"),
        (("--prompt", "1", "--load-prefix", "missing.kv"), 1, "missing.kv"),
        (("--prompt", "1", "--load-prefix", "a.kv", "--zero-context", "4"), 1, "give one"),
        (("--prompt", "1", "--zero-context", "40", "--capacity", "41"), 1, "the cache has room for 41"),
        (("--prompt", "1", "--max-new-tokens", "0"), 2, "must be at least 1"),
        (("--prompt", "1", "--beams", "4"), 2, "unrecognized arguments"),
    ],
)
def test_command_line_refusals(options: tuple[str, ...], code: int, reason: str, tmp_path: Path) -> None:
    """Exit codes and reasons."""
    arguments = ["generate", str(write_tiny(tmp_path, "int8")), "--tokenizer", "ids", *options]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            returned = main(arguments)
        except SystemExit as stop:
            returned = int(str(stop.code))
    assert returned == code
    assert reason in said.getvalue()
