"""The unquantized operator: right, and with the bits of the unpatched release.

KVQ_STOCK_PYTHON is the interpreter of an environment with the stock wheel of the same version, or KVQ_STOCK_SITE a
folder that holds the unpacked wheel. For --provider cuda it must be one that the same compilers built: others round
differently. Both wheels run stock_worker.py in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from python_tests.op.checks import check_cache, check_guards, check_output, first_difference
from python_tests.op.gqa_case import Case, make_inputs, make_past
from python_tests.op.gqa_model import build_model, call
from python_tests.op.providers import FloatName, Provider, selected
from python_tests.reference.step import run_step

STOCK_VERSION = "1.21.0"
WORKER = Path(__file__).with_name("stock_worker.py")
ACTIVATIONS = selected().activations
# The worker has no type that NumPy has not.
COMPARED = [name for name in ACTIVATIONS if name != "bfloat16"]
FEATURES: dict[str, dict[str, Any]] = {
    "step": {},
    "ragged": {"totals": (5, 30, 64), "total": 64},
    "long": {"totals": (1500,), "capacity": 1600},
    "mha": {"heads": 4, "kv_heads": 4},
    "mqa-group7": {"heads": 7, "kv_heads": 1},
    "head-size-80": {"head_size": 80},
    "head-size-256": {"head_size": 256},
    "rotary": {"rotary": "half"},
    "rotary-interleaved": {"rotary": "interleaved"},
    "rotary-part": {"rotary": "half", "rotary_dim": 32},
    "window": {"window": 7},
    "softcap": {"softcap": 2.0},
    "smooth": {"smooth": True},
    "scale": {"scale": 0.3},
    "packed": {"packed": True, "rotary": "half"},
    "prompt": {"seq": 13, "totals": (13, 13), "total": 13},
    "prompt-long": {"seq": 150, "totals": (150,), "total": 150, "capacity": 160, "rotary": "half"},
    "prompt-window": {"seq": 13, "totals": (13,), "total": 13, "window": 4, "rotary": "half"},
    "chunk": {"seq": 5, "totals": (20,), "total": 20},
    "chunk-all": {
        "seq": 5, "totals": (20,), "total": 20, "rotary": "interleaved", "window": 6, "softcap": 1.5, "smooth": True,
    },
}  # fmt: skip


def case_of(feature: str, activation: FloatName) -> Case:
    """A case without quantization."""
    base: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_size": 64, "capacity": 64, "totals": (21, 21)}
    return Case(
        id=f"plain-{feature}-{activation}", dtype=None, activation=activation, **(base | FEATURES[feature])
    )  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("feature", list(FEATURES))
def test_against_the_reference(feature: str, activation: FloatName, provider: Provider) -> None:
    """Also a test of the reference: it follows this release where no quantization is involved."""
    case = case_of(feature, activation)
    inputs, past = make_inputs(case), make_past(case)
    outcome = call(case, inputs, past, None, provider)
    expected = run_step(case.operator, inputs, past)
    check_guards(outcome)
    check_output(outcome.output, expected)
    if case.rotary == "none":
        check_cache(case, outcome.cache, expected)


def save(folder: Path, case: Case) -> None:
    """The case's model and tensors as stock_worker.py reads them."""
    inputs, past = make_inputs(case), make_past(case)
    prefix = "state:" if case.in_place else ""
    shape = (case.batch, case.seq, case.heads * case.head_size)
    first: dict[str, Any] = {"first:output": np.full(shape, 77, case.activation_type)}
    if not case.in_place:
        # Ones, so that rows that the call does not write compare equal.
        present = (case.batch, case.kv_heads, case.present_capacity, case.head_size)
        first |= {f"first:present_{n}": np.ones(present, case.activation_type) for n in ("key", "value")}
    tensors: dict[str, Any] = {
        "query": inputs.query, "key": inputs.key, "value": inputs.value, "seqlens_k": inputs.seqlens_k,
        "total_sequence_length": np.array([inputs.total_sequence_length], np.int32),
        "cos_cache": inputs.cos_cache, "sin_cache": inputs.sin_cache,
        f"{prefix}past_key": past.key, f"{prefix}past_value": past.value, **first,
    }  # fmt: skip
    (folder / f"{case.id}.onnx").write_bytes(build_model(case))
    np.savez(folder / f"{case.id}.npz", **{k: v for k, v in tensors.items() if v is not None})


def comparison_case(feature: str, activation: FloatName, in_place: bool) -> Case:
    """The case of one comparison with the stock wheel."""
    case = replace(case_of(feature, activation), in_place=in_place)
    case = replace(case, id=f"{case.id}-{'in-place' if in_place else 'separate'}")
    # Stock appends to the P rows of a separate past; its present has no room to spare.
    return case if in_place or case.prompt else replace(case, capacity=case.host_total)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Path:
    """A folder with the results of every case, from this interpreter's wheel and from the stock one."""
    python, site = os.environ.get("KVQ_STOCK_PYTHON"), os.environ.get("KVQ_STOCK_SITE")
    if not python and not site:
        pytest.skip("KVQ_STOCK_PYTHON is not set: no stock wheel to compare with")
    folder = tmp_path_factory.mktemp("stock")
    for feature, activation, in_place in product(FEATURES, COMPARED, (True, False)):
        save(folder, comparison_case(feature, activation, in_place))
    paths = {"stock": site or "", "patched": os.environ.get("PYTHONPATH", "")}
    for label, interpreter in (("stock", python or sys.executable), ("patched", sys.executable)):
        command = [interpreter, "-P", str(WORKER), str(folder), label, provider.name, provider.device]
        env = {**os.environ, "PYTHONPATH": paths[label]}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=env)
        assert done.returncode == 0, f"{label}: {done.stderr[-2000:]}"
    return folder


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "separate"])
@pytest.mark.parametrize("activation", COMPARED)
@pytest.mark.parametrize("feature", list(FEATURES))
def test_bits_of_the_stock_wheel(feature: str, activation: FloatName, in_place: bool, saved: Path) -> None:
    """Output and cache equal the stock wheel's bit for bit."""
    case = comparison_case(feature, activation, in_place)
    with np.load(saved / f"{case.id}.stock.npz") as theirs, np.load(saved / f"{case.id}.patched.npz") as ours:
        # A build of our own of the unpatched operator has a local version, and another patch set in its information.
        assert str(theirs["version"]).partition("+")[0] == STOCK_VERSION
        assert str(theirs["build"]) != str(ours["build"])
        assert set(ours.files) == set(theirs.files) == {"version", "build", "output", "present_key", "present_value"}
        for name in ("output", "present_key", "present_value"):
            left, right = ours[name], theirs[name]
            bits = f"u{right.dtype.itemsize}"
            same = np.asarray(left.view(bits) == right.view(bits))
            assert same.all(), f"{name}: {first_difference(left, right, same)}"
