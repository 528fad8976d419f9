"""The benchmark's judgement: a bar passes, is missed, or was not measured, and a peer is not the installed wheel."""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.bench.bench_cpu_decode import Row, table
from python_tests.bench.cpu_bars import FLOAT, INT4, INT4_STATIC, INT8, INT8_STATIC, LATER, STOCK, bar_lines, find_bars
from python_tests.bench.cpu_case import HEAD_SIZE, HEADS, KV_HEADS, PEER_SETUPS, SETUPS, Setup, state_bytes, tensors
from python_tests.bench.cpu_expected import FORMATS, expected_output
from python_tests.bench.cpu_model import build
from python_tests.reference.format import Granularity
from python_tests.reference.step import Cache, Inputs, Operator, run_step

INSTALLED = "1.21.0+kvq.1"


def row(wheel: int, version: str, setup: Setup, ms: float) -> Row:
    """A measured row at 16,384 tokens."""
    return Row(wheel, version, setup, 16384, bytes=10**6, ms=[ms * 0.9, ms, ms * 1.3])


def rows(int8: float, int4: float, plain: float) -> list[Row]:
    """The installed wheel's times beside fixed ones of the peers."""
    return [
        row(0, INSTALLED, FLOAT, plain),
        row(0, INSTALLED, INT8, int8),
        row(0, INSTALLED, INT4, int4),
        row(1, STOCK, FLOAT, 10.0),
        row(2, LATER, FLOAT, 6.0),
        row(2, LATER, INT8_STATIC, 3.4),
        row(2, LATER, INT4_STATIC, 4.1),
    ]


def test_bars_are_judged() -> None:
    """Each of the four bars by its own pair of rows, with 5 % for noise in 'not slower' and none in 2.5x."""
    assert [bar.passed for bar in find_bars(rows(3.5, 4.2, 10.4), 0.05)] == [True, True, True, True]
    assert [bar.passed for bar in find_bars(rows(4.2, 4.4, 10.6), 0.05)] == [True, False, False, False]
    assert [bar.passed for bar in find_bars(rows(4.3, 4.0, 10.0), 0.05)] == [False, False, True, True]


def test_missing_peers_are_said() -> None:
    """Without the peers nothing is claimed."""
    bars = find_bars([r for r in rows(3.5, 4.2, 10.4) if r.wheel == 0], 0.05)
    assert [bar.passed for bar in bars] == [True, None, None, None]
    assert sum("not measured" in line for line in bar_lines(bars)) == 3


def test_bytes_come_from_the_tensors() -> None:
    """Cache and scales as they are: 2 x 8 heads x 64 tokens x (128 or 64 bytes + 4 for a token's scale)."""
    sizes = {setup.label: state_bytes(tensors(setup, 64)) for setup in SETUPS}
    assert sizes["fp32"] == 2 * 8 * 64 * 512
    assert sizes["int8 PER_TOKEN"] == 2 * 8 * 64 * 132
    assert sizes["int4 PER_TOKEN"] == 2 * 8 * 64 * 68
    assert sizes["fp8 PER_CHANNEL"] == 2 * 8 * (64 * 128 + 128 * 4)
    assert "| 16384 | 1.21.0 | fp32 | 10.000 | 9.200 | 12.400 | 0.1 |" in table([row(1, STOCK, FLOAT, 10.0)])[0]


def test_setups() -> None:
    """Nine quantized setups with fp32 activations; peers get what a release without this patch set can know."""
    assert len([s for s in SETUPS if s.quantized and s.activation == "fp32"]) == 9
    assert not [s for s in PEER_SETUPS if s.mode == "PER_TOKEN" or s.cache == "fp8"]
    assert len({build(setup, 64) for setup in SETUPS}) == len(SETUPS)


@pytest.mark.parametrize("setup", [pytest.param(s, id=s.label.replace(" ", "-")) for s in SETUPS])
def test_expected_output_is_the_reference(setup: Setup) -> None:
    """The benchmark's own arithmetic for long caches equals one step of the reference."""
    arrays = tensors(setup, 40)
    mode = Granularity(setup.mode or "NONE")
    operator = Operator(
        num_heads=HEADS, kv_num_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=FORMATS.get(setup.cache), k_quant=mode,
        v_quant=mode,
    )  # fmt: skip
    inputs = Inputs(
        query=arrays["query"], key=arrays["key"], value=arrays["value"], seqlens_k=arrays["seqlens_k"],
        total_sequence_length=40,
    )  # fmt: skip
    past = Cache(arrays["past_key"], arrays["past_value"], arrays.get("k_scale"), arrays.get("v_scale"))
    step = run_step(operator, inputs, past)
    assert np.allclose(expected_output(setup, 40), step.output.ravel(), rtol=1e-12, atol=1e-12)
