"""docs/using.md: its block runs, its picture is what its command draws, its messages are those of the sources."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from python_tests.transformers import installed
from python_tests.transformers.small_decoder.export import export, load_weights
from python_tests.transformers.small_decoder.network import Shape

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs/using.md").read_text(encoding="utf-8")
# Messages of stock onnxruntime and of Python.
FOREIGN = {
    "with schema(com.microsoft::GroupQueryAttention:1) has input size", "not in range",
    "No module named 'onnxruntime.transformers.kv_cache", "Could not find an implementation for GroupQueryAttention(1)",
    "Required inputs (['past_key_values.0.key_scale'", "are missing from input feed",
    "cannot use the graph capture feature",
}  # fmt: skip


def section(title: str) -> str:
    """The text under a heading."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "decoder.onnx"
    path.write_bytes(export(load_weights(), Shape()).SerializeToString())
    return path


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_block_of_the_binding(kind: str, float_model: Path, tmp_path: Path) -> None:
    """It runs as it stands beside a converted model, and continues the text as the tool does."""
    model = tmp_path / "int8.onnx"
    done = installed.run("kv_cache_quantizer", "convert", float_model, model, "--kv-cache-dtype", kind)
    assert done.returncode == 0, done.stderr
    (script,) = re.findall(r"```python\n(.*?)```", section("Bind past and present"), re.DOTALL)
    call = [sys.executable, "-c", script]
    ran = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (prompt,) = re.findall(r'list\(b"(.*?)"\)', script)
    options = ("--prompt", prompt, "--max-new-tokens", "40", "--threads", "1")
    wanted = installed.run("kv_cache_generate", "generate", model, *options)
    assert wanted.returncode == 0, wanted.stderr
    assert ran.stdout == wanted.stdout


def test_picture(tmp_path: Path) -> None:
    """Drawn again by the command on the page, it is the same."""
    command = shlex.split(section("Will it fit?").split("```\npython ")[1].split("```")[0].replace("\\\n", ""))
    assert command[:2] == ["-m", "onnxruntime.transformers.kv_cache_plan"]
    kept, drawn = REPO / command[-1], tmp_path / "again.svg"
    done = installed.run("kv_cache_plan", *command[2:-1], drawn)
    assert done.returncode == 0, done.stderr
    assert drawn.read_bytes() == kept.read_bytes()
    assert f"]({kept.relative_to(REPO / 'docs')})" in PAGE.replace("\n", " ")


def sources() -> str:
    """Overlay and patches, with string literals that stand next to each other joined."""
    files = [f for ext in ("h", "cc", "cu", "py") for f in (REPO / "patches/overlay").rglob(f"*.{ext}")]
    return "\n".join(re.sub(r'"\s+f?"', "", f.read_text(encoding="utf-8")) for f in sorted(files))


def test_messages() -> None:
    """Each message of the table can be found in the sources; names that are put in are shown by example."""
    rows = re.findall(r"^\| (`.*?) \| ", section("Troubleshooting"), re.MULTILINE)
    messages = [m for row in rows for m in re.findall(r"`([^`]+)`", row)]
    assert 15 <= len(rows) <= 25
    text = sources()

    def found(message: str) -> bool:
        # Names of tensors, devices and kinds stand in variables.
        parts = re.split(r"past_key\b|k_scale|cos_cache|cuda|CUDAExecutionProvider|a quantized", message)
        return all(part.strip(" '") in text for part in parts)

    assert [m for m in messages if m not in FOREIGN and not found(m)] == []
    assert FOREIGN <= set(messages)
