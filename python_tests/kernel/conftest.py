"""Fixtures of the kernel tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from python_tests.kernel import toolchain
from python_tests.kernel.device import Device, missing, open_device


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
