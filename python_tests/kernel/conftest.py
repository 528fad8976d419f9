"""Fixtures of the kernel tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from python_tests.kernel import toolchain
from python_tests.kernel.device import Device, missing, open_device
from python_tests.kernel.params import HostLibrary

TIME_LIMIT_S = 300  # of tests that end in seconds


def pytest_report_header() -> str:
    """Which library is tested, so that a report says by itself what it is about."""
    reason = missing()
    prebuilt = os.environ.get(toolchain.LIBRARY_VARIABLE)
    source = f"library {prebuilt}" if prebuilt else f"built here, {toolchain.ARCH_VARIABLE} or the GPU's architecture"
    return f"kernels: {reason or source}"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Device 0 with the compiled kernels."""
    reason = missing()
    if reason:
        (pytest.fail if request.config.getoption("--require-gpu") else pytest.skip)(reason)
    opened = open_device()
    print(f"{opened.name}, {opened.multiprocessors} multiprocessors, {opened.path}")
    if opened.sources() != toolchain.sources_digest():
        print(f"{opened.path} was built from other sources than this checkout's")
    yield opened
    opened.check(opened.handle.kvq_last_error(), "left over at the end")


def _end_process(request: pytest.FixtureRequest) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(f"\n{request.node.nodeid}: more than {TIME_LIMIT_S} s", file=sys.__stderr__, flush=True)
    os._exit(3)


@pytest.fixture
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process if the test takes too long: a kernel that waits for ever holds whoever waits for it."""
    timer = threading.Timer(TIME_LIMIT_S, _end_process, [request])
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    """plan.cc and the tests' entry, without a line of device code."""
    nvcc = toolchain.find_nvcc()
    headers = nvcc.resolve().parents[1] / "include" if nvcc else Path("/usr/local/cuda/include")
    if not (headers / "vector_types.h").exists():
        pytest.skip("needs the headers of a CUDA toolkit")
    compiler = os.environ.get("CXX") or shutil.which("c++") or "c++"
    target = tmp_path_factory.mktemp("plan") / "plan.so"
    sources = [toolchain.NATIVE / "plan_entry.cc", toolchain.KERNELS / "plan.cc"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    include = [f"-I{toolchain.ROOT}", "-isystem", str(headers)]
    subprocess.run([compiler, *flags, *include, *map(str, sources), "-o", str(target)], check=True)
    return HostLibrary(target)
