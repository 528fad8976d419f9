"""Caches of gigabytes on the device, of which only the last rows of each batch entry hold tokens that are attended.

A small case says what they hold; the rest is 0x7F bytes and NaN scales. With a window, attention does not depend on
where in the cache its tokens lie, so the small case also says what must come out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from python_tests.op.checks import check_output, check_rows, check_scales
from python_tests.op.cuda_runtime import DeviceMemory, memory_info, one_process_at_a_time
from python_tests.op.gqa_case import POISON_BYTE, Case, make_inputs, make_past
from python_tests.op.gqa_model import bind, build_model, cached_session, input_buffers, output_buffers
from python_tests.op.providers import Provider
from python_tests.reference.format import Array
from python_tests.reference.step import Cache, Inputs, run_step

STATE = ("past_key", "past_value", "k_scale", "v_scale")
# Every byte of a scale: a NaN in both scale types.
NAN_BYTE = 0xFF


@dataclass(frozen=True)
class HugeCache:
    """`small` moved into a cache of `capacity` rows: token t of entry b is row offsets[b] + t.

    small must have a window that keeps its last query from seeing its token 0, and no rotary.
    """

    small: Case
    capacity: int
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.small.rotary == "none"
        assert not self.small.prompt
        # Row 0 of small may hold anything: so may all rows before it.
        assert all(0 <= self.small.window < t - self.small.seq for t in self.small.totals)

    @property
    def case(self) -> Case:
        """The case on the large cache."""
        totals = tuple(o + t for o, t in zip(self.offsets, self.small.totals, strict=True))
        return replace(self.small, capacity=self.capacity, totals=totals, total=self.capacity)

    def size(self, rows: Array) -> int:
        """Bytes of the large array of which `rows` is the small one."""
        return self.small.batch * self.small.kv_heads * self.capacity * rows.shape[3] * rows.itemsize

    def place(self, rows: Array, entry: int, head: int) -> int:
        """Byte at which small's rows of an entry's head begin in the large array."""
        row = (entry * self.small.kv_heads + head) * self.capacity + self.offsets[entry]
        return row * rows.shape[3] * rows.itemsize


def verify_huge(huge: HugeCache, provider: Provider, *, all_bytes: bool = True) -> None:
    """One call on the large cache: output, new rows and scales are right, and no other byte changed.

    all_bytes False: of the other bytes only those beside the tokens are looked at.
    """
    small, case = huge.small, huge.case
    inputs, past = make_inputs(small), make_past(small)
    large_inputs = replace(inputs, seqlens_k=np.array(case.totals, np.int32) - 1, total_sequence_length=huge.capacity)
    arrays = per_token(past)
    expected = run_step(small.operator, inputs, past)
    needed = sum(huge.size(array) for array in arrays.values())
    with one_process_at_a_time():
        free = memory_info(provider.device_id)[0]
        if free < needed + 2**30:
            pytest.skip(f"needs {needed / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free")
        memories = {name: filled(huge, name, array, provider) for name, array in arrays.items()}
        output = run_large(huge, large_inputs, memories, provider)
        check_output(output, expected)
        for name, wanted in per_token(expected.cache).items():
            check_large(huge, name, memories[name], wanted, all_bytes=all_bytes)
            memories[name].free()


def per_token(cache: Cache) -> dict[str, Array]:
    """What a PER_TOKEN cache consists of, by the names of the inputs."""
    named = zip(STATE, (cache.key, cache.value, cache.k_scale, cache.v_scale), strict=True)
    return {name: array for name, array in named if array is not None}


def filled(huge: HugeCache, name: str, rows: Array, provider: Provider) -> DeviceMemory:
    """The large array: small's rows where they belong, poison everywhere else."""
    memory = DeviceMemory(huge.size(rows), provider.device_id, NAN_BYTE if "scale" in name else POISON_BYTE)
    for b in range(huge.small.batch):
        for h in range(huge.small.kv_heads):
            # Not row 0, which no query sees.
            memory.write(rows[b, h, 1:], huge.place(rows, b, h) + rows[b, h, :1].nbytes)
    return memory


def run_large(huge: HugeCache, inputs: Inputs, memories: dict[str, DeviceMemory], provider: Provider) -> Array:
    """Run with the state bound in place; the output (B, S, N, D)."""
    case = huge.case
    session = cached_session(build_model(case), provider, "ORT_ENABLE_ALL", 2)
    ins = input_buffers(case, inputs, make_past(huge.small), provider)
    outs = output_buffers(case, ins, None, provider)
    for name, memory in memories.items():
        array = ins[name]
        array.shape = (*array.shape[:2], huge.capacity, array.shape[3])
        array.pointer = memory.pointer
    session.run_with_iobinding(bind(session, ins, outs))
    return outs["output"].read().reshape(case.batch, case.seq, case.heads, case.head_size)


def check_large(huge: HugeCache, name: str, memory: DeviceMemory, wanted: Array, *, all_bytes: bool) -> None:
    """small's rows are as the reference says, row 0 and all around is poison."""
    poison = NAN_BYTE if "scale" in name else POISON_BYTE
    row = wanted[0, 0, :1].nbytes
    got = np.empty_like(wanted)
    for b, total in enumerate(huge.small.totals):
        for h in range(huge.small.kv_heads):
            start = huge.place(wanted, b, h)
            got[b, h] = memory.read(start, wanted[b, h].nbytes).view(wanted.dtype).reshape(wanted[b, h].shape)
            edges = ((start - row, 2 * row), (start + total * row, row))
            for at, size in edges:
                inside = memory.read(max(at, 0), min(at + size, memory.size) - max(at, 0))
                assert (inside == poison).all(), f"{name}: entry {b}, head {h}, beside its tokens"
            if all_bytes:
                memory.fill(poison, start, total * row)
    # Row 0 and the rows behind the last are poison in the large cache; small's own poison is not the same everywhere.
    rows = np.arange(wanted.shape[2])[None, :] < np.array(huge.small.totals)[:, None]
    used = (rows & (np.arange(wanted.shape[2]) > 0))[:, None, :, None]
    check = check_scales if "scale" in name else check_rows
    check(np.where(used, got, 0).astype(wanted.dtype), np.where(used, wanted, 0).astype(wanted.dtype), name)
    step = 2**30
    for at in range(0, memory.size if all_bytes else 0, step):
        others = memory.read(at, min(step, memory.size - at))
        assert (others == poison).all(), f"{name}: a byte changed near {at + int(np.argmax(others != poison))}"
