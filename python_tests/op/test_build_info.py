"""The wheel says what it is, so that tests and users need not guess from version numbers."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions
from pathlib import Path

import onnxruntime as ort


def installed() -> Distribution:
    """The distribution that the imported package belongs to: its name differs between CPU and CUDA wheels."""
    package = Path(ort.__file__).resolve()
    found = [d for d in distributions() if Path(str(d.locate_file("onnxruntime/__init__.py"))).resolve() == package]
    wheels = [d for d in found if re.fullmatch(r"onnxruntime(-\w+)*", d.metadata["Name"])]
    assert len(wheels) == 1, [d.metadata["Name"] for d in wheels]
    return wheels[0]


def test_build_info_names_the_patch_set() -> None:
    """Quantized cache types and the digest of the patch set, once each."""
    info = ort.get_build_info()
    assert re.findall(r"kv-cache-quant=([^\s;]*[^\s;,])", info) == ["int8,float8e4m3fn,int4"], info
    assert len(re.findall(r"kv-patchset=[0-9a-f]{12}(?![0-9a-f])", info)) == 1, info


def test_version_has_the_local_part() -> None:
    """The wheel's version is the base's with +kvq.<n>."""
    assert re.fullmatch(r"1\.21\.0\+kvq\.[1-9]\d*", installed().version)
