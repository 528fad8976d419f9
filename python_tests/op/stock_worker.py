"""Runs saved models on saved inputs with the onnxruntime of whatever interpreter starts this file.

Usage: PYTHON stock_worker.py FOLDER LABEL PROVIDER DEVICE. It imports nothing of this repository, since a stock
environment has onnxruntime and NumPy only. For every NAME.onnx in FOLDER it reads NAME.npz and writes NAME.LABEL.npz
with all outputs, the version and the build information. Inputs whose name starts with "state:" are bound as past and
present in one buffer; tensors whose name starts with "first:" are what an output's buffer holds before the call.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

STATE = {"past_key": "present_key", "past_value": "present_value"}


# What the operator reads on the host.
ON_HOST = ("total_sequence_length",)


def run_saved(model: Path, label: str, provider: str, device: str) -> None:
    """Run one model once with two threads and save its outputs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    session = ort.InferenceSession(str(model), options, providers=[provider])
    binding, inputs, outputs = session.io_binding(), {}, {}
    with np.load(model.with_suffix(".npz")) as archive:
        for name in archive.files:
            kind, _, tensor = name.rpartition(":")
            where = "cpu" if tensor in ON_HOST else device
            # On the CPU the value refers to the array's memory: a copy keeps the archive's array as it was.
            value = ort.OrtValue.ortvalue_from_numpy(np.array(archive[name]), where, 0)
            if kind == "first":
                outputs[tensor] = value
                continue
            inputs[tensor] = value
            if kind == "state":
                outputs[STATE[tensor]] = value
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, value)
    session.run_with_iobinding(binding)
    results = {name: value.numpy() for name, value in outputs.items()}
    np.savez(
        model.with_suffix(f".{label}.npz"),
        version=np.array(ort.__version__),
        build=np.array(ort.get_build_info()),
        **results,
    )


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
        run_saved(path, *sys.argv[2:5])
