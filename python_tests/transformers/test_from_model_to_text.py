"""What a new user does, by commands alone: convert the small decoder, generate with every cache kind, compare them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from python_tests.transformers import installed
from python_tests.transformers.small_decoder import text
from python_tests.transformers.small_decoder.export import export, load_weights
from python_tests.transformers.small_decoder.network import Shape

# Options of the converter, the cache that generate reports, and bytes of a token in all four layers.
CONVERSIONS = {
    "int8": (["--kv-cache-dtype", "int8"], "int8 PER_TOKEN/PER_TOKEN", 576),
    "fp8": (["--kv-cache-dtype", "fp8"], "float8e4m3fn PER_TOKEN/PER_TOKEN", 576),
    "int4": (["--kv-cache-dtype", "int4"], "int4 PER_TOKEN/PER_TOKEN", 320),
    "half-scales": (["--kv-cache-dtype", "int4", "--scale-dtype", "float16"], "int4 PER_TOKEN/PER_TOKEN", 288),
    "static": (["--kv-cache-dtype", "int8", "--k-granularity", "channel"], "int8 PER_CHANNEL/PER_TOKEN", 544),
    "kept": (["--kv-cache-dtype", "int8", "--keep-layers", "0,3"], "2 x float16 + 2 x int8 PER_TOKEN/PER_TOKEN", 800),
}
PROMPT = "The following sections describe the "


def run(name: str, *args: str | Path) -> tuple[str, str]:
    """Output and messages of a tool that has to succeed."""
    done = installed.run(name, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def convert(model: Path, name: str, folder: Path) -> Path:
    """The converted model in a folder; static scales are measured on training text."""
    options, _, _ = CONVERSIONS[name]
    target = folder / f"{name}.onnx"
    sample = folder / "sample.txt"
    sample.write_bytes(text.training_text()[:2048])
    measured = ["--bytes", str(sample), "--length", "512"] if name == "static" else []
    run("kv_cache_quantizer", "convert", model, target, *options, *measured)
    return target


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small decoder in float16, as an exporter writes it."""
    path = tmp_path_factory.mktemp("models") / "decoder.onnx"
    path.write_bytes(export(load_weights(), Shape(), int(TensorProto.FLOAT16)).SerializeToString())
    return path


@pytest.mark.parametrize("name", CONVERSIONS)
def test_convert_and_generate(name: str, float_model: Path, tmp_path: Path) -> None:
    """The converted model continues the prompt as the original does, for some bytes, and reports its smaller cache."""
    _, kind, size = CONVERSIONS[name]
    common = ("--prompt", PROMPT, "--max-new-tokens", "24", "--threads", "1")
    original, said = run("kv_cache_generate", "generate", float_model, *common)
    assert "float16: " in said
    assert "1,024 bytes a token" in said
    converted, said = run("kv_cache_generate", "generate", convert(float_model, name, tmp_path), *common)
    assert f"{kind}: " in said
    assert f"{size:,} bytes a token" in said
    assert converted[: len(PROMPT) + 4] == original[: len(PROMPT) + 4]


def test_compare_kinds(float_model: Path, tmp_path: Path) -> None:
    """The perplexities of the converted models, in the order of what they keep."""
    book = tmp_path / "book.txt"
    book.write_bytes(text.held_out_text()[:600])
    models = [float_model, *(convert(float_model, name, tmp_path) for name in ("int8", "int4"))]
    table, _ = run("kv_cache_generate", "perplexity", *models, "--text", book, "--window", "256", "--threads", "1")
    nats = [float(line.split("|")[4]) for line in table.splitlines()[-3:]]
    assert abs(nats[1] - nats[0]) < 0.005
    assert abs(nats[2] - nats[0]) < 0.1
    assert len(set(np.round(nats, 5))) == 3
