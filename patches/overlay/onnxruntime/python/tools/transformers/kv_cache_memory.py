# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
"""Memory of a device as OrtValues of bytes: allocated once at the size asked for, copied and cut where it lies.

OrtValue.ortvalue_from_shape_and_type takes CUDA memory from an arena that doubles and is never given back: a cache of
9 GB would take 16. Here a session of one node allocates, whose provider extends by what is requested and which gives
everything back with the object. The CPU runs the same sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

U8 = NDArray[np.uint8]
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_TOKEN_AXIS = 2


class DeviceError(ValueError):
    """A device that this installation does not have."""


def session_provider(device: str, device_id: int = 0, **options: object) -> tuple[str, dict[str, str]]:
    """An entry for InferenceSession's list of providers. CUDA memory is extended by what is requested.

    Raises DeviceError for a device without a provider here.
    """
    if device not in PROVIDERS:
        msg = f"device {device!r}: must be one of {', '.join(PROVIDERS)}"
        raise DeviceError(msg)
    if PROVIDERS[device] not in ort.get_available_providers():
        msg = (
            f"device {device!r}: this onnxruntime has no {PROVIDERS[device]}; install the wheel built with --cuda-home"
        )
        raise DeviceError(msg)
    where = {} if device == "cpu" else {"device_id": device_id, "arena_extend_strategy": "kSameAsRequested"}
    return PROVIDERS[device], {name: str(value) for name, value in {**where, **options}.items()}


class DeviceMemory:
    """Byte tensors on one device. device: "cpu" or "cuda". Raises DeviceError where there is no provider for it."""

    def __init__(self, device: str = "cpu", device_id: int = 0) -> None:
        self.provider = session_provider(device, device_id)
        self.device, self.device_id = device, device_id
        self._sessions: dict[str, ort.InferenceSession] = {}

    def zeros(self, shape: Sequence[int]) -> ort.OrtValue:
        """A new uint8 tensor of zeros."""
        io = self._session("zeros", _zeros_model).io_binding()
        io.bind_cpu_input("shape", np.array(shape, np.int64))
        io.bind_output("out", self.device, self.device_id)
        self._sessions["zeros"].run_with_iobinding(io)
        return io.get_outputs()[0]

    def copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        """Overwrite a tensor of the same shape with another one on the device."""
        io = self._session("copy", _copy_model).io_binding()
        io.bind_ortvalue_input("x", source)
        self._run_into(target, "copy", io)

    def read_rows(self, source: ort.OrtValue, rows: int) -> U8:
        """The first rows of axis 2, on the host: (B, Hkv, C, bytes) -> (B, Hkv, rows, bytes). Only they travel."""
        io = self._session("rows", _rows_model).io_binding()
        io.bind_ortvalue_input("x", source)
        io.bind_cpu_input("rows", np.array([rows], np.int64))
        io.bind_output("out", "cpu")
        self._sessions["rows"].run_with_iobinding(io)
        return np.asarray(io.copy_outputs_to_cpu()[0], np.uint8)

    def write_rows(self, target: ort.OrtValue, rows: U8) -> None:
        """Put rows (B, Hkv, n, bytes) at the start of axis 2 of the target; the rest becomes 0. Its address stays."""
        rest = list(target.shape())
        rest[_TOKEN_AXIS] -= rows.shape[_TOKEN_AXIS]
        io = self._session("fill", _fill_model).io_binding()
        io.bind_cpu_input("rows", np.ascontiguousarray(rows))
        io.bind_cpu_input("rest", np.array(rest, np.int64))
        self._run_into(target, "fill", io)

    def _run_into(self, target: ort.OrtValue, name: str, io: ort.IOBinding) -> None:
        io.bind_output("out", self.device, self.device_id, np.uint8, target.shape(), target.data_ptr())
        self._sessions[name].run_with_iobinding(io)

    def _session(self, name: str, build: Callable[[], bytes]) -> ort.InferenceSession:
        if name not in self._sessions:
            options = ort.SessionOptions()
            options.log_severity_level = 3
            options.intra_op_num_threads = 1
            self._sessions[name] = ort.InferenceSession(build(), options, providers=[self.provider])
        return self._sessions[name]


def _bytes(name: str, rank: int = 4) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.UINT8, [f"{name}{i}" for i in range(rank)])


def _numbers(name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, [f"{name}_length"])


def _model(
    nodes: list[NodeProto], inputs: list[ValueInfoProto], constants: Sequence[TensorProto] = (), rank: int = 4
) -> bytes:
    graph = helper.make_graph(nodes, "memory", inputs, [_bytes("out", rank)], constants)
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    )


def _constant(name: str, value: int) -> TensorProto:
    return numpy_helper.from_array(np.array([value], np.int64), name)


def _zero_node(shape: str, output: str) -> NodeProto:
    value = helper.make_tensor("value", TensorProto.UINT8, [1], [0])
    return helper.make_node("ConstantOfShape", [shape], [output], value=value)


def _zeros_model() -> bytes:
    return _model([_zero_node("shape", "out")], [_numbers("shape")])


def _copy_model() -> bytes:
    return _model([helper.make_node("Identity", ["x"], ["out"])], [_bytes("x")])


def _rows_model() -> bytes:
    cut = helper.make_node("Slice", ["x", "start", "rows", "axis"], ["out"])
    return _model([cut], [_bytes("x"), _numbers("rows")], [_constant("start", 0), _constant("axis", _TOKEN_AXIS)])


def _fill_model() -> bytes:
    join = helper.make_node("Concat", ["rows", "zeros"], ["out"], axis=_TOKEN_AXIS)
    return _model([_zero_node("rest", "zeros"), join], [_bytes("rows"), _numbers("rest")])
