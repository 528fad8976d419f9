"""The CUDA tree, and what is asked of nvcc and cuDNN. nvcc is a script here."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from kvbuild import toolchain, toolkit
from kvbuild.config import Config
from kvbuild.errors import EnvironmentProblem, UsageError
from kvbuild.toolkit import Library
from python_tests.tool.engine import executable, make_cfg

NVCC = """
case "$*" in
  *--version*) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
  *--list-gpu-arch*) printf 'compute_75\\ncompute_80\\ncompute_90\\ncompute_120\\n' ;;
  *) exit 0 ;;
esac"""


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """A bare toolkit, laid out as NVIDIA's: include and lib64 lead into targets."""
    home = tmp_path / "cuda 13"
    executable(home / "bin" / "nvcc", NVCC)
    (home / "bin" / "nvcc.profile").write_text("TOP = $(_HERE_)/..\n")
    target = home / "targets" / "x86_64-linux"
    (target / "include" / "crt").mkdir(parents=True)
    (target / "lib").mkdir()
    (target / "include" / "cuda_runtime.h").touch()
    (target / "lib" / "libcudart.so.13").touch()
    (home / "nvvm").mkdir()
    (home / "include").symlink_to("targets/x86_64-linux/include")
    (home / "lib64").symlink_to("targets/x86_64-linux/lib")
    return home


@pytest.fixture
def cfg(tmp_path: Path, cuda: Path) -> Config:
    return make_cfg(tmp_path, cuda_home=cuda, mirrors=(tmp_path / "mirror",))


def put_cudnn(home: Path, major: int = 9, minor: int = 13) -> Path:
    (home / "include").mkdir(parents=True, exist_ok=True)
    (home / "lib").mkdir(exist_ok=True)
    (home / "include" / "cudnn_version.h").write_text(f"#define CUDNN_MAJOR {major}\n#define CUDNN_MINOR {minor}\n")
    (home / "lib" / f"libcudnn.so.{major}").touch()
    return home


def put_wheel(mirror: Path) -> Library:
    """A wheel in the layout of NVIDIA's packages."""
    mirror.mkdir(exist_ok=True)
    path = mirror / "nvidia_cublas-13-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nvidia/cu13/include/cublas_v2.h", "// cublas")
        archive.writestr("nvidia/cu13/lib/libcublas.so.13", "library")
        archive.writestr("nvidia_cublas-13.dist-info/METADATA", "Name: nvidia-cublas")
    return Library(
        name="cublas",
        cuda=13,
        header="cublas_v2.h",
        library="libcublas.so",
        package="nvidia-cublas",
        version="13",
        file=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def test_version_and_architectures(cuda: Path) -> None:
    assert toolchain.nvcc_version(cuda) == "13.0"
    assert toolchain.nvcc_architectures(cuda) == ["75", "80", "90", "120"]


def test_wrong_cuda_home_points_to_a_right_one(tmp_path: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cuda / "bin"))
    monkeypatch.setattr(toolchain, "USUAL_CUDA_FOLDER", tmp_path / "nothing here")
    with pytest.raises(EnvironmentProblem, match="no bin/nvcc there") as caught:
        toolchain.nvcc_version(tmp_path)
    assert caught.value.todo == f"try --cuda-home {cuda}"


def test_bare_toolkit_lacks_everything(cfg: Config, cuda: Path) -> None:
    missing = [lib.name for lib in toolkit.missing_libraries(cfg, cuda)]
    assert missing == ["cublas", "cudnn", "cufft", "curand", "cusparse", "nvrtc"]


def test_cudnn_home_is_taken_into_account(tmp_path: Path, cuda: Path) -> None:
    cudnn = put_cudnn(tmp_path / "cudnn")
    cfg = make_cfg(tmp_path, cuda_home=cuda, cudnn_home=cudnn)
    assert "cudnn" not in [lib.name for lib in toolkit.missing_libraries(cfg, cuda)]
    assert toolkit.cudnn_version(cudnn) == "9.13"


def test_old_cudnn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"cuDNN 8\.9, needed is 9"):
        toolkit.cudnn_version(put_cudnn(tmp_path, 8, 9))
    with pytest.raises(EnvironmentProblem, match=r"no include/cudnn_version\.h"):
        toolkit.cudnn_version(tmp_path / "absent")


def test_missing_libraries_of_another_release_are_not_mixed_in(cfg: Config, cuda: Path) -> None:
    toolkit.check_available(cfg, cuda, "13.0")
    with pytest.raises(EnvironmentProblem, match=r"\(CUDA 12\.8\) lacks cublas"):
        toolkit.check_available(cfg, cuda, "12.8")


def test_tree_joins_toolkit_and_packages(
    tmp_path: Path, cfg: Config, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = put_wheel(tmp_path / "mirror")
    monkeypatch.setattr(toolkit, "missing_libraries", lambda _cfg, _home: [library])
    tree = toolkit.prepare(cfg, cuda, tmp_path / "no pip")
    assert toolchain.nvcc_version(tree) == "13.0"
    assert (tree / "include" / "cuda_runtime.h").exists()
    assert (tree / "include" / "cublas_v2.h").read_text() == "// cublas"
    assert (tree / "lib64" / "libcublas.so").read_text() == "library"  # the linker's name for libcublas.so.13
    assert (tree / "targets" / "x86_64-linux" / "lib" / "libcublas.so.13").exists()
    assert (tree / "nvvm").is_dir()
    assert [path for path in tree.rglob("*") if not path.exists()] == []  # no dangling links
    (tmp_path / "mirror" / library.file).unlink()
    assert toolkit.prepare(cfg, cuda, tmp_path / "no pip") == tree


def test_tree_survives_a_move_of_the_work_directory(
    tmp_path: Path, cfg: Config, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = put_wheel(tmp_path / "mirror")
    monkeypatch.setattr(toolkit, "missing_libraries", lambda _cfg, _home: [library])
    tree = toolkit.prepare(cfg, cuda, tmp_path / "no pip")
    moved = tree.rename(tmp_path / "moved")
    assert (moved / "include" / "cublas_v2.h").exists()


@pytest.mark.parametrize(
    ("given", "expected"), [("90", "90"), ("90-real", "90-real"), ("80;90-real", "80;90-real"), ("80,90a", "80;90a")]
)
def test_architectures_as_given(tmp_path: Path, cuda: Path, given: str, expected: str) -> None:
    assert toolkit.architectures(make_cfg(tmp_path, cuda_arch=given), cuda) == expected


@pytest.mark.parametrize(("given", "told"), [("sm_90", "not an architecture"), ("70", "does not compile for it")])
def test_architectures_that_are_refused(tmp_path: Path, cuda: Path, given: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        toolkit.architectures(make_cfg(tmp_path, cuda_arch=given), cuda)


def test_architectures_of_this_machine(tmp_path: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = make_cfg(tmp_path)
    monkeypatch.setattr(toolchain, "gpu_architectures", lambda: ["80", "90"])
    assert toolkit.architectures(cfg, cuda) == "80-real;90-real"
    monkeypatch.setattr(toolchain, "gpu_architectures", list)
    assert toolkit.architectures(cfg, cuda) == "80-real;90"


def test_gpus_as_the_driver_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "nvidia-smi", "printf '9.0\\n9.0\\n12.0\\n8.6\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert toolchain.gpu_architectures() == ["86", "90", "120"]
    executable(tmp_path / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert toolchain.gpu_architectures() == []
