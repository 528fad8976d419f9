"""The CUDA provider in a wheel: device code, needed libraries, search path. Its library is a fake one."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild import cudawheel, sharedlib
from kvbuild.errors import BuildError
from python_tests.tool.engine import executable
from python_tests.tool.fake_elf import MACHINE_CODE, PTX, fatbin, library

TARGET = cudawheel.Target(version="13.0", architectures="90-real", toolkit=Path("/tree"))
NEEDED = ["libcublas.so.13", "libcudart.so.13", "libcudnn_graph.so.9", "libstdc++.so.6", "ld-linux-x86-64.so.2"]
RUNPATH = "$ORIGIN:$ORIGIN/../../nvidia/cu13/lib:$ORIGIN/../../nvidia/cudnn/lib"
SM_90 = [fatbin((MACHINE_CODE, 90))]


def put_wheel(folder: Path, data: bytes, name: str = cudawheel.PROVIDER) -> Path:
    path = folder / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)
    return path


def check(folder: Path, data: bytes, target: cudawheel.Target = TARGET) -> str:
    with cudawheel.unpacked(put_wheel(folder, data), folder) as path:
        return cudawheel.check(path, target)


def test_library_that_is_as_expected(tmp_path: Path) -> None:
    assert check(tmp_path, library(needed=NEEDED, runpath=RUNPATH, fatbins=SM_90)) == "sm_90"
    assert [path.name for path in tmp_path.iterdir()] == ["x.whl"]


def test_every_fat_binary_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(library(fatbins=[fatbin((MACHINE_CODE, 80), (PTX, 90)), fatbin((MACHINE_CODE, 120))]))
    assert sharedlib.inspect(path).device_code == {"sm_80", "compute_90", "sm_120"}


def test_library_of_a_cpu_has_no_device_code(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(library(needed=["libc.so.6"]))
    assert sharedlib.inspect(path) == sharedlib.SharedLibrary(
        needed=("libc.so.6",), runpath=(), device_code=frozenset()
    )


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01\x01" + b"\0" * 90, library(needed=["a"])[:-40]], ids=len)
def test_broken_library_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BuildError, match="cannot be read as a shared library"):
        check(tmp_path, data)


def test_fat_binary_without_an_entry_header_ends(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="has no header"):
        check(tmp_path, library(fatbins=[fatbin((MACHINE_CODE, 90))[:16] + b"\0" * 80]))


@pytest.mark.parametrize(
    ("architectures", "code"),
    [
        ("90-real", {"sm_90"}),
        ("90-virtual", {"compute_90"}),
        ("80-real;90", {"sm_80", "sm_90", "compute_90"}),
        ("90a;120f-real", {"sm_90", "compute_90", "sm_120"}),
    ],
)
def test_code_that_an_option_asks_for(architectures: str, code: set[str]) -> None:
    assert sharedlib.requested_code(architectures) == code


@pytest.mark.parametrize(
    "code",
    [[(MACHINE_CODE, 90), (MACHINE_CODE, 80)], [(MACHINE_CODE, 90), (PTX, 90)], [(MACHINE_CODE, 80)], []],
    ids=str,
)
def test_other_device_code_is_refused(tmp_path: Path, code: list[tuple[int, int]]) -> None:
    with pytest.raises(BuildError, match=r"holds code for .* instead of sm_90"):
        check(tmp_path, library(needed=NEEDED, runpath=RUNPATH, fatbins=[fatbin(*code)]))


@pytest.mark.parametrize("name", ["libcudart.so", "libcuda.so.1", "libmine.so.2", "/opt/cuda/lib64/libcublas.so.13"])
def test_library_that_users_lack_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BuildError, match=f"needs {name}, which users do not have"):
        check(tmp_path, library(needed=[*NEEDED, name], runpath=RUNPATH, fatbins=SM_90))


def test_other_cuda_release_is_refused(tmp_path: Path) -> None:
    other = replace(TARGET, version="12.8")
    with pytest.raises(BuildError, match=r"does not need libcudart\.so\.12"):
        check(tmp_path, library(needed=NEEDED, runpath=RUNPATH, fatbins=SM_90), other)


@pytest.mark.parametrize("path", [None, f"{RUNPATH}:/home/me/cuda/lib64", "$ORIGIN"])
def test_other_search_path_is_refused(tmp_path: Path, path: str | None) -> None:
    with pytest.raises(BuildError, match="looks for libraries in"):
        check(tmp_path, library(needed=NEEDED, runpath=path, fatbins=SM_90))


def test_wheel_without_the_provider_is_refused(tmp_path: Path) -> None:
    wheel = put_wheel(tmp_path, b"", "onnxruntime/__init__.py")
    with (
        pytest.raises(BuildError, match="has no onnxruntime/capi/libonnxruntime_providers_cuda"),
        cudawheel.unpacked(wheel, tmp_path),
    ):
        pass


def test_search_path_of_cuda_12_names_its_packages() -> None:
    assert "$ORIGIN/../../nvidia/cuda_runtime/lib" in cudawheel.runpath("12.8")
    assert not any("cu13" in folder for folder in cudawheel.runpath("12.8"))


def fake_ldd(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(folder / "ldd", f'[ "$1 $LD_LIBRARY_PATH" = "-r /tree/lib64" ] || exit 9\n{body}')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_symbol_of_the_host_may_be_undefined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ldd(
        tmp_path, "printf 'libc.so.6 => /lib/libc.so.6\\nundefined symbol: Provider_GetHost\\t(x.so)'", monkeypatch
    )
    cudawheel.check_symbols(tmp_path / "x.so", TARGET)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("printf 'undefined symbol: _ZN3foo\\t(x.so)'", "it lacks _ZN3foo"),
        ("echo '\tlibcudnn.so.9 => not found'", r"it lacks libcudnn\.so\.9"),
        ("exit 1", "it lacks something"),
    ],
)
def test_missing_symbol_or_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    fake_ldd(tmp_path, body, monkeypatch)
    with pytest.raises(BuildError, match=told):
        cudawheel.check_symbols(tmp_path / "x.so", TARGET)
