"""Calls and chips that MakePlan is asked about on the host."""

from __future__ import annotations

from python_tests.kernel.params import FORMATS, MODES, GqaParams
from python_tests.reference.format import CacheDtype, Granularity, row_bytes

H200 = (132, 90)
# Of an H200: [n] clusters of n blocks, one block a multiprocessor.
CLUSTERS = (0, 0, 66, 39, 30, 20, 17, 15, 15)
DEVICES = (H200, (1, 75), (16, 75), (40, 86), (68, 80), (108, 80), (128, 89), (148, 100), (170, 120))


def call(
    dtype: CacheDtype = CacheDtype.INT8,
    *,
    batch: int = 1,
    seq: int = 1,
    group: int = 4,
    kv_heads: int = 8,
    head_size: int = 128,
    capacity: int = 131_072,
    prompt: bool = False,
) -> GqaParams:
    """Parameters without memory behind them: MakePlan looks at shapes and addresses only."""
    p = GqaParams(
        batch_size=batch, sequence_length=seq, num_heads=kv_heads * group, kv_num_heads=kv_heads, group_size=group,
        head_size=head_size, row_bytes=row_bytes(dtype, head_size), capacity=capacity, past_capacity=capacity,
        is_prompt=prompt, format=FORMATS[dtype],
    )  # fmt: skip
    for side in (p.k, p.v):
        side.mode = MODES[Granularity.PER_TOKEN]
        side.codes = 0x7F0000000000
    return p
