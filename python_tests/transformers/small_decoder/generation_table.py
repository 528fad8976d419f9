"""Greedy text of the small decoder with every cache format against its 16-bit cache, and how quick the steps are.

`python -m python_tests.transformers.small_decoder.generation_table --device cuda` makes 2,000 bytes. Two numbers say
how near a format is: after how many bytes its own text first differs, and the share of steps in which it would choose
the 16-bit cache's next byte after that cache's own text. Each format runs in a process of its own, which shares neither
arenas nor warm caches with the others; device memory is what everyone uses while it runs, its CUDA context included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from python_tests.reference.format import CacheDtype
from python_tests.transformers import installed as installed
from python_tests.transformers.small_decoder import text
from python_tests.transformers.small_decoder.export import CacheKind, load_weights
from python_tests.transformers.small_decoder.perplexity_table import write_model

REPO = Path(__file__).resolve().parents[3]
# The first one is what the others are compared with.
KINDS = {"float16": None, **{str(dtype): CacheKind(dtype) for dtype in CacheDtype}}
PROMPT_BYTES = 128


@dataclass(frozen=True)
class Row:
    """One format. same_text: bytes until its text differs; agreement: share of equal choices; sizes in bytes.

    tokens: the text.
    """

    kind: str
    cache_bytes: int
    same_text: int
    agreement: float
    tokens_per_second: float
    median_ms: float
    device_bytes: int | None
    tokens: list[int]


def measure(name: str, device: str, count: int, reference: Sequence[int] = ()) -> Row:
    """The row of one of KINDS, in this process. reference: the text of the 16-bit cache; without one, its own."""
    from onnxruntime.transformers.kv_cache_decode_loop import generate
    from onnxruntime.transformers.kv_cache_decoder import DecodeSession
    from onnxruntime.transformers.kv_cache_report import device_memory_used, latency_percentiles

    prompt = [int(t) for t in text.tokens(text.held_out_text())[:PROMPT_BYTES]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_model(path, load_weights(), {}, KINDS[name], True)
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
    return Row(session.cache.kind, session.cache.nbytes, same, agreement, rate, median, used, tokens)


def measure_apart(name: str, device: str, count: int, reference: Sequence[int] = ()) -> Row:
    """measure() in a process of its own, whose messages are shown. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "reference.json"
        wanted.write_text(json.dumps([*reference]), encoding="utf-8")
        command = [sys.executable, "-m", "python_tests.transformers.small_decoder.generation_table", "--kind", name]
        command += ["--device", device, "--tokens", str(count), "--reference", str(wanted)]
        done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def table(device: str, count: int) -> Iterator[str]:
    """Lines of the table, each as soon as it is measured."""
    yield "| cache | cache, KB | same text, bytes | same choices | tokens/s | median step, ms | device memory, MB |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    reference: list[int] = []
    for name in KINDS:
        row = measure_apart(name, device, count, reference)
        reference = reference or row.tokens
        memory = "-" if row.device_bytes is None else f"{row.device_bytes / 1e6:,.0f}"
        yield (
            f"| {row.kind} | {row.cache_bytes / 1e3:,.1f} | {row.same_text:,} | {row.agreement:.2%} | "
            f"{row.tokens_per_second:,.0f} | {row.median_ms:.3f} | {memory} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=2000, help="at least 3: the first step is not counted")
    parser.add_argument("--kind", choices=tuple(KINDS), help="measure this one here and print its row as JSON")
    parser.add_argument("--reference", type=Path, help="with --kind: the other text, a JSON list (default: its own)")
    arguments = parser.parse_args()
    if arguments.kind:
        reference = json.loads(arguments.reference.read_text(encoding="utf-8")) if arguments.reference else []
        print(json.dumps(asdict(measure(arguments.kind, arguments.device, arguments.tokens, reference))))
        return
    for line in table(arguments.device, arguments.tokens):
        print(line, flush=True)


if __name__ == "__main__":
    main()
