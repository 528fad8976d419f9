"""What the benchmark of the CUDA kernels counts: bytes as arrays have them, operations as the mask leaves them."""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.bench.bench_cuda_kernels import HEADER, Row, line
from python_tests.bench.cuda_layers import Shape
from python_tests.op.gqa_case import Case, poisoned_cache
from python_tests.reference.attention import visible
from python_tests.reference.format import CacheDtype


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_bytes_are_those_of_the_arrays(dtype: CacheDtype) -> None:
    """Codes and float scales of K and V."""
    case = Case(id="bytes", dtype=dtype, totals=(40, 40), total=40, capacity=40, heads=4, kv_heads=2, head_size=64)
    cache = poisoned_cache(case, 40)
    shape = Shape(dtype=dtype, tokens=40, batch=2, heads=4, kv_heads=2, head_size=64)
    arrays = (cache.key, cache.value, cache.k_scale, cache.v_scale)
    assert shape.cache_bytes == sum(array.nbytes for array in arrays if array is not None)


@pytest.mark.parametrize(("seq", "tokens"), [(1, 1), (1, 90), (7, 90), (90, 90)])
def test_operations_are_those_of_visible_tokens(seq: int, tokens: int) -> None:
    """Two products of D multiplications and additions for each token that a row sees."""
    seen = int(visible(tokens - seq + np.arange(seq), tokens, -1).sum())
    shape = Shape(dtype=CacheDtype.INT8, tokens=tokens, seq=seq, batch=3, heads=8, head_size=64)
    assert shape.operations == 2 * 2 * 64 * seen * 8 * 3


def test_table_line() -> None:
    """Median, spread, bytes per time, and the part of the measured bandwidth."""
    shape = Shape(dtype=CacheDtype.INT8, tokens=1000, heads=8, kv_heads=8, head_size=124)
    row = Row(shape, 16, "KV_CACHE_QUANT_DECODE", 4, 0, 1e-4, [1.0, 2.0, 9.0], {"append": 0.5, "decode": 1.25})
    cells = [cell.strip() for cell in line(row, 2048.0).strip("|").split("|")]
    assert len(cells) == HEADER[0].count("|") - 1
    assert cells[:4] == ["1000", "1", "int8", "2.00"]
    # 2 * 8 * 1000 * (124 + 4) bytes in 2 us.
    assert cells[6:8] == ["1024", "50%"]
    assert cells[9:12] == ["0.50", "1.25", ""]
