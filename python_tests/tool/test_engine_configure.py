"""The CMake command, what makes it run again, and what it leaves alone."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild import configure, cudawheel, operators, venv
from kvbuild.config import Config
from kvbuild.configure import Inputs
from kvbuild.errors import BuildError
from python_tests.tool.engine import executable, make_base, make_cfg

BASE = make_base()
INPUTS = Inputs(dependencies={"FETCHCONTENT_SOURCE_DIR_X": "/deps/a folder"}, patchset="0123456789ab")


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return make_cfg(tmp_path, repo=tmp_path / "repo", cmake_args=("-DMINE=1",))


def fake_cmake(cfg: Config, body: str) -> None:
    executable(venv.build_python(cfg).parent / "cmake", body)


def options(cfg: Config, inputs: Inputs = INPUTS) -> dict[str, str]:
    parts = [str(part) for part in configure.command(cfg, BASE, inputs)]
    return dict(part.removeprefix("-D").split("=", 1) for part in parts if part.startswith("-D"))


def test_nothing_is_downloaded_or_found_by_chance(cfg: Config) -> None:
    found = options(cfg)
    assert found["FETCHCONTENT_FULLY_DISCONNECTED"] == "ON"
    assert found["FETCHCONTENT_TRY_FIND_PACKAGE_MODE"] == "NEVER"
    assert found["FETCHCONTENT_SOURCE_DIR_X"] == "/deps/a folder"
    assert found["CMAKE_MAKE_PROGRAM"] == str(venv.build_python(cfg).parent / "ninja")


def test_own_options_come_last(cfg: Config) -> None:
    assert configure.command(cfg, BASE, INPUTS)[-1] == "-DMINE=1"


def test_patch_set_and_revision_are_handed_over(cfg: Config) -> None:
    found = options(cfg)
    assert (found["KVQ_PATCHSET"], found["KVQ_REVISION"], found["KVQ_PROFILE"]) == ("0123456789ab", "7", "full")


def test_decoder_profile_reduces_operators(cfg: Config) -> None:
    full, decoder = options(cfg), options(replace(cfg, profile="decoder"))
    names = ("onnxruntime_REDUCED_OPS_BUILD", "onnxruntime_DISABLE_ML_OPS", "KVQ_PROFILE")
    assert [full[name] for name in names] == ["OFF", "OFF", "full"]
    assert [decoder[name] for name in names] == ["ON", "ON", "decoder"]
    # Contrib operators hold GroupQueryAttention, and a minimal build misses symbols that they need.
    assert not any("DISABLE_CONTRIB_OPS" in name or "MINIMAL_BUILD" in name for name in decoder)


def test_cuda_options(cfg: Config, tmp_path: Path) -> None:
    cuda = replace(cfg, cuda_home=tmp_path)
    target = cudawheel.Target(version="13.0", architectures="90-real", toolkit=tmp_path / "tree")
    found = options(cuda, replace(INPUTS, cuda=target))
    assert found["CMAKE_CUDA_ARCHITECTURES"] == "90-real"
    assert found["CMAKE_CUDA_COMPILER"] == str(tmp_path / "tree" / "bin" / "nvcc")
    assert found["onnxruntime_NVCC_THREADS"] == "1"  # a number, and never 0
    # No folder of this machine goes into the wheel.
    assert found["CMAKE_BUILD_WITH_INSTALL_RPATH"] == "ON"
    assert all(folder.startswith("$ORIGIN") for folder in found["CMAKE_INSTALL_RPATH"].split(";"))
    assert not any("CUDA" in name for name in options(cfg))


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [("90-real", "OFF"), ("80-real;86-real", "OFF"), ("80-real;90", "ON"), ("75-real", "ON"), ("120-real", "ON")],
)
def test_decoder_profile_keeps_an_attention_kernel_for_every_gpu(
    cfg: Config, tmp_path: Path, architectures: str, expected: str
) -> None:
    target = cudawheel.Target(version="13.0", architectures=architectures, toolkit=tmp_path)
    found = options(replace(cfg, cuda_home=tmp_path, profile="decoder"), replace(INPUTS, cuda=target))
    assert found["onnxruntime_USE_MEMORY_EFFICIENT_ATTENTION"] == expected
    assert "onnxruntime_USE_FLASH_ATTENTION" not in found


def test_compiler_cache_keys_are_shared_by_clones(cfg: Config) -> None:
    env = configure.environment(cfg)
    assert env["CCACHE_BASEDIR"] == str(cfg.work_dir)
    assert str(env["PATH"]).split(os.pathsep)[0] == str(venv.build_python(cfg).parent)


@pytest.mark.parametrize(
    ("present", "expected"), [(["ccache", "sccache"], "ccache"), (["sccache"], "sccache"), ([], None)]
)
def test_compiler_cache_is_used_when_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: list[str], expected: str | None
) -> None:
    for name in present:
        executable(tmp_path / "bin" / name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert configure.compiler_cache() == expected


def test_digest_follows_every_input(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = venv.build_requirements(cfg)
    pins.parent.mkdir(parents=True)
    pins.write_text("cmake==1")
    precompile = cfg.data / "precompile.cmake"
    precompile.write_text("# one")

    def digest(cfg: Config = cfg, inputs: Inputs = INPUTS, names: str = "n") -> str:
        return configure.digest(cfg, BASE, inputs, names)

    first = digest()
    assert digest() == first
    others = [
        digest(names="other"),
        digest(inputs=replace(INPUTS, patchset="other")),
        digest(inputs=replace(INPUTS, dependencies={"A": "b"})),
        digest(cfg=replace(cfg, cmake_args=("-DMINE=2",))),
    ]
    pins.write_text("cmake==2")
    others.append(digest())
    precompile.write_text("# two")
    others.append(digest())
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    others.append(digest())
    assert len({first, *others}) == 8


def test_options_of_an_earlier_run_do_not_stay(cfg: Config) -> None:
    fake_cmake(cfg, "exit 0")
    objects = cfg.build_dir / "CMakeFiles" / "lib.dir" / "x.o"
    detected = cfg.build_dir / "CMakeFiles" / "3.31.6" / "CMakeCXXCompiler.cmake"
    for path in (objects, detected, cfg.build_dir / "CMakeCache.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    configure.run(cfg, BASE, INPUTS, cfg.logs / "configure.log")
    assert objects.exists()
    assert not detected.exists()
    assert not (cfg.build_dir / "CMakeCache.txt").exists()


def test_first_error_of_cmake_is_shown(cfg: Config) -> None:
    lines = ["CMake Error at CMakeLists.txt:1:", "  the reason", *["-- more"] * 60, "-- Configuring incomplete"]
    fake_cmake(cfg, "\n".join(f"echo '{line}'" for line in lines) + "\nexit 1")
    with pytest.raises(BuildError) as caught:
        configure.run(cfg, BASE, INPUTS, cfg.logs / "configure.log")
    assert "the reason" in caught.value.why
    assert str(cfg.logs / "configure.log") in caught.value.todo


REDUCER = """
import pathlib, sys
config, _, build = sys.argv[1:4]
root = pathlib.Path(build, "op_reduction.generated")
root.mkdir(parents=True)
for line in pathlib.Path(config).read_text().split():
    (root / line).write_text("same for " + line[0])
"""


def test_reduced_registrations_keep_their_mtime_when_equal(cfg: Config) -> None:
    """Their files are long compiles; the tool that writes them deletes and writes all of them each time."""
    cfg = replace(cfg, profile="decoder")
    fake_cmake(cfg, "exit 0")
    venv.build_python(cfg).symlink_to(sys.executable)
    script = cfg.src / "tools" / "ci_build" / "reduce_op_kernels.py"
    script.parent.mkdir(parents=True)
    script.write_text(REDUCER)
    cfg.data.mkdir(parents=True)
    (cfg.data / "decoder.config").write_text("a.cc b.cc")
    configure.run(cfg, BASE, INPUTS, cfg.logs / "configure.log")
    folder = cfg.build_dir / operators.GENERATED
    os.utime(folder / "a.cc", (1, 1))
    (cfg.data / "decoder.config").write_text("a.cc c.cc")
    configure.run(cfg, BASE, INPUTS, cfg.logs / "configure.log")
    assert sorted(path.name for path in folder.iterdir()) == ["a.cc", "c.cc"]
    assert (folder / "a.cc").stat().st_mtime == 1
