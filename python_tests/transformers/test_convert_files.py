"""Files of a conversion: where weights go, what is never replaced, genai_config.json, exit codes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from onnxruntime.transformers.kv_cache_calibration import measure
from onnxruntime.transformers.kv_cache_convert import CacheChoice
from onnxruntime.transformers.kv_cache_convert_file import Written, convert_file
from onnxruntime.transformers.kv_cache_layers import CacheModelError
from onnxruntime.transformers.kv_cache_model import read_decoder
from onnxruntime.transformers.kv_cache_quantizer import main
from onnxruntime.transformers.kv_cache_weights import copy_with_holes

from python_tests.transformers.installed import run
from python_tests.transformers.models import Shape, decoder, save

INT8 = CacheChoice(cache_dtype="int8")


def snapshot(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A decoder with external data and a genai configuration."""
    path = save(decoder(Shape()), tmp_path / "in" / "model.onnx", external=True)
    config = {
        "model": {"decoder": {"filename": "model.onnx", "head_size": 16, "inputs": {}}, "type": "llama"},
        "search": {},
    }
    (path.parent / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def one_file(written: Written) -> tuple[str, Path]:
    """How and where the only data file is."""
    (file,) = written.data
    return file.how, file.path


def test_beside_the_input_the_weights_are_shared(source: Path) -> None:
    before = snapshot(source.parent)
    written = convert_file(source, source.with_name("int8.onnx"), INT8)
    assert one_file(written) == ("kept", source.with_name("model.onnx.data"))
    assert written.loaded == "CPUExecutionProvider"
    after = snapshot(source.parent)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"int8.onnx", "int8.genai_config.json"}


def test_above_the_input_the_weights_are_referenced(source: Path, tmp_path: Path) -> None:
    written = convert_file(source, tmp_path / "int8.onnx", INT8)
    assert one_file(written) == ("referenced", source.with_name("model.onnx.data"))
    assert written.loaded == "CPUExecutionProvider"


@pytest.mark.parametrize(("rule", "how"), [("auto", {"cloned", "copied"}), ("copy", {"copied"}), ("link", {"linked"})])
def test_elsewhere_the_weights_are_brought(source: Path, tmp_path: Path, rule: str, how: set[str]) -> None:
    written = convert_file(source, tmp_path / "out" / "deep" / "int8.onnx", INT8, data=rule)
    found, path = one_file(written)
    assert found in how
    assert path == tmp_path / "out" / "deep" / "model.onnx.data"
    assert path.read_bytes() == source.with_name("model.onnx.data").read_bytes()
    links = source.with_name("model.onnx.data").stat().st_nlink
    assert links == (2 if rule == "link" else 1)


def test_a_model_that_holds_its_weights(tmp_path: Path) -> None:
    source = save(decoder(Shape()), tmp_path / "model.onnx")
    written = convert_file(source, tmp_path / "out" / "model.onnx", INT8)
    assert written.data == []
    assert written.config is None


def test_nothing_is_replaced(source: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(FileExistsError, match="the input itself"):
        convert_file(source, source, INT8)
    link = tmp_path / "link.onnx"
    link.symlink_to(source)
    with pytest.raises(FileExistsError, match="the input itself"):
        convert_file(source, link, INT8)
    link.unlink()
    (tmp_path / "there.onnx").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match="there already"):
        convert_file(source, tmp_path / "there.onnx", INT8)
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.onnx.data").write_text("mine", encoding="utf-8")
    with pytest.raises(CacheModelError, match="would be replaced"):
        convert_file(source, out / "int8.onnx", INT8)
    (out / "model.onnx.data").unlink()
    (out / "genai_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CacheModelError, match=r"genai_config\.json: is there already"):
        convert_file(source, out / "int8.onnx", INT8)
    assert set(snapshot(tmp_path)) - set(before) == {"there.onnx", "out/genai_config.json"}


def test_a_result_that_fails_its_check_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxruntime.transformers import kv_cache_convert_file as module

    load = module._load

    def fail_on_result(path: Path, provider: str) -> object:
        if path.name.startswith("."):
            msg = "no such kernel"
            raise RuntimeError(msg)
        return load(path, provider)

    monkeypatch.setattr(module, "_load", fail_on_result)
    before = snapshot(tmp_path)
    with pytest.raises(CacheModelError, match="loads the input but not the result: no such kernel"):
        convert_file(source, tmp_path / "out" / "int8.onnx", INT8)
    assert snapshot(tmp_path) == before


def test_missing_and_outside_data(source: Path, tmp_path: Path) -> None:
    data = source.with_name("model.onnx.data")
    data.rename(tmp_path / "elsewhere")
    with pytest.raises(CacheModelError, match=r"model\.onnx\.data: the model's external data is missing"):
        convert_file(source, tmp_path / "int8.onnx", INT8)
    raw = source.read_bytes()
    source.write_bytes(raw.replace(b"model.onnx.data", b"../model.ox.dat"))
    with pytest.raises(CacheModelError, match="outside the model's folder"):
        convert_file(source, tmp_path / "int8.onnx", INT8)


def test_genai_config(source: Path, tmp_path: Path) -> None:
    written = convert_file(source, tmp_path / "out" / "int8.onnx", INT8)
    assert written.config is not None
    assert written.config[0] == tmp_path / "out" / "genai_config.json"
    old = json.loads(source.with_name("genai_config.json").read_text(encoding="utf-8"))
    new = json.loads(written.config[0].read_text(encoding="utf-8"))
    assert new["model"]["decoder"].pop("filename") == "int8.onnx"
    assert old["model"]["decoder"].pop("filename") == "model.onnx"
    assert new == old


def test_copy_keeps_holes(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with old.open("wb") as file:
        file.write(b"head")
        file.seek(1 << 28)
        file.write(b"tail")
        file.truncate(1 << 29)
    copy_with_holes(old, new)
    assert new.stat().st_size == old.stat().st_size
    assert new.stat().st_blocks <= old.stat().st_blocks + 64
    with new.open("rb") as file:
        assert file.read(6) == b"head\0\0"
        file.seek((1 << 28) - 1)
        assert file.read(6) == b"\0tail\0"


def test_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "int4.onnx"
    convert = ["convert", str(source), str(out), "--kv-cache-dtype", "int4"]
    assert main([*convert, "--keep-layers", "0"]) == 0
    text = capsys.readouterr().out
    assert "2 of 3 caches converted; kept as they were: 0" in text
    assert "cache bytes a token: 768 before, 352 after (2.18 times less)" in text
    assert "loaded by CPUExecutionProvider" in text
    assert [la.cache_dtype for la in read_decoder(out).layers] == ["float32", "int4", "int4"]
    assert main(convert) == 1
    assert "nothing is ever replaced" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*convert, "--k-granularity", "tensor"])
    assert "need scales: --calibration FILE" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "out" / "genai_config.json")]) == 1
    assert "not an ONNX model" in capsys.readouterr().err
    scales = ["--kv-cache-dtype", "int4", "--k-granularity", "channel", "--calibration", str(tmp_path)]
    assert main(["convert", str(source), str(tmp_path / "new.onnx"), *scales]) == 1
    assert "refused: [Errno" in capsys.readouterr().err
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 352


def test_run_as_a_module(source: Path) -> None:
    done = run("kv_cache_quantizer", "inspect", source)
    assert done.returncode == 0, done.stderr
    assert "layers 0 to 2: float32; 2 KV heads of 16, 256 bytes a token" in done.stdout


def test_bfloat16_is_converted_where_it_cannot_be_run(tmp_path: Path) -> None:
    source = save(decoder(Shape(cache=int(TensorProto.BFLOAT16))), tmp_path / "model.onnx", external=True)
    written = convert_file(source, tmp_path / "int8.onnx", INT8)
    assert written.conversion.before.bytes_per_token == 3 * 2 * 2 * 16 * 2
    if "CUDAExecutionProvider" in ort.get_available_providers():
        assert written.loaded == "CUDAExecutionProvider"
    else:
        assert written.loaded.startswith("not loaded: bfloat16 needs the CUDA provider")
    with pytest.raises(CacheModelError, match="NumPy has no bfloat16"):
        measure(source, [np.arange(8)])


def test_a_download_cache_of_links(source: Path, tmp_path: Path) -> None:
    snapshot_folder = tmp_path / "snapshot"
    snapshot_folder.mkdir()
    for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
        blob = tmp_path / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        source.with_name(name).rename(blob)
        (snapshot_folder / name).symlink_to(blob)
    written = convert_file(snapshot_folder / "model.onnx", tmp_path / "out" / "int8.onnx", INT8)
    how, path = one_file(written)
    assert how in ("copied", "cloned")
    assert not path.is_symlink()
    assert written.config is not None


def test_operators_that_onnxruntime_has_in_the_domain_of_onnx(source: Path) -> None:
    """The checker knows no SimplifiedLayerNormalization; the result still has it as the input had, and is checked."""
    with pytest.raises(onnx.checker.ValidationError, match="SimplifiedLayerNormalization"):
        onnx.checker.check_model(str(source))
    written = convert_file(source, source.with_name("int8.onnx"), INT8)
    old, new = (onnx.load(path, load_external_data=False).graph.node for path in (source, written.path))
    assert [(n.op_type, n.domain) for n in old] == [(n.op_type, n.domain) for n in new]
    assert not [p for p in source.parent.iterdir() if p.name.startswith(".")]


def test_a_mistake_in_a_model_is_found(tmp_path: Path) -> None:
    model = decoder(Shape())
    next(n for n in model.graph.node if n.op_type == "Add").attribute.add(name="axis", type=2, i=1)
    source = save(model, tmp_path / "model.onnx")
    with pytest.raises(CacheModelError, match=r"onnx\.checker: refuses the result: Unrecognized attribute: axis"):
        convert_file(source, tmp_path / "int8.onnx", INT8)
    assert list(tmp_path.iterdir()) == [source]
