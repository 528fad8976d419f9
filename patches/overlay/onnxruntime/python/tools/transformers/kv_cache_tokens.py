# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Text to tokens and back, for the command line: bytes, plain numbers, or a tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tokenizer:
    """encode: text to token ids; decode: back. joint: what stands between a prompt and its continuation."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    joint: str = ""


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `ids` or the path of a tokenizer.json. Raises ValueError, with what to do, for anything else."""
    if name == "bytes":
        return Tokenizer(lambda text: list(text.encode()), _decode_bytes)
    if name == "ids":
        return Tokenizer(_read_ids, lambda ids: " ".join(map(str, ids)), " ")
    if not Path(name).is_file():
        msg = f"--tokenizer {name}: neither bytes, ids nor a file"
        raise ValueError(msg)
    try:
        from tokenizers import Tokenizer as FromFile  # type: ignore[import-not-found, unused-ignore]
    except ImportError as exc:
        msg = (
            f"--tokenizer {name}: reading it needs a package: pip install tokenizers. Or give numbers: --tokenizer ids"
        )
        raise ValueError(msg) from exc
    loaded = FromFile.from_file(name)
    return Tokenizer(lambda text: list(loaded.encode(text).ids), lambda ids: str(loaded.decode(list(ids))))


def _decode_bytes(ids: Sequence[int]) -> str:
    wrong = [i for i in ids if not 0 <= i < 256]
    if wrong:
        msg = (
            f"token {wrong[0]} is no byte: this model has a larger vocabulary; use --tokenizer ids or a tokenizer.json"
        )
        raise ValueError(msg)
    return bytes(ids).decode("utf-8", "replace")


def _read_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    wrong = [w for w in words if not w.isdecimal()]
    if wrong:
        msg = f"{wrong[0]!r} is no token id; with --tokenizer ids a prompt is numbers, separated by blanks or commas"
        raise ValueError(msg)
    return [int(w) for w in words]
