"""Device memory of a step: weights, caches, scales, and scratch that does not grow with the context.

The session may allocate as much as its limit says and no more, so that a step that runs has needed no more; weights,
caches and scales are the caller's.
"""

from __future__ import annotations

import os

import pytest

from python_tests.op.cuda_runtime import memory_info
from python_tests.op.memory_model import FORMATS, Decoder
from python_tests.op.memory_table import LAYERS, MIB, TOKENS, StepFailed, measure, table
from python_tests.op.providers import Provider

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
QUANTIZED = [name for name in FORMATS if name != "fp16"]
# What the issue allows for one step at 131,072 tokens, 8 KV heads, D 128.
SCRATCH_LIMIT = 16_000_000
# Beside one layer's scratch the session holds the activations of a layer or two.
ACTIVATIONS = 1 * MIB
# Between formats the CUDA context differs by the modules that it has loaded.
CONTEXT_SPREAD = 64 * MIB


@pytest.fixture(autouse=True)
def needs_room(cuda: Provider) -> None:
    """Weights and caches of 32 layers."""
    largest = Decoder("fp16", LAYERS, TOKENS)
    needed = largest.weight_bytes + largest.cache_bytes + 2**30
    free = memory_info(cuda.device_id)[0]
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free")


@pytest.mark.parametrize("name", QUANTIZED)
def test_32_layers_in_the_scratch_of_one(name: str) -> None:
    """131,072 tokens, eagerly and in a graph: nothing beyond weights, caches, scales and under 16 MB."""
    measured = measure(Decoder(name, LAYERS, TOKENS), SCRATCH_LIMIT + ACTIVATIONS)
    assert 0 < measured.workspace <= SCRATCH_LIMIT


def test_the_limit_is_one() -> None:
    """Control: with a limit below the scratch that the kernels ask for, the step does not run."""
    with pytest.raises(StepFailed, match=r"smaller than requested|[Ff]ailed to allocate"):
        measure(Decoder("int8", 1, TOKENS), 64 * 1024)


def test_scratch_does_not_depend_on_the_format() -> None:
    """Partial results have one layout; no format has a buffer of its own."""
    limit = SCRATCH_LIMIT + ACTIVATIONS
    assert len({measure(Decoder(name, LAYERS, TOKENS), limit).workspace for name in QUANTIZED}) == 1


def test_process_needs_what_the_table_says() -> None:
    """Whole processes: what a quantized one takes beyond its tensors is what the unquantized one takes, give 16 MB."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other workers use the same GPU's memory: run without pytest-xdist")
    limit = SCRATCH_LIMIT + ACTIVATIONS
    rest = {}
    for name in FORMATS:
        decoder = Decoder(name, LAYERS, TOKENS)
        total = measure(decoder, 0 if name == "fp16" else limit).total
        rest[name] = total - decoder.weight_bytes - decoder.cache_bytes - decoder.scale_bytes
    for name in QUANTIZED:
        assert rest[name] <= rest["fp16"] + SCRATCH_LIMIT + CONTEXT_SPREAD, rest


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The table for the documentation; shown with -s."""
    text = table(SCRATCH_LIMIT + ACTIVATIONS)
    with capsys.disabled():
        print(f"\n{text}")
    assert all(f"| {name} |" in text for name in FORMATS)
