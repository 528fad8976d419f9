"""The CUDA provider of the installed wheel, read from its file: no GPU is needed. A CPU wheel has none."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import onnxruntime as ort
import pytest

from kvbuild import sharedlib


@pytest.fixture(scope="module")
def provider_path() -> Path:
    path = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not path.exists():
        pytest.skip("this wheel has no CUDA provider")
    return path


def test_provider_is_linked_with_one_cuda_release(provider_path: Path) -> None:
    """The runtime's major release is the one that the wheel names."""
    needed = sharedlib.inspect(provider_path).needed
    runtimes = [name for name in needed if name.startswith("libcudart.so")]
    assert runtimes == [f"libcudart.so.{ort.cuda_version.split('.')[0]}"], needed


def test_device_code_is_there_once(provider_path: Path) -> None:
    """Relocatable code would be a second copy, and PTX would exist in that copy alone."""
    assert sharedlib.inspect(provider_path).device_code
    assert b"\0__nv_relfatbin\0" not in provider_path.read_bytes()


def test_no_folder_of_the_build_machine(provider_path: Path) -> None:
    """The provider searches beside itself, then where the loader always does."""
    runpath = sharedlib.inspect(provider_path).runpath
    assert runpath
    assert all(folder.split("/")[0] == "$ORIGIN" for folder in runpath), runpath


def test_preload_knows_the_needed_libraries(provider_path: Path) -> None:
    """preload_dlls loads what the provider needs, by the very names."""
    needed = {name for name in sharedlib.inspect(provider_path).needed if re.match("libcu(?!dnn_)", name)}
    assert needed <= {path[-1] for path in ort._get_nvidia_dll_paths(is_windows=False)}


def test_extras_name_the_packages_of_the_release(provider_path: Path) -> None:
    """The extras cuda and cudnn are those of the CUDA release that the provider is linked with."""
    required = requires("onnxruntime-gpu") or []
    major = ort.cuda_version.split(".")[0]
    for extra, package in (("cuda", "nvidia-cuda-runtime"), ("cudnn", "nvidia-cudnn")):
        (row,) = (row for row in required if row.startswith(package) and f'extra == "{extra}"' in row.replace("'", '"'))
        assert f"-cu{major}" in row or f"~={major}." in row, row
