"""Converted decoders against the float ones that they were made of: caches by code, steps by logits."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto
from onnxruntime.transformers.kv_cache_calibration import Calibration, Magnitudes
from onnxruntime.transformers.kv_cache_convert import CacheChoice, quantize_caches
from onnxruntime.transformers.kv_cache_layers import CacheModelError
from onnxruntime.transformers.kv_cache_model import read_decoder

from python_tests.op.providers import Provider
from python_tests.reference.format import Array, CacheDtype, codes_near, token_scales, unpack
from python_tests.transformers.converted_run import Decoder, relative_error
from python_tests.transformers.models import Shape, decoder

SHAPES = {
    "builder": Shape(),
    "builder-symbolic-row": Shape(symbolic_row=True),
    "optimum": Shape(style="optimum", interleaved=True, seed=1),
    "hand-packed": Shape(style="hand", seed=2),
    "half": Shape(cache=int(TensorProto.FLOAT16), seed=3),
    "no-rotary-mqa": Shape(rotary=False, kv_heads=1, seed=4),
}
KINDS = ("int8", "float8e4m3fn", "int4")
PROMPT, STEPS = list(range(3, 20)), [5, 9, 33, 2, 60]
# Relative error of a step's logits to the float model's. Set by the codes' own coarseness: half a step of 127, of 8 in
# a binade, of 7.
STEP_BOUND = {"int8": 0.02, "float8e4m3fn": 0.08, "int4": 0.30}


def convert(model: ModelProto, choice: CacheChoice, calibration: Calibration | None = None) -> ModelProto:
    """A converted copy."""
    copy = ModelProto()
    copy.CopyFrom(model)
    quantize_caches(copy, choice, calibration)
    return copy


def choice_for(kind: str, **changes: str) -> CacheChoice:
    """fp8 in uint8, so that NumPy can read the cache."""
    return CacheChoice(cache_dtype=kind, fp8_as_uint8=kind == "float8e4m3fn", **changes)


def measured(model: ModelProto, tokens: list[int]) -> Calibration:
    """The largest magnitudes of this run alone, from the float model's own cache."""
    run = Decoder(model)
    run.run(tokens)
    sides = {}
    for layer in run.decoder.layers:
        sizes = [np.abs(run.values(layer, side)).max(axis=1) for side in layer.sides]
        sides[layer.index] = (Magnitudes(sizes[0], float(sizes[0].max())), Magnitudes(sizes[1], float(sizes[1].max())))
    return Calibration(len(tokens), 100.0, sides)


def check_codes(run: Decoder, exact: Decoder, kind: str) -> None:
    """Every PER_TOKEN cache is the reference's quantization of the float model's cache.

    Of float16 models the first layer only: the next ones are fed by activations that are rounded otherwise.
    """
    half = exact.decoder.layers[0].cache_dtype == "float16"
    for layer, plain in list(zip(run.decoder.layers, exact.decoder.layers, strict=True))[: 1 if half else None]:
        for side, float_side in zip(layer.sides, plain.sides, strict=True):
            values = exact.values(plain, float_side)
            scales = token_scales(values, CacheDtype(kind), np.float32)
            np.testing.assert_allclose(run.scales(side), scales, rtol=1e-3 if half else 1e-6)
            low, high = codes_near(values, run.scales(side), CacheDtype(kind), True)
            codes = (
                run.codes(side)
                if kind == "float8e4m3fn"
                else unpack(run.codes(side), CacheDtype(kind), plain.head_size)
            )
            # A float16 cache is rounded after rotary and a quantized one is not: codes near a boundary differ.
            allowed = 0.04 if half else 0.0
            assert_codes(codes, low, high, allowed)


def assert_codes(codes: Array, low: Array, high: Array, allowed: float) -> None:
    """Each is one of two neighbours, but for a share of them."""
    off = (codes != low) & (codes != high)
    assert off.mean() <= allowed, f"{off.sum()} of {off.size} codes differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_prompt_and_steps(name: str, kind: str) -> None:
    shape = SHAPES[name]
    model = decoder(shape)
    exact, run = Decoder(model), Decoder(convert(model, choice_for(kind)))
    prompts = exact.run(PROMPT), run.run(PROMPT)
    # A prompt attends to its own exact K and V, whatever the cache holds.
    assert relative_error(*prompts) < (1e-5 if shape.cache == TensorProto.FLOAT else 5e-3)
    check_codes(run, exact, kind)
    for token in STEPS:
        assert relative_error(exact.run([token]), run.run([token])) < STEP_BOUND[kind]


def test_the_step_bound_sees_a_wrong_scale() -> None:
    model = decoder(SHAPES["builder"])
    exact, run = Decoder(model), Decoder(convert(model, choice_for("int8")))
    exact.run(PROMPT), run.run(PROMPT)
    for layer in run.decoder.layers:
        scales = run.state[layer.value.scale]
        scales.update_inplace(scales.numpy() * 2)
    assert relative_error(exact.run([7]), run.run([7])) > STEP_BOUND["int8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "modes", [("PER_CHANNEL", "PER_TOKEN"), ("PER_TENSOR", "PER_CHANNEL"), ("PER_TOKEN", "PER_TENSOR")]
)
def test_static_scales(kind: str, modes: tuple[str, str]) -> None:
    model = decoder(SHAPES["builder"])
    calibration = measured(model, PROMPT + STEPS)
    converted = convert(model, choice_for(kind, k_granularity=modes[0], v_granularity=modes[1]), calibration)
    names = {t.name for t in converted.graph.initializer}
    exact, run = Decoder(model), Decoder(converted)
    for layer in run.decoder.layers:
        assert (layer.key.granularity, layer.value.granularity) == modes
        for side in layer.sides:
            static = side.granularity != "PER_TOKEN"
            assert (side.scale in names) is static
            assert side.scale_is_input is not static
            assert bool(side.present_scale) is not static
    exact.run(PROMPT), run.run(PROMPT)
    for token in STEPS:
        assert relative_error(exact.run([token]), run.run([token])) < 2 * STEP_BOUND[kind]


def test_kept_layers_stay_float() -> None:
    model = decoder(SHAPES["builder"])
    converted = convert(model, CacheChoice(cache_dtype="int8", keep_layers=frozenset({0, 2})))
    layers = read_decoder(converted).layers
    assert [layer.cache_dtype for layer in layers] == ["float32", "int8", "float32"]
    before = {n.name: n.SerializeToString() for n in model.graph.node}
    after = {n.name: n.SerializeToString() for n in converted.graph.node}
    assert [name for name in before if before[name] != after[name]] == ["/layers.1/attn/GQA"]
    exact, run = Decoder(model), Decoder(converted)
    exact.run(PROMPT), run.run(PROMPT)
    assert relative_error(exact.run([4]), run.run([4])) < STEP_BOUND["int8"]


@pytest.mark.parametrize(
    ("style", "past", "present"),
    [
        ("builder", "past_key_values.1.key_scale", "present.1.key_scale"),
        ("hand", "past_key_1_scale", "present_key_1_scale"),
    ],
)
def test_scales_are_named_after_the_caches(style: str, past: str, present: str) -> None:
    converted = convert(decoder(Shape(style=style)), CacheChoice(cache_dtype="int4", scale_dtype="float16"))
    inputs = {i.name: i for i in converted.graph.input}
    outputs = {o.name: o for o in converted.graph.output}
    for info in (inputs[past], outputs[present]):
        assert info.type.tensor_type.elem_type == TensorProto.FLOAT16
        assert info.type.tensor_type.shape.dim[3].dim_value == 1
    capacity = inputs[past].type.tensor_type.shape.dim[2].dim_param
    assert capacity == "past_sequence_length"
    layer = read_decoder(converted).layers[1]
    assert layer.key.scale == past
    assert layer.key.present_scale == present
    assert layer.row == 8


def test_fp8_tensors_raise_the_ir_version_and_run() -> None:
    model = decoder(SHAPES["builder"])
    converted = convert(model, CacheChoice(cache_dtype="float8e4m3fn"))
    assert converted.ir_version >= 9
    assert read_decoder(converted).layers[0].element_type == TensorProto.FLOAT8E4M3FN
    exact, run = Decoder(model), Decoder(converted)
    exact.run(PROMPT), run.run(PROMPT)
    assert relative_error(exact.run([4]), run.run([4])) < STEP_BOUND["float8e4m3fn"]


def test_bytes_per_token() -> None:
    layers, kv_heads, size = 3, 2, 16
    model = decoder(Shape(cache=int(TensorProto.FLOAT16)))
    expected = {"int8": 2 * size + 8, "float8e4m3fn": 2 * size + 8, "int4": size + 8}
    assert read_decoder(model).bytes_per_token == layers * kv_heads * 4 * size
    for kind, row in expected.items():
        assert read_decoder(convert(model, choice_for(kind))).bytes_per_token == layers * kv_heads * row


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_dtype": "int3"}, "int3"),
        ({"cache_dtype": "int8", "k_granularity": "PER_GROUP"}, "PER_GROUP"),
        ({"cache_dtype": "int8", "scale_dtype": "bfloat16"}, "float32 or float16"),
        ({"cache_dtype": "int8", "scale_dtype": "float16", "v_granularity": "PER_TENSOR"}, "one type"),
        ({"cache_dtype": "int8", "fp8_as_uint8": True}, "fp8_as_uint8"),
    ],
)
def test_choices_that_do_not_go_together(changes: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        quantize_caches(decoder(Shape()), CacheChoice(**changes))


def test_static_modes_need_a_calibration() -> None:
    model = decoder(Shape())
    before = model.SerializeToString()
    with pytest.raises(CacheModelError, match="need a calibration"):
        quantize_caches(model, CacheChoice(cache_dtype="int8", k_granularity="PER_CHANNEL"))
    assert model.SerializeToString() == before


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["builder", "hand"])
def test_on_the_gpu(cuda: Provider, style: str, kind: str) -> None:
    # The float model runs on the CPU: the reference is not the code under test.
    model = decoder(Shape(style=style, head_size=64, cache=int(TensorProto.FLOAT16)))
    exact = Decoder(model)
    run = Decoder(convert(model, CacheChoice(cache_dtype=kind)), "CUDAExecutionProvider")
    assert relative_error(exact.run(PROMPT), run.run(PROMPT)) < 5e-3
    for token in STEPS:
        assert relative_error(exact.run([token]), run.run([token])) < STEP_BOUND[kind]
