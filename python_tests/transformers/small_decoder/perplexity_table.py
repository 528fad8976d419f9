"""Perplexity of the small decoder with every cache kind.

`python -m python_tests.transformers.small_decoder.perplexity_table` measures on the held-out text; static scales come
from the training text. With --device cuda activations are float16.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from onnx import TensorProto

from python_tests.reference.format import Array, CacheDtype, Granularity
from python_tests.transformers import installed as installed
from python_tests.transformers.small_decoder import text
from python_tests.transformers.small_decoder.export import (
    CacheKind,
    export,
    largest_values,
    load_weights,
    static_scales,
)
from python_tests.transformers.small_decoder.network import Shape, Weights

TOKEN, CHANNEL, TENSOR = Granularity.PER_TOKEN, Granularity.PER_CHANNEL, Granularity.PER_TENSOR
SIDES = ((TOKEN, TOKEN), (CHANNEL, TOKEN), (CHANNEL, CHANNEL), (TENSOR, TENSOR))
KINDS = [CacheKind(dtype, *sides) for dtype in CacheDtype for sides in SIDES]


def write_model(
    path: Path, weights: Weights, largest: dict[tuple[int, str], Array], kind: CacheKind | None, half: bool
) -> None:
    """The decoder with a cache kind. largest: of largest_values()."""
    activation = int(TensorProto.FLOAT16 if half else TensorProto.FLOAT)
    scales = static_scales(largest, kind) if kind else None
    path.write_bytes(export(weights, Shape(), activation, kind, scales=scales).SerializeToString())


def measure(device: str, window: int, tokens_per_step: int, tokens: int, kinds: list[CacheKind]) -> list[str]:
    """Lines of the table: float32 (on the CPU) and float16 without quantization, then the kinds."""
    from onnxruntime.transformers.kv_cache_decode_loop import perplexity
    from onnxruntime.transformers.kv_cache_decoder import DecodeSession
    from onnxruntime.transformers.kv_cache_generate import perplexity_table

    weights, ids = load_weights(), text.tokens(text.held_out_text())[: tokens or None]
    plain = [(None, False), (None, True)] if device == "cpu" else [(None, True)]
    rows, largest = [], largest_values(weights, Shape())
    with tempfile.TemporaryDirectory() as folder:
        for kind, half in [*plain, *[(k, device != "cpu") for k in kinds]]:
            path = Path(folder) / "model.onnx"
            write_model(path, weights, largest, kind, half)
            session = DecodeSession(path, capacity=window + 1, device=device, threads=1)
            found = perplexity(session, np.asarray(ids), tokens_per_step=tokens_per_step)
            rows.append(("float16" if half else "float32", session.cache.kind, session.model.bytes_per_token, found))
    lines: list[str] = perplexity_table(rows)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=0, help="of the held-out text; 0: all")
    arguments = parser.parse_args()
    print(f"text {text.digest()}")
    print("\n".join(measure(arguments.device, arguments.window, arguments.tokens_per_step, arguments.tokens, KINDS)))


if __name__ == "__main__":
    main()
