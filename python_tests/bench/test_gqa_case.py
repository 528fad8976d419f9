"""What the operator's benchmark counts and asks for: bytes of the tensors, operations of the mask, commands of rows."""

from __future__ import annotations

import shlex
from dataclasses import replace

import numpy as np
import onnx
import pytest

from python_tests.bench.bench_gqa import Job, cases, jobs, parser, repeat_command
from python_tests.bench.gqa_case import PRESETS, Case, layer_count, with_cache
from python_tests.bench.gqa_memory import ANGLE_ROWS, activation_values, from_stored
from python_tests.bench.gqa_site import Place
from python_tests.bench.gqa_suites import SCALING, SUITES
from python_tests.bench.layers_model import build
from python_tests.reference.attention import visible
from python_tests.reference.bfloat16 import round_bfloat16

SOME = [
    with_cache(Case(tokens=40), "plain"),
    with_cache(Case(preset="gemma-8-1", tokens=40, batch=3, seq=4), "int4"),
    with_cache(Case(preset="mistral", tokens=40, window=9, seq=2), "int8:PER_CHANNEL/PER_TOKEN"),
    with_cache(Case(preset="gpt-oss", tokens=24, seq=24, prompt=True, packed=False), "fp8", "fp16"),
    with_cache(Case(preset="qwen2.5-7b", activation="bf16", tokens=40, capacity=64), "int4:PER_CHANNEL"),
    with_cache(Case(activation="fp32", tokens=40), "int8:PER_TENSOR"),
]


def test_bytes_are_those_of_the_tensors() -> None:
    """K and V with a float scale for each token and KV head, one for each channel, or one in all."""
    case = Case(tokens=40, batch=2, preset="llama3-8b")
    sizes = {text: with_cache(case, text).cache_bytes for text in ("plain", "int8", "int4", "fp8:PER_CHANNEL")}
    assert sizes["plain"] == 2 * 2 * 8 * 40 * 256
    assert sizes["int8"] == 2 * 2 * 8 * 40 * (128 + 4)
    assert sizes["int4"] == 2 * 2 * 8 * 40 * (64 + 4)
    assert sizes["fp8:PER_CHANNEL"] == 2 * (2 * 8 * 40 * 128 + 4 * 8 * 128)
    assert with_cache(case, "int8", "fp16").cache_bytes == 2 * 2 * 8 * 40 * (128 + 2)


def test_a_window_and_room_are_not_read() -> None:
    """Bytes read are of the tokens that are attended."""
    whole = with_cache(Case(tokens=4096), "int8")
    assert whole.read_bytes == whole.cache_bytes
    assert replace(whole, capacity=8192).read_bytes == whole.read_bytes
    assert replace(whole, capacity=8192).cache_bytes == 2 * whole.cache_bytes
    assert with_cache(Case(tokens=4096, window=1023), "int8").read_bytes == whole.read_bytes // 4


@pytest.mark.parametrize("case", SOME, ids=lambda c: f"{c.preset}-{c.cache}")
def test_operations_are_those_of_visible_tokens(case: Case) -> None:
    """Two products of D multiplications and additions for each token that a row sees."""
    positions = case.tokens - case.seq + np.arange(case.seq)
    seen = int(visible(positions, case.tokens, case.model.window).sum())
    assert case.operations == 2 * 2 * case.model.head_size * seen * case.model.heads * case.batch


@pytest.mark.parametrize("case", SOME, ids=lambda c: f"{c.preset}-{c.cache}")
def test_model_has_the_tensors_of_the_case(case: Case) -> None:
    """Graph inputs and outputs are the case's, each layer has its own cache, and presents take the places of pasts."""
    graph = onnx.load_from_string(build(case, 3)).graph
    found = {i.name: (i.type.tensor_type.elem_type, tuple(d.dim_value for d in i.type.tensor_type.shape.dim))
             for i in graph.input}  # fmt: skip
    wanted = {name: tuple(tensor) for name, tensor in case.shared_inputs().items()}
    wanted |= {f"{name}_{i}": tuple(tensor) for name, tensor in case.state().items() for i in range(3)}
    assert found == wanted
    assert len(graph.output) == 3 * (1 + len(case.state()))
    for i, node in enumerate(graph.node):
        assert node.input[3] == f"past_key_{i}"
        assert node.output[1] == f"present_key_{i}"
        assert ("present_v_scale_" + str(i) in node.output) == (case.v_mode == "PER_TOKEN")
    assert graph.node[0].domain == "com.microsoft"


@pytest.mark.parametrize("case", SOME, ids=lambda c: f"{c.preset}-{c.cache}")
def test_command_repeats_the_row(case: Case) -> None:
    """The command of a row asks for that case alone, with as many layers, in that wheel."""
    provider = "cpu" if case.activation == "fp32" else "cuda"
    arguments = parser().parse_args(["--provider", provider, "--rounds", "5"])
    command = repeat_command(Job(case, 7), arguments, [Place("stock", "/some where")])
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "python_tests.bench.bench_gqa"]
    again = parser().parse_args(words[3:])
    assert jobs(again) == [Job(case, 7)]
    assert (again.provider, again.rounds, again.site) == (provider, 5, ["stock=/some where"])


@pytest.mark.parametrize("name", sorted(SUITES))
def test_suites_are_runnable(name: str) -> None:
    """Every case of a suite is valid, there is none twice, and its command gives it again."""
    found = SUITES[name]()
    assert not [case.valid() for case in found if case.valid()]
    assert len(set(found)) == len(found)
    arguments = parser().parse_args([])
    for case in found:
        words = shlex.split(repeat_command(Job(case, 2), arguments, []))
        assert jobs(parser().parse_args(words[3:])) == [Job(case, 2)]


def test_scaling_has_its_ends() -> None:
    """256 to 1,048,576 tokens, batch 1 to 256."""
    batches, lengths = zip(*SCALING, strict=True)
    assert (min(batches), max(batches), min(lengths), max(lengths)) == (1, 256, 256, 2**20)


def test_layers_exceed_the_l2_cache() -> None:
    """As many as reach the bytes, within the memory that there is."""
    small, large = (with_cache(Case(tokens=tokens), "int8") for tokens in (1024, 1048576))
    assert layer_count(small, 512 * 10**6, 16, 256, 24 * 10**9) * small.cache_bytes >= 512 * 10**6
    assert layer_count(large, 512 * 10**6, 16, 256, 24 * 10**9) == 24 * 10**9 // large.cache_bytes
    assert layer_count(large, 512 * 10**6, 16, 256, 10**9) == 2
    assert layer_count(small, 0, 1, 256, 24 * 10**9) == 1


def test_impossible_cases_are_refused() -> None:
    """Before any wheel is started."""
    for words in (["--tokens", "4", "--seq", "5"], ["--tokens", "64", "--capacity", "32"], ["--cache", "int8:HALF"]):
        with pytest.raises(ValueError, match=r"tokens|HALF"):
            cases(parser().parse_args(words))
    with pytest.raises(ValueError, match="NAME=FOLDER"):
        Place.parse("ours=/nowhere")


def test_activations_are_what_the_type_holds() -> None:
    """bfloat16 values are kept in float32, and every one is a bfloat16; angles repeat."""
    values = activation_values(replace(SOME[4], tokens=3, capacity=ANGLE_ROWS + 10))
    assert values["query"].dtype == np.float32
    assert np.array_equal(values["query"], round_bfloat16(values["query"]))
    assert np.array_equal(values["cos_cache"][:4], values["cos_cache"][ANGLE_ROWS : ANGLE_ROWS + 4])
    assert from_stored(np.zeros(4, np.uint8), "fp16").tolist() == [0, 0]
    assert set(PRESETS) >= {"llama3-8b", "qwen2.5-7b", "llama2-7b", "gpt-oss", "gemma-8-1", "gemma-16-8", "mistral"}
