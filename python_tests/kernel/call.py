"""One call of the kernels on guarded device memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import pytest

from python_tests.kernel.case import KernelCase, from_bits, to_bits
from python_tests.kernel.device import Buffer, Device, Kernel
from python_tests.kernel.params import FORMATS, MODES, GqaParams, GqaPlan, KvSide
from python_tests.reference import format as kv
from python_tests.reference.format import Array, Granularity
from python_tests.reference.step import Cache, Inputs

OUTPUT_POISON = 77.0
# 0xFF bytes are NaN as float, half and bfloat16: a part of the scratch that nobody wrote poisons the output.
WORKSPACE_POISON = 0xFF
# MakePlan refuses it below, which test_plan.py sees to.
BFLOAT16_CAPABILITY = 80


@dataclass(frozen=True)
class Outcome:
    """What a call left. output (B, S, N, D) as values; past is None where past is present."""

    output: Array
    cache: Cache
    past: Cache | None
    prompt_key: Array | None
    stray: dict[str, list[int]]


class Call:
    """Buffers, parameters and plan of one call.

    misalign: bytes by which cache rows are moved off a 256-byte boundary; activation_misalign the same for activations.
    """

    def __init__(
        self,
        device: Device,
        case: KernelCase,
        inputs: Inputs,
        past: Cache,
        present: Cache | None = None,
        *,
        misalign: int = 0,
        activation_misalign: int = 0,
    ) -> None:
        if case.half == "bfloat16" and device.compute_capability < BFLOAT16_CAPABILITY:
            pytest.skip(f"no bfloat16 for compute capability {device.compute_capability}")
        self.device, self.case = device, case
        self.buffers: dict[str, Buffer] = {}
        self._misalign, self._activation_misalign = misalign, activation_misalign
        self.params = self._shapes(past, present)
        self._add_inputs(inputs)
        self._add_cache(past, present)
        multiprocessors = case.multiprocessors or device.multiprocessors
        self.make_plan(multiprocessors)

    def make_plan(self, multiprocessors: int) -> None:
        """Plan of the parameters as they are, its scratch poisoned, and its counters zero."""
        clusters = self.device.clusters if self.case.clusters else ()
        capability = self.device.compute_capability
        self.plan: GqaPlan = self.device.make_plan(self.params, multiprocessors, capability, clusters)
        for name in ("workspace", "counters"):
            if name in self.buffers:
                self.buffers[name].close()
        scratch = np.full(self.plan.workspace_bytes, WORKSPACE_POISON, np.uint8)
        self.device.bind_workspace(self.plan, self._put("workspace", scratch), self.params)
        self.params.counters = self._put("counters", np.zeros(self.plan.counters, np.uint32))

    def _shapes(self, past: Cache, present: Cache | None) -> GqaParams:
        case, dtype = self.case, self.case.dtype
        assert dtype is not None
        return GqaParams(
            batch_size=case.batch, sequence_length=case.seq, num_heads=case.heads, kv_num_heads=case.kv_heads,
            group_size=case.heads // case.kv_heads, head_size=case.head_size,
            row_bytes=kv.row_bytes(dtype, case.head_size), capacity=(past if present is None else present).capacity,
            past_capacity=past.capacity, is_prompt=case.prompt, format=FORMATS[dtype],
            activation=int(case.half == "bfloat16"), rotary_interleaved=case.rotary == "interleaved",
            scale=case.scale or case.head_size**-0.5, softcap=case.softcap, local_window_size=case.window_argument,
            smooth_softmax=case.smooth,
        )  # fmt: skip

    def _put(self, name: str, array: Array, misalign: int = 0) -> int:
        self.buffers[name] = Buffer(self.device, array, misalign)
        return self.buffers[name].address

    def _put_activation(self, name: str, array: Array) -> int:
        return self._put(name, to_bits(array, self.case.half), self._activation_misalign)

    def _add_inputs(self, inputs: Inputs) -> None:
        p, case = self.params, self.case
        width, kv_width = case.heads * case.head_size, case.kv_heads * case.head_size
        p.query = self._put_activation("query", inputs.query)
        if inputs.key is None or inputs.value is None:
            p.query_stride = p.kv_stride = width + 2 * kv_width
            p.key, p.value = p.query + 2 * width, p.query + 2 * (width + kv_width)
        else:
            p.query_stride, p.kv_stride = width, kv_width
            p.key, p.value = self._put_activation("key", inputs.key), self._put_activation("value", inputs.value)
        p.seqlens_k = self._put("seqlens_k", inputs.seqlens_k.reshape(-1))
        if inputs.cos_cache is not None and inputs.sin_cache is not None:
            p.cos_cache = self._put_activation("cos_cache", inputs.cos_cache)
            p.sin_cache = self._put_activation("sin_cache", inputs.sin_cache)
            p.rotary_dim, p.rotary_rows = 2 * inputs.cos_cache.shape[1], inputs.cos_cache.shape[0]
        if inputs.head_sink is not None:
            p.head_sink = self._put_activation("head_sink", inputs.head_sink)
        poison = np.full((case.batch, case.seq, case.heads, case.head_size), OUTPUT_POISON, np.float32)
        p.output = self._put_activation("output", poison)

    def _add_cache(self, past: Cache, present: Cache | None) -> None:
        for side, letter, granularity in (
            (self.params.k, "k", self.case.k_quant),
            (self.params.v, "v", self.case.v_quant),
        ):
            self._add_side(side, letter, granularity, past, present)

    def _add_side(
        self, side: KvSide, letter: str, granularity: Granularity, past: Cache, present: Cache | None
    ) -> None:
        rows, scale = _side(past, letter)
        side.mode = MODES[granularity]
        side.codes = self._put(f"{letter}_past", rows.view(np.uint8), self._misalign)
        per_token = granularity is Granularity.PER_TOKEN
        scale_address = self._put(f"{letter}_scale", scale)
        if not per_token:
            side.static_scale = scale_address
        else:
            side.token_scale, side.token_scale_is_half = scale_address, scale.dtype == np.float16
        if present is not None:
            rows, scale = _side(present, letter)
            side.past_codes, side.codes = (
                side.codes,
                self._put(f"{letter}_present", rows.view(np.uint8), self._misalign),
            )
            if per_token:
                side.past_token_scale = side.token_scale
                side.token_scale = self._put(f"{letter}_present_scale", scale)

    def launch(self, kernel: Kernel = "gqa") -> None:
        """Enqueues one launcher."""
        self.device.launch(kernel, self.params, self.plan)

    def outcome(self) -> Outcome:
        """Reads everything back."""
        read = {name: buffer.read() for name, buffer in self.buffers.items()}
        arrays, stray = {k: v[0] for k, v in read.items()}, {k: v[1] for k, v in read.items() if v[1]}
        assert not arrays["counters"].any(), "the counters of the splits are not zero again"
        case, separate = self.case, "k_present" in arrays
        shape = (case.batch, case.kv_heads, case.seq, case.head_size)
        prompt_key = None
        if case.prompt and case.rotary != "none":
            start = self.plan.prompt_key_offset
            bits = arrays["workspace"][start : start + 2 * int(np.prod(shape))]
            stored = bits.view(np.uint16 if case.half == "bfloat16" else np.float16)
            prompt_key = from_bits(stored.reshape(shape), case.half)
        before = _cache(arrays, "past", "scale")
        after = _cache(arrays, "present", "present_scale") if separate else before
        # Static scales have no present of their own.
        after = Cache(
            after.key, after.value,
            before.k_scale if after.k_scale is None else after.k_scale,
            before.v_scale if after.v_scale is None else after.v_scale,
        )  # fmt: skip
        output = from_bits(arrays["output"], case.half)
        return Outcome(output, after, before if separate else None, prompt_key, stray)

    def close(self) -> None:
        """Frees all memory."""
        for buffer in self.buffers.values():
            buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _side(cache: Cache, letter: str) -> tuple[Array, Array]:
    rows, scale = (cache.key, cache.k_scale) if letter == "k" else (cache.value, cache.v_scale)
    assert scale is not None
    return rows, scale


def _cache(arrays: dict[str, Array], rows: str, scale: str) -> Cache:
    return Cache(arrays[f"k_{rows}"], arrays[f"v_{rows}"], arrays.get(f"k_{scale}"), arrays.get(f"v_{scale}"))
