# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Gives a decoder model a quantized KV cache. Weights are neither changed nor loaded.

    python -m onnxruntime.transformers.kv_cache_quantizer inspect model.onnx
    python -m onnxruntime.transformers.kv_cache_quantizer convert model.onnx int8/model.onnx --kv-cache-dtype int8
    python -m onnxruntime.transformers.kv_cache_quantizer calibrate model.onnx scales.json --tokens tokens.npy
    python -m onnxruntime.transformers.kv_cache_quantizer convert model.onnx int4/model.onnx --kv-cache-dtype int4 \\
        --k-granularity channel --v-granularity token --calibration scales.json

The model is one whose GroupQueryAttention nodes (domain com.microsoft) read and write float16, bfloat16 or float caches
that are graph inputs and outputs, as the builder of onnxruntime-genai and Optimum export them. Exit codes: 0 done, 1
refused, with the nodes and reasons on stderr, 2 usage. The output never replaces a file; the input is never written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kv_cache_calibration import Calibration, measure, read_calibration
from .kv_cache_convert import SCALE_TYPES, CacheChoice
from .kv_cache_convert_file import convert_file, describe, report
from .kv_cache_layers import CacheModelError, Problem
from .kv_cache_model import read_decoder
from .kv_cache_weights import DATA_RULES

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
DTYPES = {"int8": "int8", "fp8": "float8e4m3fn", "int4": "int4"}
GRANULARITIES = {"token": "PER_TOKEN", "channel": "PER_CHANNEL", "tensor": "PER_TENSOR"}


def read_tokens(path: Path, length: int, *, as_bytes: bool = False) -> list[NDArray[np.int64]]:
    """Token ids in sequences of at most `length`: a .npy of integers, numbers in a text file, or a file's bytes."""
    try:
        if as_bytes:
            ids: NDArray[Any] = np.frombuffer(path.read_bytes(), np.uint8)
        elif path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
        else:
            ids = np.array([int(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split()])
    except (ValueError, UnicodeDecodeError) as exc:
        raise CacheModelError([Problem(str(path), f"not token ids: {exc}")]) from exc
    if ids.size == 0 or ids.dtype.kind not in "iu" or ids.ndim > 2 or int(ids.min()) < 0:
        reason = "not token ids: one or two dimensions of integers, none below zero"
        raise CacheModelError([Problem(str(path), reason)])
    rows = [ids.reshape(-1)] if ids.ndim < 2 else list(ids)
    return [row[at : at + length].astype(np.int64) for row in rows for at in range(0, len(row), length)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except CacheModelError as exc:
        print(f"{args.model}: refused", *(f"  {problem}" for problem in exc.problems), sep="\n", file=sys.stderr)
    except OSError as exc:
        print(f"refused: {exc}", file=sys.stderr)
    except ValueError as exc:
        parser.error(str(exc))
    return 1


def _parser() -> argparse.ArgumentParser:
    what, _, text = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "kv_cache_quantizer", description=what, epilog=text, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = parser.add_subparsers(required=True, metavar="inspect | calibrate | convert")
    show = verbs.add_parser("inspect", help="print a model's caches", allow_abbrev=False)
    show.add_argument("model", type=Path)
    show.add_argument("--json", action="store_true", help="every layer as JSON")
    show.add_argument("--head-size", type=int, default=0, help="D, for a model that does not tell it")
    show.set_defaults(run=_inspect)
    scales = verbs.add_parser("calibrate", help="measure K and V for static scales", allow_abbrev=False)
    scales.add_argument("model", type=Path, help="with float caches")
    scales.add_argument("output", type=Path, help="JSON to write")
    _measuring(scales, required=True)
    scales.add_argument("--head-size", type=int, default=0)
    scales.set_defaults(run=_calibrate)
    convert = verbs.add_parser("convert", help="write a model with quantized caches", allow_abbrev=False)
    convert.add_argument("model", type=Path)
    convert.add_argument("output", type=Path, help="model file to write; it must not exist")
    convert.add_argument("--kv-cache-dtype", choices=DTYPES, required=True)
    for side in ("k", "v"):
        convert.add_argument(f"--{side}-granularity", choices=GRANULARITIES, default="token")
    convert.add_argument("--scale-dtype", choices=SCALE_TYPES, default="float32", help="of scales per token")
    convert.add_argument("--keep-layers", type=_indices, default=frozenset(), help="layers left as they are: 0,31")
    convert.add_argument("--fp8-as-uint8", action="store_true", help="fp8 in uint8 tensors, which NumPy can make")
    convert.add_argument("--calibration", type=Path, help="what `calibrate` wrote; for static scales")
    convert.add_argument(
        "--data", choices=DATA_RULES, default="auto", help="weights, if the output is in another folder"
    )
    convert.add_argument("--head-size", type=int, default=0)
    _measuring(convert, required=False)
    convert.set_defaults(run=_convert)
    return parser


def _measuring(parser: argparse.ArgumentParser, *, required: bool) -> None:
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument("--tokens", type=Path, help="token ids to measure on: .npy, or numbers as text")
    source.add_argument("--bytes", type=Path, help="a file whose bytes are the token ids")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence (default 1024)")
    parser.add_argument(
        "--percentile", type=float, default=100.0, help="99 to 100; 100, the default, is the largest value"
    )
    parser.add_argument(
        "--channels-alone", action="store_true", help="do not widen K to all positions of its rotary pairs"
    )
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu", help="where the model is run")


def _indices(text: str) -> frozenset[int]:
    return frozenset(int(word) for word in text.split(","))


def _inspect(args: argparse.Namespace) -> int:
    decoder = read_decoder(args.model, args.head_size)
    if args.json:
        layers = [{**dataclasses.asdict(la), "bytes_per_token": la.bytes_per_token} for la in decoder.layers]
        problems = [dataclasses.asdict(p) for p in decoder.problems]
        print(
            json.dumps({"bytes_per_token": decoder.bytes_per_token, "layers": layers, "problems": problems}, indent=1)
        )
    else:
        print(f"{args.model}:", *describe(decoder), sep="\n")
        if decoder.problems:
            print("caches that cannot be converted:", *(f"  {p}" for p in decoder.problems), sep="\n")
    return 0


def _measured(args: argparse.Namespace) -> Calibration:
    if args.length < 1:
        msg = f"--length {args.length}: a sequence has at least one token"
        raise ValueError(msg)
    sequences = read_tokens(args.bytes or args.tokens, args.length, as_bytes=args.bytes is not None)
    return measure(
        args.model, sequences, percentile=args.percentile, envelope=not args.channels_alone,
        provider=PROVIDERS[args.provider], head_size=args.head_size,
    )  # fmt: skip


def _calibrate(args: argparse.Namespace) -> int:
    if args.output.exists():
        msg = f"{args.output} is there already; nothing is ever replaced: give another name"
        raise FileExistsError(msg)
    calibration = _measured(args)
    calibration.write(args.output)
    print(
        f"{args.output}: {len(calibration.layers)} layers, {calibration.tokens:,} tokens, "
        f"percentile {args.percentile:g}"
    )
    return 0


def _convert(args: argparse.Namespace) -> int:
    choice = CacheChoice(
        cache_dtype=DTYPES[args.kv_cache_dtype], k_granularity=GRANULARITIES[args.k_granularity],
        v_granularity=GRANULARITIES[args.v_granularity], scale_dtype=args.scale_dtype, keep_layers=args.keep_layers,
        fp8_as_uint8=args.fp8_as_uint8, head_size=args.head_size,
    )  # fmt: skip
    choice.check()
    tokens = args.tokens or args.bytes
    if not choice.static and (args.calibration or tokens):
        msg = "scales per token are made while tokens are appended: a calibration means nothing for them"
        raise ValueError(msg)
    if choice.static and not args.calibration and not tokens:
        msg = (
            "granularity tensor and channel need scales: --calibration FILE, or --tokens or --bytes to measure them now"
        )
        raise ValueError(msg)
    if args.calibration and tokens:
        msg = "--calibration has the scales: --tokens and --bytes would measure others"
        raise ValueError(msg)
    calibration = read_calibration(args.calibration) if args.calibration else _measured(args) if tokens else None
    print(report(convert_file(args.model, args.output, choice, calibration, args.data)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
