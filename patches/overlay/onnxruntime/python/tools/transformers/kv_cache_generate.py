# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Generate text with a model and its KV cache, and compare cache kinds by perplexity.

    python -m onnxruntime.transformers.kv_cache_generate generate model.onnx --prompt "def main(" --max-new-tokens 200
    python -m onnxruntime.transformers.kv_cache_generate perplexity fp16.onnx int8.onnx int4.onnx --text book.txt

Text is turned into tokens by --tokenizer: `bytes` (a token is a byte), `ids` (numbers, separated by blanks or commas),
or the path of a tokenizer.json, which needs the package tokenizers. Exit codes: 0, 1 refused with a reason, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from .kv_cache_decode_loop import Generation, Perplexity, Sampling, generate, perplexity
from .kv_cache_decoder import DecodeSession
from .kv_cache_report import device_memory_used, latency_percentiles, peak_process_memory
from .kv_cache_tokens import Tokenizer, open_tokenizer

# What onnxruntime says about a model that it cannot load or run; they have no common base class of their own. What goes
# wrong in a run with an IOBinding is a RuntimeError of Python's.
_NAMES = ("EPFail", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException")
RUNTIME_ERRORS = (RuntimeError, *(getattr(runtime, name) for name in _NAMES))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m onnxruntime.transformers.kv_cache_generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_generate(verbs.add_parser("generate", help="continue prompts", allow_abbrev=False))
    _add_perplexity(verbs.add_parser("perplexity", help="compare models over a text", allow_abbrev=False))
    return parser


def _add_common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--tokenizer", default="bytes", help="bytes, ids, or a tokenizer.json (default: bytes)")
    verb.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    verb.add_argument("--device-id", type=int, default=0)
    verb.add_argument(
        "--threads", type=_at_least(0), default=0, help="intra-op threads on the CPU; 0: as many as cores"
    )


def _add_generate(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", type=Path)
    verb.add_argument("--prompt", action="append", default=[], help="a prompt; several make a batch of any lengths")
    verb.add_argument("--prompt-file", action="append", type=Path, default=[], help="a file that holds a prompt")
    verb.add_argument("--max-new-tokens", type=_at_least(1), default=100)
    verb.add_argument("--capacity", type=_at_least(1), help="tokens of the cache (default: what this call needs)")
    verb.add_argument("--chunk", type=_at_least(0), default=0, help="tokens of a prompt's chunk; 0: the prompt at once")
    verb.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    verb.add_argument("--top-k", type=_at_least(0), default=0, help="sample from so many tokens; 0: all")
    verb.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this probability")
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--stop-id", type=int, action="append", default=[], help="token that ends an entry")
    verb.add_argument("--zero-context", type=_at_least(0), default=0, help="time it behind so many tokens of zeros")
    verb.add_argument("--no-graph", action="store_true", help="on CUDA: do not capture the step")
    verb.add_argument("--save-prefix", type=Path, help="save the cache after the prompt")
    verb.add_argument("--load-prefix", type=Path, help="start from a saved cache; prompts go on from there")
    _add_common(verb)


def _add_perplexity(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("models", type=Path, nargs="+", help="the first one is what the others are compared with")
    verb.add_argument("--text", type=Path, required=True)
    verb.add_argument("--window", type=_at_least(1), default=512, help="tokens of a context, from an empty cache each")
    verb.add_argument(
        "--tokens-per-step", type=_at_least(1), default=16, help="tokens of a call; they see quantized keys"
    )
    verb.add_argument("--max-tokens", type=_at_least(0), default=0, help="use the text's first tokens only; 0: all")
    _add_common(verb)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return _run_generate(arguments) if arguments.verb == "generate" else _run_perplexity(arguments)
    except (ValueError, OSError, *RUNTIME_ERRORS) as exc:
        # Everything that this package refuses is a ValueError with its reason.
        print(f"refused: {exc}", file=sys.stderr)
        return 1


def _run_generate(arguments: argparse.Namespace) -> int:
    tokenizer = open_tokenizer(arguments.tokenizer)
    texts = arguments.prompt + [p.read_text(encoding="utf-8") for p in arguments.prompt_file]
    prompts = [tokenizer.encode(text) for text in texts]
    if not prompts:
        msg = "no prompt: give --prompt or --prompt-file"
        raise ValueError(msg)
    if arguments.zero_context and arguments.load_prefix is not None:
        msg = "--zero-context and --load-prefix: both say what the cache holds at first; give one"
        raise ValueError(msg)
    loaded = arguments.zero_context if arguments.load_prefix is None else _prefix_length(arguments.load_prefix)
    capacity = arguments.capacity or loaded + max(map(len, prompts)) + arguments.max_new_tokens
    session = DecodeSession(
        arguments.model, capacity=capacity, batch=len(prompts), device=arguments.device, device_id=arguments.device_id,
        captured=False if arguments.no_graph else None, threads=arguments.threads,
    )  # fmt: skip
    if arguments.load_prefix is not None:
        session.cache.load(arguments.load_prefix)
    session.cache.advance(arguments.zero_context)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)

    def keep_prefix() -> None:
        if arguments.save_prefix is not None:
            session.cache.save(arguments.save_prefix, prompts)

    done = generate(
        session, prompts, arguments.max_new_tokens, sampling=sampling, stop_ids=arguments.stop_id,
        chunk=arguments.chunk, after_prompt=keep_prefix,
    )  # fmt: skip
    for text, ids in zip(texts, done.tokens, strict=True):
        print(f"{text}{tokenizer.joint}{tokenizer.decode(ids)}")
    for line in generation_report(session, done):
        print(line, file=sys.stderr)
    return 0


def _prefix_length(path: Path) -> int:
    from . import kv_cache_file

    return int(max(kv_cache_file.read(path).header["lengths"]))


def generation_report(session: DecodeSession, done: Generation) -> list[str]:
    """Lines for people: cache, prompt, tokens a second, latencies, memory."""
    cache, steps = session.cache, done.step_seconds[1:]
    lines = [
        f"cache    {cache.kind}: {cache.nbytes / 1e6:,.2f} MB for {cache.batch} x {cache.capacity} tokens, "
        f"of which scales {cache.scale_nbytes / 1e6:,.2f} MB; {session.model.bytes_per_token:,} bytes a token",
        f"prompt   {done.prompt_tokens} tokens in {done.prompt_seconds * 1e3:.2f} ms",
    ]
    if done.step_seconds:
        graph = "its capture included" if session.captured else "allocations included"
        lines.append(f"first    step {done.step_seconds[0] * 1e3:.3f} ms, {graph}")
    if steps:
        low, middle, high = latency_percentiles(steps)
        rate = session.batch * len(steps) / sum(steps)
        how = "captured" if session.captured else "not captured"
        lines.append(
            f"steps    {len(steps)}, {how}: {rate:,.1f} tokens/s; "
            f"ms a step: median {middle:.3f}, p10 {low:.3f}, p90 {high:.3f}"
        )
    used = device_memory_used(cache.memory.device_id) if cache.memory.device == "cuda" else None
    if used is not None:
        lines.append(f"memory   {used / 1e6:,.0f} MB of the device in use, by everyone")
    else:
        lines.append(f"memory   {peak_process_memory() / 1e6:,.0f} MB at most, this process")
    return lines


def _run_perplexity(arguments: argparse.Namespace) -> int:
    tokenizer: Tokenizer = open_tokenizer(arguments.tokenizer)
    ids = np.array(tokenizer.encode(arguments.text.read_text(encoding="utf-8")), np.int64)
    ids = ids[: arguments.max_tokens or None]
    rows = []
    for model in arguments.models:
        session = DecodeSession(
            model, capacity=arguments.window + 1, device=arguments.device, device_id=arguments.device_id,
            threads=arguments.threads,
        )  # fmt: skip
        found = perplexity(session, ids, tokens_per_step=arguments.tokens_per_step)
        rows.append((model.name, session.cache.kind, session.model.bytes_per_token, found))
    for line in perplexity_table(rows):
        print(line)
    return 0


def perplexity_table(rows: Sequence[tuple[str, str, int, Perplexity]]) -> list[str]:
    """A Markdown table; rows: model, cache kind, cache bytes a token, result. Differences are to the first row."""
    lines = [
        f"{rows[0][3].tokens:,} tokens predicted, contexts of up to {rows[0][3].window} tokens",
        "",
        "| model | cache | bytes a token | nats a token | perplexity | against the first |",
        "|---|---|---:|---:|---:|---:|",
    ]
    first = rows[0][3].value
    for name, kind, size, found in rows:
        change = f"{(found.value / first - 1) * 100:+.3f} %"
        lines.append(f"| {name} | {kind} | {size:,} | {found.nats:.5f} | {found.value:.4f} | {change} |")
    return lines


def _at_least(least: int) -> Callable[[str], int]:
    """Type of a command line argument."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            msg = f"{text}: must be at least {least}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
