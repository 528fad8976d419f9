"""Static scales: percentiles, rotary pairs, the file, and the run that measures them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.kv_cache_calibration import (
    LargestValues,
    Magnitudes,
    measure,
    pair_lengths,
    read_calibration,
)
from onnxruntime.transformers.kv_cache_convert import CacheChoice, quantize_caches
from onnxruntime.transformers.kv_cache_layers import CacheModelError
from onnxruntime.transformers.kv_cache_quantizer import main, read_tokens

from python_tests.reference.format import Array, CacheDtype, dequantize, quantize_static
from python_tests.transformers.converted_run import Decoder, relative_error
from python_tests.transformers.models import Shape, decoder, save

TOKENS = np.random.default_rng(5).integers(0, 64, 96)
QMAX = {"int8": 127, "float8e4m3fn": 448, "int4": 7}


def model_file(tmp_path: Path, shape: Shape | None = None) -> Path:
    """A decoder on disk."""
    return save(decoder(shape or Shape()), tmp_path / "model.onnx")


def float_caches(shape: Shape, length: int) -> list[tuple[Array, Array]]:
    """K and V (Hkv, T, D) of every layer over TOKENS, in pieces of `length`."""
    pieces: list[list[tuple[Array, Array]]] = []
    for at in range(0, len(TOKENS), length):
        run = Decoder(decoder(shape))
        run.run(TOKENS[at : at + length].tolist())
        pieces.append([(run.values(la, la.key), run.values(la, la.value)) for la in run.decoder.layers])
    joined = []
    for layer in range(shape.layers):
        k, v = (np.concatenate([piece[layer][side] for piece in pieces], axis=1) for side in (0, 1))
        joined.append((k, v))
    return joined


@pytest.mark.parametrize("percentile", [99.0, 99.5, 99.93, 100.0])
@pytest.mark.parametrize("count", [1, 2, 100, 1001])
def test_largest_values_are_numpys_percentile(count: int, percentile: float) -> None:
    values = np.abs(np.random.default_rng(count).standard_normal((count, 3))).astype(np.float32)
    top = LargestValues(3, count, percentile)
    for at in range(0, count, 37):
        top.add(values[at : at + 37])
    np.testing.assert_allclose(top.result(), np.percentile(values.astype(np.float64), percentile, axis=0), rtol=1e-6)


def test_nan_is_the_largest_value() -> None:
    top = LargestValues(1, 5, 100.0)
    top.add(np.array([[1], [np.nan], [3]], np.float32))
    top.add(np.array([[4], [5]], np.float32))
    assert np.isnan(top.result()[0])


@pytest.mark.parametrize("rotary", [1, 2])
@pytest.mark.parametrize("size", [16, 8])
def test_pair_lengths_do_not_depend_on_the_position(rotary: int, size: int) -> None:
    rng = np.random.default_rng(size)
    values = rng.standard_normal((2, 16)).astype(np.float32)
    angles = rng.uniform(0, 6, size // 2)
    pairs = [(i, i + size // 2) if rotary == 1 else (2 * i, 2 * i + 1) for i in range(size // 2)]
    turned = values.copy()
    for angle, (a, b) in zip(angles, pairs, strict=True):
        turned[:, a] = values[:, a] * np.cos(angle) - values[:, b] * np.sin(angle)
        turned[:, b] = values[:, a] * np.sin(angle) + values[:, b] * np.cos(angle)
    found = pair_lengths(values, rotary, size)
    np.testing.assert_allclose(pair_lengths(turned, rotary, size), found, rtol=1e-5)
    assert (found >= np.abs(values)).all()
    np.testing.assert_array_equal(found[:, size:], np.abs(values[:, size:]))
    assert not np.allclose(pair_lengths(turned, 3 - rotary, size), pair_lengths(values, 3 - rotary, size))


@pytest.mark.parametrize(
    "shape", [Shape(), Shape(style="hand"), Shape(style="optimum", interleaved=True)], ids=lambda s: s.style
)
@pytest.mark.parametrize("envelope", [True, False])
def test_measured_magnitudes(tmp_path: Path, shape: Shape, envelope: bool) -> None:
    sequences = [TOKENS[at : at + 40] for at in range(0, len(TOKENS), 40)]
    found = measure(model_file(tmp_path, shape), sequences, envelope=envelope)
    assert found.tokens == len(TOKENS)
    half = shape.head_size // 2
    for layer, (k, v) in enumerate(float_caches(shape, 40)):
        if envelope:
            first, second = (k[..., 0::2], k[..., 1::2]) if shape.interleaved else (k[..., :half], k[..., half:])
            length = np.sqrt(first.astype(np.float64) ** 2 + second.astype(np.float64) ** 2)
            both = [length, length]
            sizes = np.stack(both, -1).reshape(k.shape) if shape.interleaved else np.concatenate(both, -1)
        else:
            sizes = np.abs(k)
        key, value = found.layers[layer]
        np.testing.assert_allclose(key.channel, sizes.max(axis=1), rtol=1e-5)
        np.testing.assert_allclose(value.channel, np.abs(v).max(axis=1), rtol=1e-5)
        assert key.tensor == pytest.approx(sizes.max(), rel=1e-5)
        assert value.tensor == pytest.approx(np.abs(v).max(), rel=1e-5)


@pytest.mark.parametrize("kind", QMAX)
def test_scales_hold_what_was_measured(tmp_path: Path, kind: str) -> None:
    calibration = measure(model_file(tmp_path), [TOKENS])
    for layer, sides in enumerate(float_caches(Shape(), len(TOKENS))):
        for magnitudes, values in zip(calibration.layers[layer], sides, strict=True):
            channel = magnitudes.scale("PER_CHANNEL", kind)
            tensor = magnitudes.scale("PER_TENSOR", kind)
            assert channel.shape == (1, 2, 1, 16)
            assert tensor.shape == (1,)
            assert channel.dtype == tensor.dtype == np.float32
            # The largest code is what was measured: a larger scale would hold it too, and waste codes.
            np.testing.assert_allclose(channel[0, :, 0] * QMAX[kind], magnitudes.channel, rtol=1e-6)
            np.testing.assert_allclose(tensor * QMAX[kind], magnitudes.tensor, rtol=1e-6)
            for scale in (channel[0], tensor):
                rows = quantize_static(values, scale, CacheDtype(kind))
                error = np.abs(dequantize(rows, scale, CacheDtype(kind), 16) - values)
                # Half a step of an integer code; fp8: half a step of its binade, or of the smallest one.
                step = scale / 2 if kind != "float8e4m3fn" else np.maximum(np.abs(values) / 16, scale * 2.0**-10)
                assert (error <= step * 1.001 + 1e-12).all()


def test_a_channel_that_never_moved_has_a_scale() -> None:
    still = Magnitudes(np.array([[0, 8]], np.float32), 8.0)
    assert (still.scale("PER_CHANNEL", "int4") > 0).all()
    nothing = Magnitudes(np.zeros((1, 2), np.float32), 0.0)
    np.testing.assert_array_equal(nothing.scale("PER_TENSOR", "int8"), [1])
    assert (nothing.scale("PER_CHANNEL", "int8") > 0).all()


def test_file_round_trip(tmp_path: Path) -> None:
    calibration = measure(model_file(tmp_path), [TOKENS], percentile=99.5)
    path = tmp_path / "scales.json"
    calibration.write(path)
    again = read_calibration(path)
    assert (again.tokens, again.percentile) == (len(TOKENS), 99.5)
    for index, sides in calibration.layers.items():
        for one, other in zip(sides, again.layers[index], strict=True):
            np.testing.assert_allclose(one.channel, other.channel, rtol=1e-7)
            assert one.tensor == other.tensor
    with pytest.raises(FileExistsError):
        calibration.write(path)


@pytest.mark.parametrize("damage", ["truncated", "version", "format", "negative", "list"])
def test_other_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "scales.json"
    measure(model_file(tmp_path), [TOKENS]).write(path)
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    data["layers"]["0"]["key"]["channel"][0][0] *= -1 if damage == "negative" else 1
    data |= {"version": 2} if damage == "version" else {"format": "else"} if damage == "format" else {}
    text = text[: len(text) // 2] if damage == "truncated" else "[]" if damage == "list" else json.dumps(data)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CacheModelError, match=r"scales\.json: not a calibration of version 1"):
        read_calibration(path)


def test_a_calibration_of_another_model(tmp_path: Path) -> None:
    calibration = measure(model_file(tmp_path, Shape(head_size=32)), [TOKENS])
    choice = CacheChoice(cache_dtype="int8", k_granularity="PER_CHANNEL")
    with pytest.raises(CacheModelError, match="measured on another model"):
        quantize_caches(decoder(Shape()), choice, calibration)
    with pytest.raises(CacheModelError, match="has no layer 3, only 0, 1, 2"):
        quantize_caches(decoder(Shape(layers=4, head_size=32)), choice, calibration)


def test_models_that_cannot_be_measured(tmp_path: Path) -> None:
    model = decoder(Shape())
    quantize_caches(model, CacheChoice(cache_dtype="int8"))
    with pytest.raises(CacheModelError, match="measure the float model"):
        measure(save(model, tmp_path / "int8.onnx"), [TOKENS])
    model = decoder(Shape())
    model.graph.input.append(helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [1]))
    with pytest.raises(CacheModelError, match="pixel_values: a calibration run can fill"):
        measure(save(model, tmp_path / "more.onnx"), [TOKENS])
    model = decoder(Shape())
    weight = next(t for t in model.graph.initializer if t.name == "w_v_1")
    weight.CopyFrom(numpy_helper.from_array(np.full((64, 32), np.inf, np.float32), "w_v_1"))
    with pytest.raises(CacheModelError, match=r"/layers\.1/attn/GQA: V is not finite"):
        measure(save(model, tmp_path / "inf.onnx"), [TOKENS])
    with pytest.raises(CacheModelError, match="cannot run it on CPUExecutionProvider"):
        measure(model_file(tmp_path), [TOKENS + 64])


def test_token_files(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", TOKENS.reshape(4, 24).astype(np.int32))
    assert [len(s) for s in read_tokens(tmp_path / "rows.npy", 20)] == [20, 4] * 4
    (tmp_path / "words.txt").write_text("3, 4 5\n6", encoding="utf-8")
    assert [s.tolist() for s in read_tokens(tmp_path / "words.txt", 3)] == [[3, 4, 5], [6]]
    assert read_tokens(tmp_path / "words.txt", 9, as_bytes=True)[0].tolist() == list(b"3, 4 5\n6")
    for name, content in (("empty.txt", ""), ("text.txt", "hello"), ("negative.txt", "1 -2")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(CacheModelError, match=f"{name}: not token ids"):
            read_tokens(tmp_path / name, 8)
    np.save(tmp_path / "floats.npy", np.ones(3))
    with pytest.raises(CacheModelError, match="not token ids"):
        read_tokens(tmp_path / "floats.npy", 8)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, scales, tokens = model_file(tmp_path), tmp_path / "scales.json", tmp_path / "tokens.npy"
    np.save(tokens, TOKENS)
    measuring = ["--tokens", str(tokens), "--length", "40"]
    assert main(["calibrate", str(model), str(scales), *measuring]) == 0
    assert "3 layers, 96 tokens, percentile 100" in capsys.readouterr().out
    assert main(["calibrate", str(model), str(scales), *measuring]) == 1
    choice = ["--kv-cache-dtype", "int8", "--k-granularity", "channel", "--v-granularity", "tensor"]
    assert main(["convert", str(model), str(tmp_path / "file.onnx"), *choice, "--calibration", str(scales)]) == 0
    assert "6 initializers added: static scales" in capsys.readouterr().out
    assert main(["convert", str(model), str(tmp_path / "now.onnx"), *choice, *measuring]) == 0
    one, other = Decoder(onnx.load(tmp_path / "file.onnx")), Decoder(onnx.load(tmp_path / "now.onnx"))
    np.testing.assert_allclose(one.run([1, 2, 3]), other.run([1, 2, 3]), rtol=1e-5)
    exact = Decoder(onnx.load(model))
    exact.run([1, 2, 3])
    assert relative_error(exact.run([4]), one.run([4])) < 0.04
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(model), str(tmp_path / "x.onnx"), "--kv-cache-dtype", "int8", *measuring])
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", str(model), str(tmp_path / "y.json"), *measuring, "--percentile", "40"])
