"""The structs of params.h and plan.h as ctypes sees them, and the host side of the library: plans and layouts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from python_tests.reference.format import CacheDtype, Granularity

FORMATS = {CacheDtype.INT8: 0, CacheDtype.FP8: 1, CacheDtype.INT4: 2}
MODES = {Granularity.NONE: 0, Granularity.PER_TENSOR: 1, Granularity.PER_CHANNEL: 2, Granularity.PER_TOKEN: 3}
DECODE, PREFILL, PROMPT = range(3)
Merge: TypeAlias = Literal["one-split", "begins-last", "cluster", "merge-kernel"]
_P, _I32, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t


class KvSide(ctypes.Structure):
    """K or V of the cache."""

    _fields_: ClassVar[Any] = [
        ("mode", _I32),
        ("token_scale_is_half", ctypes.c_bool),
        ("codes", _P),
        ("token_scale", _P),
        ("static_scale", _P),
        ("past_codes", _P),
        ("past_token_scale", _P),
    ]


class GqaParams(ctypes.Structure):
    """One call."""

    _fields_: ClassVar[Any] = [
        *((name, _I32) for name in ("batch_size", "sequence_length", "num_heads", "kv_num_heads", "group_size")),
        *((name, _I32) for name in ("head_size", "row_bytes")),
        *((name, _I64) for name in ("capacity", "past_capacity")),
        ("is_prompt", ctypes.c_bool),
        *((name, _I32) for name in ("format", "activation")),
        *((name, _P) for name in ("query", "key", "value")),
        *((name, _I64) for name in ("query_stride", "kv_stride")),
        *((name, _P) for name in ("seqlens_k", "cos_cache", "sin_cache")),
        ("rotary_dim", _I32),
        ("rotary_rows", _I64),
        ("rotary_interleaved", ctypes.c_bool),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("local_window_size", _I32),
        ("head_sink", _P),
        ("smooth_softmax", ctypes.c_bool),
        ("k", KvSide),
        ("v", KvSide),
        *((name, _P) for name in ("output", "prompt_key", "partial_out", "partial_stats", "counters")),
    ]


class GqaPlan(ctypes.Structure):
    """Which kernels serve a call, and its scratch."""

    _fields_: ClassVar[Any] = [
        ("path", _I32),
        ("padded_head_size", _I32),
        ("whole_rows", ctypes.c_bool),
        *((name, _I32) for name in ("warps", "unit_rows", "units_per_head", "splits", "cluster", "counters")),
        ("activation_vectors", ctypes.c_bool),
        *((name, _SIZE) for name in ("prompt_key_offset", "partial_out_offset", "partial_stats_offset")),
        ("workspace_bytes", _SIZE),
    ]

    @property
    def merge(self) -> Merge:
        """What adds the splits of a unit; "one-split": there is nothing to add."""
        if self.splits == 1:
            return "one-split"
        return "cluster" if self.cluster > 1 else "begins-last" if self.counters else "merge-kernel"


class HostLibrary:
    """What needs no device."""

    def __init__(self, path: Path) -> None:
        self.handle = ctypes.CDLL(str(path))
        self.handle.kvq_field.restype = ctypes.c_char_p
        self.handle.kvq_path_name.restype = ctypes.c_char_p
        check_layout(self)

    def fields(self) -> dict[str, tuple[int, int]]:
        """Offset and size of every field, as the C++ compiler laid them out."""
        found: dict[str, tuple[int, int]] = {}
        offset, size = _SIZE(), _SIZE()
        while name := self.handle.kvq_field(len(found), ctypes.byref(offset), ctypes.byref(size)):
            found[name.decode()] = (offset.value, size.value)
        return found

    def make_plan(
        self, params: GqaParams, multiprocessors: int, compute_capability: int, clusters: Sequence[int] = ()
    ) -> GqaPlan:
        """Raises ValueError with MakePlan's text where no kernel serves the call.

        clusters: [n] clusters of n blocks run at once, one block a multiprocessor; empty: the device has no clusters.
        """
        plan, text = GqaPlan(), ctypes.create_string_buffer(512)
        limits = (_I32 * (self.handle.kvq_max_cluster() + 1))(*clusters)
        made = self.handle.kvq_make_plan(
            ctypes.byref(params), multiprocessors, compute_capability, limits, ctypes.byref(plan), text,
            _SIZE(len(text)),
        )  # fmt: skip
        if not made:
            raise ValueError(text.value.decode())
        return plan

    def bind_workspace(self, plan: GqaPlan, workspace: int, params: GqaParams) -> None:
        """Points the parameters at their parts of the workspace."""
        self.handle.kvq_bind_workspace(ctypes.byref(plan), _P(workspace), ctypes.byref(params))

    def path_name(self, plan: GqaPlan) -> str:
        """As it appears in the debug output of the operator."""
        return str(self.handle.kvq_path_name(ctypes.byref(plan)).decode())


def mirrored_fields() -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of every struct and field above."""
    for struct in (KvSide, GqaParams, GqaPlan):
        yield struct.__name__, 0, ctypes.sizeof(struct)
        for name, *_ in struct._fields_:
            field = getattr(struct, name)
            yield f"{struct.__name__}.{name}", field.offset, field.size


def check_layout(library: HostLibrary) -> None:
    """The structs of the library and of this file must agree in every field."""
    mirror = {name: (offset, size) for name, offset, size in mirrored_fields()}
    actual = library.fields()
    differing = sorted(name for name in mirror.keys() | actual.keys() if mirror.get(name) != actual.get(name))
    assert not differing, f"python_tests/kernel/params.py does not mirror params.h and plan.h: {', '.join(differing)}"
