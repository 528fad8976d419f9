"""Packing and checking the wheel, and the test run's verdict. setup.py and pytest are scripts here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild import cudawheel, testrun, venv, wheel
from kvbuild.config import Config
from kvbuild.errors import BuildError, TestFailure
from python_tests.tool.engine import REPO, executable, make_base, make_cfg

BASE = make_base()
SETUP = """
import os, pathlib, sys, zipfile
version = "1.21.0" + os.environ["KVQ_LOCAL_VERSION"]
name = "onnxruntime_gpu" if "--wheel_name_suffix=gpu" in sys.argv else "onnxruntime"
path = pathlib.Path("dist", f"{name}-{version}-cp311-cp311-linux_x86_64.whl")
path.parent.mkdir()
with zipfile.ZipFile(path, "w") as archive:
    archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name.replace('_', '-')}\\nVersion: {version}\\n")
    archive.writestr("big.so", os.urandom(4 << 20))
"""


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    cfg = make_cfg(tmp_path)
    (cfg.src).mkdir(parents=True)
    (cfg.src / "setup.py").write_text(SETUP)
    (cfg.build_dir / "dist").mkdir(parents=True)
    (cfg.build_dir / "dist" / "onnxruntime-0.9-stale.whl").touch()
    venv.build_python(cfg).parent.mkdir(parents=True)
    venv.build_python(cfg).symlink_to(sys.executable)
    return cfg


def imported(build_info: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library cannot be made here; what it says of itself is given instead."""
    monkeypatch.setattr(wheel, "_import", lambda *_args: {"build_info": build_info})


def test_packed_anew_with_the_local_version(cfg: Config) -> None:
    path = wheel.pack(cfg, BASE, None, cfg.logs / "wheel.log")
    assert path == cfg.dist_dir / "onnxruntime-1.21.0+kvq.7-cp311-cp311-linux_x86_64.whl"
    assert [file.name for file in cfg.dist_dir.iterdir()] == [path.name]


def test_provider_built_alone_reaches_the_wheel(tmp_path: Path) -> None:
    """Upstream copies it only when the Python module is linked; what is newer, or was never copied, stays as it is."""
    package = tmp_path / "onnxruntime" / "capi"
    package.mkdir(parents=True)
    for name, built, copied in (("cuda", 20, 10), ("shared", 10, 20), ("other", 20, None)):
        library = tmp_path / f"libonnxruntime_providers_{name}.so"
        library.write_text("built")
        os.utime(library, (built, built))
        if copied is not None:
            (package / library.name).write_text("copied")
            os.utime(package / library.name, (copied, copied))
    wheel.refresh_providers(tmp_path)
    assert {path.name: path.read_text() for path in package.iterdir()} == {
        "libonnxruntime_providers_cuda.so": "built",
        "libonnxruntime_providers_shared.so": "copied",
    }


def test_checked_wheel_is_described(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    imported("ORT Build Info: kv-patchset=0123456789ab", monkeypatch)
    path = wheel.pack(cfg, BASE, None, cfg.logs / "wheel.log")
    made = wheel.check(cfg, BASE, path, "0123456789ab", cfg.logs / "wheel.log")
    assert made.size == path.stat().st_size
    assert "0123456789ab" in made.build_info


def test_wheel_of_another_patch_set_is_refused(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    imported("ORT Build Info: kv-patchset=ffffffffffff", monkeypatch)
    path = wheel.pack(cfg, BASE, None, cfg.logs / "wheel.log")
    with pytest.raises(BuildError, match="does not name the patch set 0123456789ab"):
        wheel.check(cfg, BASE, path, "0123456789ab", cfg.logs / "wheel.log")


def test_wheel_without_its_version_is_refused(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    imported("", monkeypatch)
    (cfg.src / "setup.py").write_text(SETUP.replace('os.environ["KVQ_LOCAL_VERSION"]', '""'))
    path = wheel.pack(cfg, BASE, None, cfg.logs / "wheel.log")
    with pytest.raises(BuildError, match=r"is onnxruntime 1\.21\.0, expected onnxruntime 1\.21\.0\+kvq\.7"):
        wheel.check(cfg, BASE, path, "", cfg.logs / "wheel.log")


def test_wheel_without_a_library_is_refused(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    imported("", monkeypatch)
    (cfg.src / "setup.py").write_text(SETUP.replace("4 << 20", "10"))
    path = wheel.pack(cfg, BASE, None, cfg.logs / "wheel.log")
    with pytest.raises(BuildError, match="MiB only"):
        wheel.check(cfg, BASE, path, "", cfg.logs / "wheel.log")


@pytest.mark.parametrize("providers", [["CPUExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]])
def test_wheel_with_cuda_has_its_name_and_provider(
    cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, providers: list[str]
) -> None:
    cuda = replace(cfg, cuda_home=tmp_path)
    cuda.build_dir.mkdir()
    monkeypatch.setattr(wheel, "_import", lambda *_args: {"build_info": "", "providers": providers})
    target = cudawheel.Target(version="13.0", architectures="90-real", toolkit=tmp_path)
    monkeypatch.setattr(cudawheel, "unpacked", lambda *_args: nullcontext(tmp_path))
    monkeypatch.setattr(cudawheel, "check", lambda *_args: "sm_90")
    monkeypatch.setattr(cudawheel, "check_symbols", lambda *_args: None)
    path = wheel.pack(cuda, BASE, target, cfg.logs / "wheel.log")
    assert path.name.startswith("onnxruntime_gpu-")
    if len(providers) > 1:
        wheel.check(cuda, BASE, path, "", cfg.logs / "wheel.log", target)
        return
    with pytest.raises(BuildError, match="no CUDA provider, only CPUExecutionProvider"):
        wheel.check(cuda, BASE, path, "", cfg.logs / "wheel.log", target)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare environment's interpreter."""
    folder = tmp_path_factory.mktemp("bare env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def put_distribution(python: Path, name: str, package: str) -> None:
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(f"{package}\n")


def test_second_runtime_is_found_whatever_its_name(environment: Path) -> None:
    assert wheel.second_runtime(environment) == []
    put_distribution(environment, "onnxruntime-extensions", "onnxruntime_extensions")
    put_distribution(environment, "onnxruntime", "onnxruntime")
    put_distribution(environment, "ort-nightly-gpu", "onnxruntime")
    assert wheel.second_runtime(environment) == ["onnxruntime 1.0", "ort-nightly-gpu 1.0"]


def test_environment_with_two_runtimes_runs_no_tests(
    cfg: Config, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv, "ensure", lambda *_args, **_kwargs: environment)
    monkeypatch.setattr(wheel, "second_runtime", lambda _python: ["onnxruntime 1", "onnxruntime-gpu 1"])
    with pytest.raises(TestFailure, match="holds 2 ONNX Runtime packages: onnxruntime 1, onnxruntime-gpu 1"):
        testrun.environments(cfg, Path("x.whl"), cfg.logs / "test.log")


XML = '<testsuites><testsuite tests="{0}" failures="{1}" errors="{2}" skipped="{3}"/></testsuites>'


@pytest.fixture
def fake_pytest(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose pytest writes a report and exits as the file `verdict` beside it says."""
    folder = cfg.base_dir / "fake env" / "bin"
    body = f"""
for part in "$@"; do case $part in --junitxml=*) report=${{part#--junitxml=}} ;; esac; done
echo "$@" > '{folder}/arguments'; echo "$KVQ_STOCK_PYTHON" > '{folder}/stock'
echo 'E   assert 1 == 2'
read code xml < '{folder}/verdict'
[ -z "$xml" ] || echo "$xml" > "$report"
exit $code"""
    python = executable(folder / "python", body)
    monkeypatch.setattr(testrun, "environments", lambda *_args: (python, Path("/stock/python")))
    return folder


def test_passing_run_is_counted(cfg: Config, fake_pytest: Path) -> None:
    (fake_pytest / "verdict").write_text("0 " + XML.format(12, 0, 0, 2))
    counts = testrun.run(cfg, Path("x.whl"), cfg.logs / "test.log")
    assert str(counts) == "10 passed, 2 skipped"
    assert (fake_pytest / "stock").read_text().strip() == "/stock/python"


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ("1 " + XML.format(12, 1, 1, 0), "the tests failed: 10 passed, 2 failed"),
        ("5 " + XML.format(0, 0, 0, 0), "no tests ran"),
        ("2", "no tests ran"),
        ("0 " + XML.format(3, 0, 0, 3), "no test passed"),
        ("0", "no tests ran"),
    ],
    ids=["failures", "nothing collected", "broken collection", "all skipped", "no report"],
)
def test_runs_that_do_not_count(cfg: Config, fake_pytest: Path, verdict: str, told: str) -> None:
    (fake_pytest / "verdict").write_text(verdict)
    with pytest.raises(TestFailure) as caught:
        testrun.run(cfg, Path("x.whl"), cfg.logs / "test.log")
    assert told in caught.value.what
    assert caught.value.exit_code == 7


def test_checkout_without_tests_is_a_failure(cfg: Config, tmp_path: Path, fake_pytest: Path) -> None:
    with pytest.raises(TestFailure, match="no tests ran"):
        testrun.run(replace(cfg, repo=tmp_path), Path("x.whl"), cfg.logs / "test.log")


def test_old_report_is_not_taken_for_a_new_one(cfg: Config, fake_pytest: Path) -> None:
    (fake_pytest / "verdict").write_text("0 " + XML.format(12, 0, 0, 2))
    testrun.run(cfg, Path("x.whl"), cfg.logs / "test.log")
    (fake_pytest / "verdict").write_text("0")
    with pytest.raises(TestFailure, match="no tests ran"):
        testrun.run(cfg, Path("x.whl"), cfg.logs / "test.log")


def test_metadata_of_a_wheel(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: a\nVersion: 1\n\nText: not a field\n")
    assert wheel._metadata(path) == ("a", "1")


@pytest.mark.parametrize(
    "path", sorted(REPO.glob("kvbuild/data/*.txt")) + sorted(REPO.glob("patches/*/*.txt")), ids=str
)
def test_pinned_lists_are_complete(path: Path) -> None:
    """Every requirement is one exact version with hashes, and the list says what its source says."""
    text = path.read_text()
    rows = [row for row in re.split(r"\n(?=\S)", text) if not row.startswith("#")]
    pinned = [row.split(" \\")[0].strip() for row in rows]
    source = path.with_suffix(".in").read_text().splitlines()
    assert pinned == [line.strip() for line in source if line.strip() and not line.startswith("#")]
    for row in rows:
        assert re.match(r"[a-z0-9-]+==[0-9.]+( ; python_version [<>=]+ \"3\.\d+\")? \\\n", row), row
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", row), row


def test_cmake_is_new_enough_and_not_4() -> None:
    found = re.search(r"^cmake==(\d+)\.(\d+)", (REPO / "kvbuild/data/build-requirements.txt").read_text(), re.MULTILINE)
    assert found
    assert (3, 28) <= (int(found[1]), int(found[2])) < (4, 0)
