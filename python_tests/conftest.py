"""Options and reports shared by all tests."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

    from python_tests.op.gqa_model import Provider

_gpu_tests_run = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the operator tests."""
    group = parser.getgroup("operator tests")
    group.addoption("--provider", choices=("cpu", "cuda"), default="cpu", help="execution provider under test")
    group.addoption("--require-gpu", action="store_true", help="fail unless tests marked gpu, or --provider cuda, ran")


def pytest_configure(config: pytest.Config) -> None:
    """Reset the count of GPU tests."""
    config.stash[_gpu_tests_run] = 0


def _cuda_available() -> bool:
    try:
        import onnxruntime as ort
    except ImportError:
        return False
    return "CUDAExecutionProvider" in ort.get_available_providers()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests on a machine without one, unless they are required."""
    needs_gpu = item.get_closest_marker("gpu") is not None
    required = bool(item.config.getoption("--require-gpu"))
    if needs_gpu and not _cuda_available():
        reason = "needs a GPU: onnxruntime has no CUDAExecutionProvider here"
        if required:
            pytest.fail(reason)
        pytest.skip(reason)
    if needs_gpu or item.config.getoption("--provider") == "cuda":
        item.config.stash[_gpu_tests_run] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that had to use a GPU and did not is a failure."""
    idle = session.config.getoption("--require-gpu") and session.config.stash[_gpu_tests_run] == 0
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
    checks = sys.modules.get("python_tests.op.checks")
    if checks is not None and checks.USED_FRACTIONS:
        case, used = max(checks.USED_FRACTIONS.items(), key=lambda item: item[1])
        count = len(checks.USED_FRACTIONS)
        terminalreporter.write_line(f"{count} outputs used up to {used:.2f} of their error bound, most by {case}")
    if config.getoption("--require-gpu") and config.stash[_gpu_tests_run] == 0:
        terminalreporter.write_line("--require-gpu: no GPU test ran", red=True)


@pytest.fixture(scope="session")
def provider(request: pytest.FixtureRequest) -> Provider:
    """The execution provider under test."""
    from python_tests.op.gqa_model import PROVIDERS

    chosen = PROVIDERS[request.config.getoption("--provider")]
    if chosen.device == "cuda" and not _cuda_available():
        pytest.fail("--provider cuda: onnxruntime has no CUDAExecutionProvider here")
    return chosen
