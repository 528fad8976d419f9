"""Runs saved models on saved inputs with the onnxruntime of whatever interpreter starts this file.

Usage: PYTHON stock_worker.py FOLDER LABEL. It imports nothing of this repository, since a stock environment has
onnxruntime and NumPy only. For every NAME.onnx in FOLDER it reads NAME.npz and writes NAME.LABEL.npz with all outputs
and the version. Inputs whose name starts with "state:" are bound as past and present in one buffer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

STATE = {"past_key": "present_key", "past_value": "present_value"}


def run_saved(model: Path, label: str) -> None:
    """Run one model once with two threads and save its outputs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    binding, values, bound = session.io_binding(), {}, set()
    with np.load(model.with_suffix(".npz")) as archive:
        for name in archive.files:
            tensor = name.removeprefix("state:")
            values[tensor] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(archive[name]))
            binding.bind_ortvalue_input(tensor, values[tensor])
            if name != tensor:
                binding.bind_ortvalue_output(STATE[tensor], values[tensor])
                bound.add(STATE[tensor])
    names = [output.name for output in session.get_outputs()]
    for name in names:
        if name not in bound:
            binding.bind_output(name)
    session.run_with_iobinding(binding)
    # Outputs come back in the order in which they were bound.
    order = [n for n in STATE.values() if n in bound] + [n for n in names if n not in bound]
    results = {name: value.numpy() for name, value in zip(order, binding.get_outputs(), strict=True)}
    np.savez(model.with_suffix(f".{label}.npz"), version=np.array(ort.__version__), **results)


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
        run_saved(path, sys.argv[2])
