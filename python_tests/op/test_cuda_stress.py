"""Caches whose element, byte and row offsets pass 2^31 and 2^32."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from python_tests.op.cuda_case import cuda_case
from python_tests.op.huge_cache import HugeCache, verify_huge
from python_tests.op.providers import Provider
from python_tests.reference.format import CacheDtype

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@dataclass(frozen=True)
class Large:
    """Sizes of a cache: elements counts those of K."""

    batch: int
    kv_heads: int
    capacity: int
    head_size: int
    dtype: CacheDtype

    @property
    def elements(self) -> int:
        """Elements of K."""
        return self.batch * self.kv_heads * self.capacity * self.head_size


def huge(name: str, large: Large, *, seq: int = 1, group: int = 4, **changes: object) -> HugeCache:
    """Nine or more tokens with a window of 5, at the very end of the last entry and anywhere in the others."""
    total = seq + 8
    small = cuda_case(
        f"huge-{name}-{seq}", dtype=large.dtype, heads=large.kv_heads * group, kv_heads=large.kv_heads,
        head_size=large.head_size, seq=seq, totals=(total,) * large.batch, capacity=total, total=total + 1, window=5,
        **changes,
    )  # fmt: skip
    room = large.capacity - total
    offsets = tuple(room - (large.batch - 1 - b) * 997 % room for b in range(large.batch))
    return HugeCache(small, large.capacity, offsets)


LARGE = {
    "int8-b17": Large(17, 8, 131072, 128, CacheDtype.INT8),
    "int8-b16": Large(16, 8, 131072, 128, CacheDtype.INT8),
    "int4-b33": Large(33, 8, 131072, 128, CacheDtype.INT4),
    "fp8-one-entry": Large(1, 9, 1048576, 256, CacheDtype.FP8),
}


@pytest.mark.parametrize("seq", [1, 4, 20], ids=lambda s: f"s{s}")
@pytest.mark.parametrize("name", list(LARGE))
def test_elements_beyond_int32(name: str, seq: int, cuda: Provider) -> None:
    """Decode, burst and chunk at the end of a cache of 2^31 elements and more, nothing else touched."""
    large = LARGE[name]
    assert large.elements >= 2**31
    # Reading gigabytes back takes longer than all the rest.
    verify_huge(huge(name, large, seq=seq), cuda, all_bytes=seq == 1 and large.batch in (17, 33))


@pytest.mark.parametrize("seq", [1, 20], ids=lambda s: f"s{s}")
def test_rows_beyond_int32(seq: int, cuda: Provider) -> None:
    """More than 2^31 rows, and so scales, in each side."""
    large = Large(5, 64, 8388608, 8, CacheDtype.INT4)
    assert large.elements // large.head_size > 2**31
    verify_huge(huge("rows", large, seq=seq, group=1, scale_type="float16"), cuda, all_bytes=False)


@pytest.mark.parametrize("seq", [1, 20], ids=lambda s: f"s{s}")
def test_bytes_beyond_uint32(seq: int, cuda: Provider) -> None:
    """More than 2^32 bytes in each side."""
    large = Large(33, 8, 131072, 128, CacheDtype.FP8)
    assert large.elements > 2**32
    verify_huge(huge("bytes", large, seq=seq), cuda, all_bytes=False)
