"""Device memory of a decode step, in a process of its own; prints a line of JSON last.

Usage: python -m python_tests.op.memory_worker FORMAT LAYERS TOKENS LIMIT, where LIMIT is the most bytes that the
session may allocate, 0: any number. The step runs eagerly and then as a replayed graph.
"""

from __future__ import annotations

import json
import sys
from math import prod

import numpy as np
import onnxruntime as ort
from onnx import TensorProto

from python_tests.op.cuda_runtime import DeviceMemory, memory_info, synchronize
from python_tests.op.gqa_model import make_session
from python_tests.op.memory_model import STATE, Decoder
from python_tests.op.providers import CUDA

_HALF, _INT = int(TensorProto.FLOAT16), int(TensorProto.INT32)


class Bound:
    """A binding with memory of its own for every tensor, filled with zeros."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.binding = session.io_binding()
        self._kept: list[DeviceMemory] = []

    def tensor(self, element_type: int, shape: tuple[int, ...], size: int, *, name: str = "", output: str = "") -> None:
        """Allocate `size` bytes an element and bind them as an input, as an output, or as both."""
        memory = DeviceMemory(prod(shape) * size, fill=0)
        self._kept.append(memory)
        for bind, tensor in ((self.binding.bind_input, name), (self.binding.bind_output, output)):
            if tensor:
                bind(tensor, "cuda", 0, element_type, list(shape), memory.pointer)

    def lengths(self, decoder: Decoder) -> None:
        """seqlens_k on the device, the host's total on the CPU: the step that fills the cache."""
        last = DeviceMemory(4)
        last.write(np.array([decoder.tokens - 1], np.int32))
        self._kept.append(last)
        self.binding.bind_input("seqlens_k", "cuda", 0, _INT, [1], last.pointer)
        self.binding.bind_cpu_input("total_sequence_length", np.array([decoder.tokens], np.int32))


def main(decoder: Decoder, limit: int) -> dict[str, int]:
    """Bytes in use: at first, with all tensors bound, and after the step."""
    start = memory_info()[0]
    options: dict[str, object] = {"arena_extend_strategy": "kSameAsRequested", "enable_cuda_graph": 1}
    if limit:
        options["gpu_mem_limit"] = limit
    session = make_session(decoder.model(), CUDA.having(**options))
    bound = Bound(session)
    bound.lengths(decoder)
    bound.tensor(_HALF, (1, 1, decoder.hidden), 2, name="x")
    bound.tensor(_HALF, (1, 1, decoder.hidden), 2, output="y")
    for i in range(decoder.layers):
        for name, shape in decoder.weight_shapes.items():
            bound.tensor(_HALF, shape, 2, name=f"{name}_{i}")
        for name, state in decoder.state_shapes.items():
            kind, size = decoder.element_type(name), decoder.element_size(name)
            bound.tensor(kind, state, size, name=f"{name}_{i}", output=f"{STATE[name]}_{i}")
    synchronize()
    loaded = memory_info()[0]
    for _ in range(3):
        session.run_with_iobinding(bound.binding)
    synchronize()
    free = memory_info()[0]
    return {"bound": start - loaded, "run": loaded - free, "total": start - free}


if __name__ == "__main__":
    wanted = Decoder(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(main(wanted, int(sys.argv[4]))))
