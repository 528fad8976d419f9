"""Greedy text of the small decoder with every cache format against its 16-bit cache, and how quick the steps are.

`python -m python_tests.transformers.small_decoder.generation_table --device cuda` makes 2,000 bytes. Two numbers say
how near a format is: after how many bytes its own text first differs, and the share of steps in which it would choose
the 16-bit cache's next byte after that cache's own text.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from python_tests.reference.format import CacheDtype
from python_tests.transformers import installed as installed
from python_tests.transformers.small_decoder import text
from python_tests.transformers.small_decoder.export import CacheKind, load_weights
from python_tests.transformers.small_decoder.perplexity_table import write_model

FORMATS = [None, *(CacheKind(dtype) for dtype in CacheDtype)]
PROMPT_BYTES = 128


@dataclass(frozen=True)
class Row:
    """One format. same_text: bytes until its text differs; agreement: share of equal choices; sizes in bytes."""

    kind: str
    cache_bytes: int
    same_text: int
    agreement: float
    tokens_per_second: float
    median_ms: float
    device_bytes: int | None


def measure(device: str, count: int) -> list[Row]:
    """Rows by format, the 16-bit cache first."""
    from onnxruntime.transformers.kv_cache_decode_loop import generate
    from onnxruntime.transformers.kv_cache_decoder import DecodeSession
    from onnxruntime.transformers.kv_cache_report import device_memory_used, latency_percentiles

    weights = load_weights()
    prompt = [int(t) for t in text.tokens(text.held_out_text())[:PROMPT_BYTES]]
    reference: list[int] = []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in FORMATS:
            path = Path(folder) / "model.onnx"
            write_model(path, weights, {}, kind, True)
            session = DecodeSession(path, capacity=PROMPT_BYTES + count, device=device)
            done = generate(session, [prompt], count)
            tokens = done.tokens[0]
            reference = reference or tokens
            same = next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=True)) if a != b), count)
            session.reset()
            chosen = [int(session.prompt([prompt])[0].argmax())]
            chosen += [int(session.step([token])[0].argmax()) for token in reference[:-1]]
            agreement = float(np.mean(np.array(chosen) == np.array(reference)))
            steps = done.step_seconds[1:]
            used = device_memory_used(session.cache.memory.device_id) if device == "cuda" else None
            rate, median = len(steps) / sum(steps), latency_percentiles(steps)[1]
            rows.append(Row(session.cache.kind, session.cache.nbytes, same, agreement, rate, median, used))
            del session
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    print("| cache | cache, KB | same text, bytes | same choices | tokens/s | median step, ms | device memory, MB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in measure(arguments.device, arguments.tokens):
        memory = "-" if row.device_bytes is None else f"{row.device_bytes / 1e6:,.0f}"
        print(
            f"| {row.kind} | {row.cache_bytes / 1e3:,.1f} | {row.same_text:,} | {row.agreement:.2%} | "
            f"{row.tokens_per_second:,.0f} | {row.median_ms:.3f} | {memory} |"
        )


if __name__ == "__main__":
    main()
