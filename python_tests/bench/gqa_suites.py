"""Named lists of cases: what the bars, the pictures and the pages need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from python_tests.bench.gqa_case import Case, with_cache

LENGTHS = (1024, 4096, 16384, 65536, 131072)
OURS = ("int8", "fp8", "int4")
STATIC = ("int8:PER_TENSOR", "fp8:PER_TENSOR", "int4:PER_CHANNEL")
PAST = 32768
CHUNKS = (512, 2048)
PROMPTS = (512, 2048, 8192)
# (batch, tokens): from a launch to gigabytes, at most 2^21 tokens in all.
SCALING = tuple(
    (batch, tokens)
    for batch, lengths in (
        (1, (256, 1024, 4096, 16384, 65536, 262144, 1048576)),
        (4, (256, 1024, 4096, 16384, 65536, 262144)),
        (16, (256, 1024, 4096, 16384, 65536)),
        (64, (256, 1024, 4096, 16384)),
        (256, (256, 1024, 4096, 8192)),
    )
    for tokens in lengths
)


def _each(case: Case, caches: tuple[str, ...]) -> list[Case]:
    return [with_cache(case, cache) for cache in caches]


def decode() -> list[Case]:
    """One token at the lengths of the bars, batch 1, and two batches of 16."""
    sizes = [(1, tokens) for tokens in LENGTHS] + [(16, 1024), (16, 8192)]
    return [c for batch, tokens in sizes for c in _each(Case(batch=batch, tokens=tokens), ("plain", *OURS))]


def static() -> list[Case]:
    """The same with static scales, which stock releases since 1.24 have, too."""
    return [c for tokens in LENGTHS for c in _each(Case(tokens=tokens), STATIC)]


def shapes() -> list[Case]:
    """Other groups, head sizes, a window, sinks, and four new tokens."""
    base = [
        Case(preset="qwen2.5-7b", tokens=32768),
        Case(preset="llama2-7b", tokens=8192),
        Case(preset="llama3.2-1b", tokens=32768),
        Case(preset="llama3-70b", tokens=32768),
        Case(preset="gpt-oss", tokens=32768),
        Case(preset="gpt-oss-plain", tokens=32768),
        Case(preset="gemma-8-1", tokens=32768),
        Case(preset="gemma-16-8", tokens=16384),
        Case(preset="mistral", tokens=32768),
        Case(tokens=32768, seq=4),
        Case(tokens=32768),
    ]
    return [c for case in base for c in _each(case, ("plain", "int8", "int4"))]


def bfloat16() -> list[Case]:
    """bfloat16 activations beside float16."""
    cases = [Case(tokens=tokens, activation=kind) for tokens in (4096, 65536) for kind in ("fp16", "bf16")]
    return [c for case in cases for c in _each(replace(case, cache=case.activation), ("plain", *OURS))]


def chunks() -> list[Case]:
    """Chunks onto a long past."""
    return [c for seq in CHUNKS for c in _each(Case(tokens=PAST + seq, seq=seq), ("plain", *OURS))]


def prompts() -> list[Case]:
    """First prompts."""
    return [c for n in PROMPTS for c in _each(Case(tokens=n, seq=n, prompt=True), ("plain", *OURS))]


def scaling() -> list[Case]:
    """int8 over lengths and batches."""
    return [with_cache(Case(batch=batch, tokens=tokens), "int8") for batch, tokens in SCALING]


SUITES: dict[str, Callable[[], list[Case]]] = {
    "decode": decode, "static": static, "shapes": shapes, "bfloat16": bfloat16, "chunks": chunks, "prompts": prompts,
    "scaling": scaling,
}  # fmt: skip
