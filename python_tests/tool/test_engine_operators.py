"""Registrations of CUDA's contrib operators, which upstream's reduction leaves alone."""

from __future__ import annotations

import pytest

from kvbuild import operators
from kvbuild.errors import SourceError
from python_tests.tool.engine import REPO

KEPT = {"ai.onnx": {"LayerNormalization"}, "com.microsoft": {"Gelu", "GroupQueryAttention"}}
SOURCE = """\
class CUDA_MS_OP_CLASS_NAME(1, Crop);
      BuildKernelCreateInfo<void>,  // default entry
      BuildKernelCreateInfo<CUDA_MS_OP_TYPED_CLASS_NAME(1, float, Gelu)>,
      BuildKernelCreateInfo<CUDA_MS_OP_TYPED_CLASS_NAME(1, float, FastGelu)>,
      BuildKernelCreateInfo<CUDA_ONNX_OP_VERSIONED_TYPED_CLASS_NAME(1, 16, float_float_float, LayerNormalization)>,
      BuildKernelCreateInfo<CUDA_ONNX_OP_TYPED_CLASS_NAME(1, float, Crop)>,
      BuildKernelCreateInfo<CUDA_MS_OP_CLASS_NAME(1, LayerNormalization)>,  // of another domain
"""


def test_registrations_of_other_operators_become_comments() -> None:
    kept = [line for line in operators.without_registrations(SOURCE, KEPT).splitlines() if not line.startswith("//")]
    expected = SOURCE.splitlines()
    assert kept == [expected[0], expected[1], expected[2], expected[4]]


def test_unknown_form_of_registrations_is_an_error() -> None:
    with pytest.raises(SourceError, match="registers none of the profile's operators"):
        operators.without_registrations(SOURCE.replace("CUDA_MS_OP", "OTHER").replace("CUDA_ONNX_OP", "OTHER"), KEPT)


def test_own_configuration_is_read() -> None:
    kept = operators.read(REPO / "kvbuild" / "data" / "decoder.config")
    assert set(kept) == {"ai.onnx", "com.microsoft"}
    assert "GroupQueryAttention" in kept["com.microsoft"]
    assert {"LayerNormalization", "SimplifiedLayerNormalization"} <= kept["ai.onnx"]
