"""The table of generated text by cache kind: its rows, and that each comes from a process of its own."""

from __future__ import annotations

import subprocess

import pytest
from onnxruntime.transformers import kv_cache_decoder

from python_tests.transformers.small_decoder.generation_table import PROMPT_BYTES, measure_apart, table

TOKENS = 6


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each kind, the 16-bit cache first and equal to itself; no session is made in this process."""
    monkeypatch.setattr(kv_cache_decoder, "DecodeSession", None)
    head, _, *lines = table("cpu", TOKENS)
    names = [cell.strip() for cell in head.strip("|").split("|")]
    rows = [dict(zip(names, (c.strip() for c in line.strip("|").split("|")), strict=True)) for line in lines]
    assert [row["cache"] for row in rows] == [
        "float16",
        *(f"{k} PER_TOKEN/PER_TOKEN" for k in ("int8", "float8e4m3fn", "int4")),
    ]
    sizes = [f"{(PROMPT_BYTES + TOKENS) * size / 1e3:,.1f}" for size in (1024, 576, 576, 320)]
    assert [row["cache, KB"] for row in rows] == sizes
    assert (rows[0]["same text, bytes"], rows[0]["same choices"]) == (str(TOKENS), "100.00%")
    assert {row["device memory, MB"] for row in rows} == {"-"}
    for row in rows:
        assert float(row["median step, ms"]) > 0


def test_reference() -> None:
    """A kind is compared with the text that it is given."""
    own = measure_apart("int8", "cpu", TOKENS)
    assert (own.same_text, own.agreement, len(own.tokens)) == (TOKENS, 1.0, TOKENS)
    other = [*own.tokens[:-1], own.tokens[-1] ^ 1]
    compared = measure_apart("int8", "cpu", TOKENS, other)
    assert compared.tokens == own.tokens
    assert (compared.same_text, compared.agreement) == (TOKENS - 1, (TOKENS - 1) / TOKENS)


def test_process_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """Its reason is shown, and there is no row."""
    with pytest.raises(subprocess.CalledProcessError):
        measure_apart("int8", "cpu", 5000)
    assert "capacity 5128 is beyond the rotary table" in capfd.readouterr().err
