"""One wheel's side of the CPU decode benchmark: measures what it is told to, line by line.

Started by bench_cpu_decode.py with the interpreter of the wheel, which needs onnxruntime and NumPy only. Each request
on stdin is a JSON object, each answer one JSON line on stdout.
  {"load": key, "model": path, "setup": [activation, cache, mode], "tokens": n}
                               -> {"version", "build_info", "bytes"} or {"unsupported": reason}
  {"measure": key, "runs": n}  -> {"ms": [...]}, after two runs that do not count
  {"save": key, "path": path}  -> {}, the output of the last run in path (.npy)
  {"unload": key}              -> {}
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import onnxruntime as ort

from python_tests.bench.cpu_case import Setup, state_bytes, tensors

IN_PLACE = {
    "past_key": "present_key",
    "past_value": "present_value",
    "k_scale": "present_k_scale",
    "v_scale": "present_v_scale",
}


class Loaded:
    """A session with everything bound; the cache in place."""

    def __init__(self, model: str, setup: Setup, tokens: int, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        self.arrays = tensors(setup, tokens)
        outputs = {o.name for o in self.session.get_outputs()}
        for name, array in self.arrays.items():
            fp8 = setup.cache == "fp8" and name.startswith("past_")
            where = (17 if fp8 else array.dtype.type, list(array.shape), array.ctypes.data)
            self.binding.bind_input(name, "cpu", 0, *where)
            if IN_PLACE.get(name) in outputs:
                self.binding.bind_output(IN_PLACE[name], "cpu", 0, *where)
        self.output = np.zeros_like(self.arrays["query"])
        where = (self.output.dtype.type, list(self.output.shape), self.output.ctypes.data)
        self.binding.bind_output("output", "cpu", 0, *where)

    def measure(self, runs: int) -> list[float]:
        """Milliseconds of each run, after two that warm the caches and the thread pool up."""
        times = []
        for _ in range(runs + 2):
            start = time.perf_counter()
            self.session.run_with_iobinding(self.binding)
            times.append((time.perf_counter() - start) * 1e3)
        return times[2:]


def wheel_version() -> str:
    """The wheel's version with its local part, which onnxruntime itself does not know."""
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(ort.__version__)


def load(request: dict[str, Any], threads: int, loaded: dict[str, Loaded]) -> dict[str, Any]:
    """Answer a load request. A wheel without the feature says so with an error type of its own release."""
    about = {"version": wheel_version(), "build_info": ort.get_build_info()}
    try:
        entry = Loaded(request["model"], Setup(*request["setup"]), request["tokens"], threads)
    except Exception as error:
        return about | {"unsupported": str(error)[:200]}
    loaded[request["load"]] = entry
    return about | {"bytes": state_bytes(entry.arrays)}


def serve(threads: int) -> None:
    """Answer requests until stdin ends."""
    loaded: dict[str, Loaded] = {}
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {}
        if "load" in request:
            answer = load(request, threads, loaded)
        elif "measure" in request:
            answer = {"ms": loaded[request["measure"]].measure(request["runs"])}
        elif "save" in request:
            np.save(request["path"], loaded[request["save"]].output)
        else:
            del loaded[request["unload"]]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
