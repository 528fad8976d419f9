"""What holds between calls: pieces of any size, rewinds, separate buffers, sessions, optimization levels, threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

from python_tests.op.checks import check_cache, check_output, check_rows, check_scales, verify
from python_tests.op.gqa_case import Case, make_inputs, make_past, poisoned_cache
from python_tests.op.gqa_model import (
    OUTPUTS,
    build_model,
    cache_element_type,
    call,
    input_types,
    make_session,
    output_types,
)
from python_tests.op.providers import FloatName, Provider, selected
from python_tests.op.stream import Stream
from python_tests.op.two_nodes import verify_two
from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.reference.step import Cache, run_step

FORMATS = list(CacheDtype)
TOKENS = 150
# One piece for all, pieces that cross the tile of 128 tokens, a speculative burst after single steps.
SPLITS = {
    "chunks": (100, 50),
    "tile": (127, 2, 21),
    "bursts": (1, 1, 4, 4, 60, 5, 75),
    "steps": (1,) * TOKENS,
}


def same_bytes(left: Cache, right: Cache) -> None:
    """Both caches hold the same bits, poison included."""
    check_rows(left.key, right.key, "key")
    check_rows(left.value, right.value, "value")
    for a, b, name in ((left.k_scale, right.k_scale, "k_scale"), (left.v_scale, right.v_scale, "v_scale")):
        assert a is not None
        assert b is not None
        check_scales(a, b, name)


def feed_split(case: Case, lengths: tuple[int, ...], provider: Provider) -> tuple[Cache, Array]:
    """Feed TOKENS tokens in pieces; the final cache and all output rows."""
    stream, start, rows = Stream.start(case, TOKENS, provider), 0, []
    for length in lengths:
        rows.append(stream.feed((start,) * case.batch, length))
        start += length
    assert not stream.stray_writes()
    return stream.cache(), np.concatenate(rows, axis=1)


@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("dtype", FORMATS)
def test_pieces_write_the_same_bytes(dtype: CacheDtype, split: str, provider: Provider) -> None:
    """A chunked prompt, a speculative burst and single steps: equal bytes and scales, outputs within the bound."""
    case = Case(id=f"pieces-{dtype}", dtype=dtype, heads=4, capacity=160, totals=(1, 1), rotary="half", window=140)
    whole, _ = feed_split(case, (TOKENS,), provider)
    cache, output = feed_split(case, SPLITS[split], provider)
    same_bytes(cache, whole)
    at_once, inputs = Stream.start(case, TOKENS, provider).piece((0, 0), TOKENS)
    check_output(output, run_step(at_once.operator, inputs, poisoned_cache(at_once, 160)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_prompt_then_steps_write_the_same_bytes(dtype: CacheDtype, provider: Provider) -> None:
    """A prompt stores what the same tokens one by one store; only its output is from exact K and V."""
    case = Case(id=f"prompt-then-{dtype}", dtype=dtype, heads=4, capacity=64, totals=(1, 1), rotary="interleaved")
    stream, steps = Stream.start(case, 40, provider), Stream.start(case, 40, provider)
    stream.feed((0, 0), 33, total=33, check=True)
    for t in range(33):
        steps.feed((t, t), 1)
    same_bytes(stream.cache(), steps.cache())
    for t in range(33, 40):
        check = t in (33, 39)
        assert np.array_equal(stream.feed((t, t), 1, check=check), steps.feed((t, t), 1))
    same_bytes(stream.cache(), steps.cache())


@pytest.mark.parametrize("dtype", FORMATS)
def test_rewind_overwrites(dtype: CacheDtype, provider: Provider) -> None:
    """After going back from 20 and 30 tokens to 10 and 7, rows behind are as if never written to the reader."""
    case = Case(id=f"rewind-{dtype}", dtype=dtype, capacity=64, totals=(1, 1), scale_type="float16")
    stream = Stream.start(case, 64, provider)
    stream.feed((0, 0), 20)
    stream.feed((10, 20), 10)
    before = stream.cache()
    stream.feed((10, 7), 1, check=True)
    after = stream.cache()
    for b, row in ((0, 10), (1, 7)):
        changed = np.flatnonzero((before.key[b] != after.key[b]).any(axis=(0, 2)))
        assert set(changed) <= {row}
    stream.feed((11, 8), 3, check=True)


@pytest.mark.parametrize("scale_type", ["float32", "float16"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_old_scales_stay(dtype: CacheDtype, scale_type: str, provider: Provider) -> None:
    """Between calls the scales of earlier tokens can be read, and later calls leave every bit of them alone."""
    half = scale_type == "float16"
    case = Case(id=f"old-{dtype}", dtype=dtype, totals=(1, 1), scale_type="float16" if half else "float32")
    stream = Stream.start(case, 12, provider)
    stream.feed((0, 0), 9, total=9)
    first = stream.cache()
    stream.feed((9, 9), 1)
    stream.feed((10, 10), 2)
    second = stream.cache()
    for a, b in ((first.k_scale, second.k_scale), (first.v_scale, second.v_scale), (first.key, second.key)):
        assert a is not None
        assert b is not None
        assert a[:, :, :9].tobytes() == b[:, :, :9].tobytes()
        assert a[:, :, 9:12].tobytes() != b[:, :, 9:12].tobytes()


@pytest.mark.parametrize("seq", [1, 6])
@pytest.mark.parametrize("dtype", FORMATS)
def test_in_place_equals_separate(dtype: CacheDtype, seq: int, provider: Provider) -> None:
    """Same output bits and same rows; the separate call leaves its past and the tail of present alone."""
    case = Case(id=f"separate-{dtype}", dtype=dtype, seq=seq, totals=(33, 12), total=64, rotary="half")
    shared, _ = verify(case, provider)
    separate, _ = verify(replace(case, in_place=False), provider)
    assert np.array_equal(shared.output, separate.output)
    for b, total in enumerate(case.totals):
        assert np.array_equal(shared.cache.key[b, :, :total], separate.cache.key[b, :, :total])
        assert np.array_equal(shared.cache.value[b, :, :total], separate.cache.value[b, :, :total])


@pytest.mark.parametrize("dtype", FORMATS)
def test_optimization_levels(dtype: CacheDtype, provider: Provider) -> None:
    """All, basic and no graph optimizations: equal bits."""
    case = Case(id=f"levels-{dtype}", dtype=dtype, totals=(40, 23), total=64, rotary="half", softcap=10.0)
    levels = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
    results = [call(case, make_inputs(case), make_past(case), None, provider, level=level) for level in levels]
    for result in results[1:]:
        assert np.array_equal(result.output, results[0].output)
        same_bytes(result.cache, results[0].cache)


@pytest.mark.parametrize("dtype", FORMATS)
def test_threads_do_not_change_bytes(dtype: CacheDtype, provider: Provider) -> None:
    """1, 2 and 4 threads: equal bytes and scales, also in repeated runs; outputs within the bound."""
    case = Case(id=f"thread-bytes-{dtype}", dtype=dtype, seq=5, totals=(700, 300), capacity=800, total=800)
    inputs, past = make_inputs(case), make_past(case)
    results = [call(case, inputs, past, None, provider, threads=n) for n in (1, 2, 4, 4)]
    expected = run_step(case.operator, inputs, past)
    for result in results:
        same_bytes(result.cache, results[0].cache)
        check_output(result.output, expected)
    check_cache(case, results[0].cache, expected, exact_ties=provider.exact_ties)


FIRST, SECOND = selected().activations
MODES: list[tuple[Granularity, Granularity, FloatName, FloatName]] = [
    (Granularity.PER_TOKEN, Granularity.PER_TOKEN, "float16", FIRST),
    (Granularity.PER_TOKEN, Granularity.PER_TOKEN, "float32", SECOND),
    (Granularity.PER_CHANNEL, Granularity.PER_TOKEN, "float32", FIRST),
    (Granularity.PER_TENSOR, Granularity.PER_CHANNEL, "float32", SECOND),
]
CASES = [
    Case(id=f"types-{dtype}-{k}-{v}-{activation}-{scale}", dtype=dtype, k_quant=k, v_quant=v, scale_type=scale,
         activation=activation)
    for dtype in FORMATS
    for k, v, scale, activation in MODES
]  # fmt: skip
ONNX_NAMES = {"float32": "tensor(float)", "float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_inferred_types(case: Case, provider: Provider) -> None:
    """Graph outputs without a declared type get present's from past, scales' from scales, output's from query."""
    session = make_session(build_model(case, typed_outputs=False), provider)
    cache = {CacheDtype.INT8: "tensor(int8)", CacheDtype.INT4: "tensor(uint8)", CacheDtype.FP8: "tensor(float8e4m3fn)"}
    expected = {"output": ONNX_NAMES[case.activation]}
    expected |= dict.fromkeys(OUTPUTS[1:3], cache[case.dtype or CacheDtype.INT8])
    sides = (("present_k_scale", case.k_quant), ("present_v_scale", case.v_quant))
    expected |= {name: ONNX_NAMES[case.scale_type] for name, g in sides if g is Granularity.PER_TOKEN}
    assert {o.name: o.type for o in session.get_outputs()} == expected


@pytest.mark.parametrize(
    ("past", "total", "rows"),
    [(64, None, {64, None}), (64, 64, {64}), (64, 5, {64}), (0, 5, {5}), (0, None, {None}), ("C", None, {None})],
)
@pytest.mark.parametrize("dtype", FORMATS)
def test_inferred_shapes(
    dtype: CacheDtype, past: int | str, total: int | None, rows: set[int | None], provider: Provider
) -> None:
    """present has past's shape with the packed width of int4, and a row count only where it is certain.

    With separate buffers present may be longer than past; total_sequence_length decides where it is a constant.
    """
    case = Case(id="shapes", dtype=dtype)
    row = 64 if dtype is CacheDtype.INT4 else 128
    kinds = {name: kind for name, (kind, _) in input_types(case).items()}
    caches = {name: (kinds[name], [2, 2, past, row]) for name in ("past_key", "past_value")}
    scales = {name: (kinds[name], [2, 2, past, 1]) for name in ("k_scale", "v_scale")}
    constants = {} if total is None else {"total_sequence_length": np.array([total], np.int32)}
    model = build_model(case, inputs=caches | scales, typed_outputs=False, constants=constants)
    shapes = {o.name: o.shape for o in make_session(model, provider).get_outputs()}
    assert shapes["output"][2] == 1024
    for name, width in ((OUTPUTS[1], row), (OUTPUTS[2], row), (OUTPUTS[4], 1), (OUTPUTS[5], 1)):
        assert [shapes[name][i] for i in (0, 1, 3)] == [2, 2, width], name
        inferred = shapes[name][2]
        assert (inferred if isinstance(inferred, int) else None) in rows, (name, inferred)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_symbolic_shape_inference(case: Case) -> None:
    """The Python tool that model optimizers use gives the same types, and each state output its input's shape."""
    model = onnx.load_from_string(build_model(case, typed_outputs=False))
    inferred = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    outputs = {o.name: o.type.tensor_type for o in inferred.graph.output}
    assert {name: kind.elem_type for name, kind in outputs.items()} == output_types(case)
    sources = {i.name: i.type.tensor_type.shape for i in inferred.graph.input}
    for name, kind in outputs.items():
        if name != "output":
            source = name.replace("present", "past") if name in OUTPUTS[1:3] else name.removeprefix("present_")
            assert kind.shape == sources[source], name


def test_two_head_sizes_in_one_session(provider: Provider) -> None:
    """Nodes with D 64 int4 and D 128 fp8 share nothing; three calls in a row."""
    first = Case(id="two-a", dtype=CacheDtype.INT4, head_size=64, totals=(30, 4), total=64, seq=3)
    second = Case(id="two-b", dtype=CacheDtype.FP8, head_size=128, heads=6, kv_heads=3, totals=(9, 50), total=64, seq=3)
    verify_two(first, second, provider)


def test_fp8_tensor_and_bytes_are_the_same(provider: Provider) -> None:
    """A float8e4m3fn tensor and a uint8 tensor with kv_cache_dtype float8e4m3fn: equal bits."""
    case = Case(id="fp8-both", dtype=CacheDtype.FP8, totals=(30, 30), rotary="half")
    native, _ = verify(case, provider)
    raw, _ = verify(replace(case, fp8_as_uint8=True), provider)
    assert cache_element_type(case) == TensorProto.FLOAT8E4M3FN
    assert np.array_equal(native.output, raw.output)
    same_bytes(native.cache, raw.cache)


@pytest.mark.parametrize("granularity", list(Granularity)[1:])
@pytest.mark.parametrize("dtype", FORMATS)
def test_quality_follows_from_the_step_size(dtype: CacheDtype, granularity: Granularity, provider: Provider) -> None:
    """Keys of 0 make all weights equal, so the output is a mean of V rows, and its error that of the mean.

    Each int element is at most half a scale off, each fp8 element 1/16 of itself or half its smallest step.
    """
    case = Case(id=f"quality-{dtype}-{granularity}", dtype=dtype, v_quant=granularity, totals=(1, 1), capacity=40)
    stream = Stream.start(case, 40, provider)
    assert stream.inputs.key is not None
    assert stream.inputs.value is not None
    stream.inputs.key[...] = 0
    # Inside the range of the static scales, where nothing saturates.
    stream.inputs.value[...] = np.clip(stream.inputs.value, -2.9, 2.9)
    for t in range(39):
        stream.feed((t, t), 1)
    output = stream.feed((39, 39), 1)
    values = stream.inputs.value.astype(np.float64).reshape(2, 40, 2, 128).swapaxes(1, 2)
    exact = values.mean(axis=2).repeat(4, axis=1)
    scale = stream.cache().v_scale
    assert scale is not None
    steps = np.broadcast_to(scale, (2, 2, 40, 128)) if scale.ndim == 4 else np.full((2, 2, 40, 128), scale[0])
    # Sums are rounded to the activation type, and on a GPU the weights, too.
    unit = np.finfo(output.dtype).eps
    half = steps / 2 if dtype is not CacheDtype.FP8 else np.maximum(np.abs(values) / 16, steps * 2.0**-10)
    sizes = np.abs(values).mean(axis=2).repeat(4, axis=1)
    bound = half.mean(axis=2).repeat(4, axis=1) * (1 + 1e-5) + 2 * unit * sizes + 1e-6
    error = np.abs(output[:, 0].astype(np.float64) - exact)
    assert (error <= bound).all(), f"{(error / bound).max():.3f} of the bound"
    assert error.max() > 0
