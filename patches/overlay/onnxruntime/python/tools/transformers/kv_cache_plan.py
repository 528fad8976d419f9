# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Prints which context lengths fit a device's memory with each kind of KV cache, and draws it.

    python -m onnxruntime.transformers.kv_cache_plan --preset llama-3.1-8b --memory 24GB 80GB
    python -m onnxruntime.transformers.kv_cache_plan --model model.onnx --memory 24GiB --batch 4 --svg plan.svg

Counted: weights, K, V and scales. Estimated from above: one layer's attention scratch, and the activations and logits
of a chunk of the prompt (--chunk). Assumed: --reserve for the CUDA context, library workspaces and what else uses the
device. With --context the picture ends at that many tokens and names the size of each cache there. Exit codes: 0 done,
1 refused, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .kv_cache_footprint import KINDS, PRESETS, Footprint, largest_context, model_footprint, parse_size
from .kv_cache_layers import CacheModelError
from .kv_cache_plan_chart import Line, draw

SCALES = {"float32": 4, "float16": 2, "static": 0}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is planned for.

    memory: bytes of each device. batch: sequences at once. chunk: tokens of a call. reserve: bytes. scale_bytes: of a
    scale per token, 0 for static ones. keep: layers whose cache stays fp16. context: tokens that are wanted; 0: those
    that the model is made for, and a picture up to the longest context that fits.
    """

    memory: tuple[int, ...]
    batch: int = 1
    chunk: int = 512
    reserve: int = 500_000_000
    scale_bytes: int = 4
    keep: int = 0
    context: int = 0


@dataclass(frozen=True)
class Row:
    """One kind of cache. per_token: bytes of all batch entries. fits: tokens of each entry, for each device."""

    kind: str
    per_token: int
    fits: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """weights, attention, activations, reserve: bytes beside the caches."""

    model: Footprint
    request: Request
    attention: int
    activations: int
    rows: tuple[Row, ...]

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the context."""
        return self.model.weights + self.attention + self.activations + self.request.reserve


def make_plan(model: Footprint, request: Request) -> Plan:
    """Context lengths of every cache kind on every device."""
    attention = model.attention_scratch(request.batch, request.chunk)
    activations = model.activations(request.batch, request.chunk)
    fixed = model.weights + attention + activations + request.reserve
    rows = []
    for kind in KINDS:
        one = model.bytes_per_token(kind, scale_bytes=request.scale_bytes, keep=request.keep)
        per_token = request.batch * one
        rows.append(Row(kind, per_token, tuple(largest_context(m, fixed, per_token) for m in request.memory)))
    return Plan(model, request, attention, activations, tuple(rows))


def table(plan: Plan) -> str:
    """The plan for a person."""
    model, request = plan.model, plan.request
    shapes = sorted(set(model.caches))
    heads = " or ".join(f"{kv_heads} KV heads of {head_size}" for kv_heads, head_size in shapes)
    lines = [
        f"{model.name}: {len(model.caches)} layers, {heads}; batch {request.batch}, calls of {request.chunk} tokens",
        f"weights {gigabytes(model.weights)}, attention scratch {gigabytes(plan.attention)}, activations and logits "
        f"{gigabytes(plan.activations)}, reserved {gigabytes(request.reserve)}",
        "",
    ]
    context = request.context or model.context
    heading = ["cache", "bytes a token", *(f"tokens in {gigabytes(m)}" for m in request.memory)]
    cells = [heading + ([f"cache at {context:,}"] if context else [])]
    beyond = False
    for row in plan.rows:
        counts = []
        for tokens in row.fits:
            over = 0 < model.context < tokens
            beyond |= over
            counts.append((f"{tokens:,}" if tokens else "none") + ("*" if over else " " if model.context else ""))
        cells.append(
            [row.kind, f"{row.per_token:,}", *counts, *([gigabytes(context * row.per_token)] if context else [])]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(heading) + bool(context))]
    for line in cells:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("   ".join([first, *rest]).rstrip())
    if beyond:
        lines.append(f"* more than the {model.context:,} tokens that the model is made for")
    small = [m for m in request.memory if m < plan.fixed]
    lines += [f"{gigabytes(m)}: weights and scratch alone need {gigabytes(plan.fixed)}" for m in small]
    return "\n".join(lines)


def gigabytes(size: int) -> str:
    """In units of 10^9 bytes, or of 10^6 where that says more."""
    if size < 10**8:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e9:.2f} GB" if size % 10**9 else f"{size // 10**9} GB"


def chart(plan: Plan) -> str:
    """SVG: memory over context, a line per kind, its crossings with each device's memory. ValueError if none."""
    top, context = max(plan.request.memory), plan.request.context
    longest = max(max(row.fits) for row in plan.rows)
    if longest < 1 and not context:
        msg = f"nothing to draw: weights and scratch alone need {gigabytes(plan.fixed)}"
        raise ValueError(msg)
    lines: list[Line] = []
    # int8 and fp8 take the same room: one line.
    for row in plan.rows:
        merged = bool(lines) and lines[-1].per_token == row.per_token
        label = f"{lines.pop().label}, {row.kind}" if merged else row.kind
        end = f"{label}: {gigabytes(context * row.per_token)}" if context else ""
        lines.append(Line(label, row.per_token, row.fits, end))
    title = f"{plan.model.name}, batch {plan.request.batch}: memory by context length"
    devices = [(m, gigabytes(m)) for m in sorted(plan.request.memory)]
    if context:
        top = max(top, plan.fixed + context * max(row.per_token for row in plan.rows))
        return draw(title, lines, plan.fixed, devices, (context, int(top * 1.04)))
    return draw(title, lines, plan.fixed, devices, (int(longest * 1.1), int(top * 1.12)))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if min(args.batch, args.chunk) < 1 or min(args.keep_layers, args.context) < 0:
        parser.error("--batch and --chunk are at least 1, --keep-layers and --context at least 0")
    if args.model and args.weight_bits:
        parser.error("--weight-bits means something with --preset alone: a model file's weights are counted")
    try:
        preset = PRESETS[args.preset].footprint(args.preset, args.weight_bits or 16) if args.preset else None
        model = preset or model_footprint(args.model, args.head_size)
        if args.weights:
            model = Footprint(**{**vars(model), "weights": args.weights})
        request = Request(
            memory=tuple(args.memory),
            batch=args.batch,
            chunk=args.chunk,
            reserve=args.reserve,
            scale_bytes=SCALES[args.scales],
            keep=args.keep_layers,
            context=args.context,
        )
        plan = make_plan(model, request)
        print(table(plan))
        if args.svg:
            picture = chart(plan)
            with args.svg.open("x", encoding="utf-8") as file:
                file.write(picture)
            print(f"drawn: {args.svg}")
    except CacheModelError as exc:
        print(f"{args.model}: refused", *(f"  {problem}" for problem in exc.problems), sep="\n", file=sys.stderr)
        return 1
    except (OSError, ValueError) as exc:
        print(f"refused: {exc}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    what, _, text = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "kv_cache_plan",
        description=what,
        epilog=text,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a decoder with GroupQueryAttention nodes, converted or not")
    source.add_argument("--preset", choices=PRESETS, help="the shape of a published decoder")
    parser.add_argument("--memory", type=_size, nargs="+", required=True, help="of each device: 24GB, 80GiB")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once (default 1)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one call of the prompt (default 512)")
    parser.add_argument("--weights", type=_size, help="bytes of the weights, if not those that are counted")
    parser.add_argument("--weight-bits", type=float, help="with --preset: bits of a weight (default 16)")
    parser.add_argument("--scales", choices=SCALES, default="float32", help="type of scales per token, or static ones")
    parser.add_argument("--keep-layers", type=int, default=0, metavar="COUNT", help="layers whose cache stays 16 bit")
    parser.add_argument("--context", type=int, default=0, help="tokens to count for and to draw (default: the model's)")
    parser.add_argument("--reserve", type=_size, default=500_000_000, help="for the context and libraries (0.5GB)")
    parser.add_argument("--head-size", type=int, default=0, help="with --model, where it does not tell it")
    parser.add_argument("--svg", type=Path, help="picture to write; it must not exist")
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


if __name__ == "__main__":
    sys.exit(main())
