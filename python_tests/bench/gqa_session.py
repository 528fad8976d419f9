"""A session of the benchmark with everything bound: caches in place, activations shared by the layers."""

from __future__ import annotations

import time

import onnxruntime as ort

from python_tests.bench.gqa_case import PRESENT, Case, Tensor
from python_tests.bench.gqa_expected import Checker, ReadState
from python_tests.bench.gqa_memory import (
    Allocator,
    activation_values,
    as_stored,
    from_stored,
    state_kind,
)
from python_tests.bench.gqa_timing import ReplayTimer
from python_tests.op.cuda_runtime import DeviceMemory, Stream, memory_info, synchronize
from python_tests.op.host_memory import Memory
from python_tests.reference.format import U8

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class Target:
    """The provider of this process's wheel, its memory, and on a GPU the stream that everything runs on."""

    def __init__(self, provider: str, threads: int) -> None:
        self.provider, self.threads = provider, threads
        if provider == "cuda" and hasattr(ort, "preload_dlls"):
            # Finds CUDA's libraries in packages beside the wheel; a search path of the environment serves as well.
            ort.preload_dlls()
        self.stream = Stream() if provider == "cuda" else None
        self.allocator = Allocator(provider, self.stream)

    def used_bytes(self) -> int:
        """Device memory in use by anyone; -1 on a CPU."""
        if self.stream is None:
            return -1
        free, total = memory_info()
        return total - free

    def settle(self) -> None:
        """Wait for the device."""
        if self.stream is not None:
            synchronize()


class Loaded:
    """A case as a session that has run, in a graph on a GPU."""

    def __init__(self, target: Target, model: str, case: Case, layers: int) -> None:
        self.target, self.case, self.layers = target, case, layers
        self.values = activation_values(case)
        self.states = [self._layer_state(layer) for layer in range(layers)]
        self.shared = {name: self._shared_memory(name) for name in case.shared_inputs()}
        # The first and the last layer have outputs of their own; those between them share one.
        self.outputs = [target.allocator.make(case.output.nbytes) for _ in range(min(layers, 3))]
        target.allocator.settle()
        before = target.used_bytes()
        self.session = self._make_session(model)
        self.binding = self.session.io_binding()
        self._bind_all()
        self.options = ort.RunOptions()
        if target.provider == "cuda":
            self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        # Two plain runs and the capture come first where a graph is asked for.
        for _ in range(4 if target.provider == "cuda" else 1):
            self.run()
        target.settle()
        self.session_bytes = target.used_bytes() - before if before >= 0 else -1
        self.timer = ReplayTimer(target.stream, self.run) if target.stream is not None else None

    def _make_session(self, model: str) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self.target.threads
        settings: dict[str, str] = {}
        if self.target.stream is not None:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            settings = {
                "user_compute_stream": str(self.target.stream.handle), "enable_cuda_graph": "1",
                "arena_extend_strategy": "kSameAsRequested",
            }  # fmt: skip
        name = PROVIDERS[self.target.provider]
        if name not in ort.get_available_providers():
            msg = f"this wheel has no {name}"
            raise RuntimeError(msg)
        session = ort.InferenceSession(model, options, providers=[(name, settings)])
        if name not in session.get_providers():
            msg = f"{name} could not be loaded"
            raise RuntimeError(msg)
        return session

    def _layer_state(self, layer: int) -> dict[str, Memory]:
        state: dict[str, Memory] = {}
        for number, (name, tensor) in enumerate(self.case.state().items()):
            state[name] = self.target.allocator.make(tensor.nbytes)
            kind, top = state_kind(self.case, name)
            self.target.allocator.fill(state[name], tensor.nbytes, kind, top, 4 * layer + number)
        return state

    def _bind(self, name: str, tensor: Tensor, memory: Memory, *, output: bool = False, host: bool = False) -> None:
        bind = self.binding.bind_output if output else self.binding.bind_input
        where = "cpu" if host else self.target.provider
        bind(name, where, 0, tensor.element, list(tensor.shape), memory.pointer)

    def _shared_memory(self, name: str) -> Memory:
        """An input of all layers with its values; the host reads total_sequence_length."""
        values = self.values[name]
        stored = as_stored(values, self.case.activation) if name in self.case.activations() else values
        allocator = Allocator("cpu", None) if name == "total_sequence_length" else self.target.allocator
        return allocator.holding(stored)

    def _bind_all(self) -> None:
        for name, tensor in self.case.shared_inputs().items():
            self._bind(name, tensor, self.shared[name], host=name == "total_sequence_length")
        for layer, state in enumerate(self.states):
            number = 0 if layer == 0 else -1 if layer == self.layers - 1 else 1
            self._bind(f"output_{layer}", self.case.output, self.outputs[number], output=True)
            for name, memory in state.items():
                self._bind(f"{name}_{layer}", self.case.state()[name], memory)
                self._bind(f"{PRESENT[name]}_{layer}", self.case.state()[name], memory, output=True)

    def run(self) -> None:
        """One step of all layers."""
        self.session.run_with_iobinding(self.binding, self.options)

    def check(self) -> tuple[float, str]:
        """Largest error of the first and the last layer, and what is wrong, if anything."""
        shape = (self.case.batch, self.case.seq, self.case.model.heads, self.case.model.head_size)
        largest = 0.0
        for layer in dict.fromkeys((0, self.layers - 1)):
            output = from_stored(
                self.outputs[0 if layer == 0 else -1].read(0, self.case.output.nbytes), self.case.activation
            )
            errors = Checker(self.case, self.values, self._reader(layer)).errors(output.reshape(shape), layer > 0)
            if fault := errors.fault(self.case):
                return errors.output, f"{fault} (layer {layer})"
            largest = max(largest, errors.output)
        return largest, ""

    def _reader(self, layer: int) -> ReadState:
        def read(name: str, offset: int, size: int) -> U8:
            return self.states[layer][name].read(offset, size)

        return read

    def microseconds(self, count: int) -> tuple[list[float], int]:
        """Time of a layer in each of `count` runs, and how many of them include the host's wait for the device."""
        if self.timer is not None:
            late = self.timer.late
            times = [1e3 * self.timer.milliseconds() / self.layers for _ in range(count)]
            return times, self.timer.late - late
        times = []
        for turn in range(count + 2):
            begin = time.perf_counter()
            self.run()
            if turn >= 2:
                times.append(1e6 * (time.perf_counter() - begin) / self.layers)
        return times, 0

    def close(self) -> None:
        """Give everything back."""
        if self.timer is not None:
            self.timer.close()
        del self.binding, self.session
        kept = [memory for state in self.states for memory in state.values()]
        for memory in [*kept, *self.shared.values(), *self.outputs]:
            if isinstance(memory, DeviceMemory):
                memory.free()
