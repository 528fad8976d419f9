"""Options and reports shared by all tests."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

    from python_tests.op.providers import Provider

# python_tests.op.providers reads it: lists of cases depend on the provider.
PROVIDER_VARIABLE = "KVQ_TEST_PROVIDER"


class GpuTests:
    """Counts the tests that ran on a GPU: not the skipped ones, and, under pytest-xdist, those of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.ran = 0
        self._all = config.getoption("--provider") == "cuda"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test whose body ran, whatever came out."""
        if report.when == "call" and not report.skipped and (self._all or "gpu" in report.keywords):
            self.ran += 1


_gpu_tests = pytest.StashKey[GpuTests]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the operator tests."""
    group = parser.getgroup("operator tests")
    group.addoption("--provider", choices=("cpu", "cuda"), default="cpu", help="execution provider under test")
    group.addoption("--require-gpu", action="store_true", help="fail unless tests marked gpu, or --provider cuda, ran")


def pytest_configure(config: pytest.Config) -> None:
    """Say which provider is meant before test modules are imported, and start counting GPU tests."""
    os.environ[PROVIDER_VARIABLE] = config.getoption("--provider")
    config.stash[_gpu_tests] = GpuTests(config)
    config.pluginmanager.register(config.stash[_gpu_tests])


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """GPUs that the CUDA driver sees; 0 without a driver."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return 0
    count = ctypes.c_int()
    usable = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if usable else 0


def cuda_provider_missing() -> str:
    """Why onnxruntime cannot run on a GPU here; empty if it can."""
    if gpu_count() == 0:
        return "needs a GPU: the CUDA driver finds none here"
    try:
        import onnxruntime as ort
    except ImportError:
        return "needs onnxruntime"
    found = "CUDAExecutionProvider" in ort.get_available_providers()
    return "" if found else "needs the CUDA wheel: this onnxruntime has no CUDAExecutionProvider"


def skip_or_fail(config: pytest.Config, reason: str) -> None:
    """Skip for want of a GPU, or fail where one is required."""
    if config.getoption("--require-gpu"):
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests on a machine without one, unless they are required."""
    if item.get_closest_marker("gpu") is not None and gpu_count() == 0:
        skip_or_fail(item.config, "needs a GPU: the CUDA driver finds none here")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that had to use a GPU and did not is a failure. A worker of pytest-xdist sees only its own part."""
    if hasattr(session.config, "workerinput"):
        return
    idle = session.config.getoption("--require-gpu") and session.config.stash[_gpu_tests].ran == 0
    if idle and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Count skipped tests by reason, so that nothing is left out silently, and say how tight the bounds are."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(r.longrepr[2] if isinstance(r.longrepr, tuple) else r.longrepr) for r in skipped)
    terminalreporter.section("skipped tests by reason")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:5d}  {reason.removeprefix('Skipped: ')}")
    terminalreporter.write_line(f"{len(skipped):5d}  in all")
    for name in ("python_tests.op.checks", "python_tests.kernel.verify"):
        checks = sys.modules.get(name)
        if checks is not None and checks.USED_FRACTIONS:
            case, used = max(checks.USED_FRACTIONS.items(), key=lambda item: item[1])
            count = len(checks.USED_FRACTIONS)
            terminalreporter.write_line(f"{count} outputs used up to {used:.2f} of their error bound, most by {case}")
    gpu_tests = config.stash[_gpu_tests].ran
    if gpu_tests:
        terminalreporter.write_line(f"{gpu_tests:5d}  tests ran on a GPU")
    elif config.getoption("--require-gpu"):
        terminalreporter.write_line("--require-gpu: no GPU test ran", red=True)


@pytest.fixture(scope="session")
def provider(request: pytest.FixtureRequest) -> Provider:
    """The execution provider under test."""
    from python_tests.op.providers import selected

    chosen = selected()
    missing = cuda_provider_missing() if chosen.device == "cuda" else ""
    if missing:
        pytest.fail(f"--provider cuda: {missing}")
    return chosen


@pytest.fixture(scope="session")
def cuda(request: pytest.FixtureRequest) -> Provider:
    """The CUDA provider, whatever --provider says; for tests marked gpu."""
    from python_tests.op.providers import CUDA

    missing = cuda_provider_missing()
    if missing:
        skip_or_fail(request.config, missing)
    return CUDA
