"""Runs the test suite against the finished wheel, in an environment that holds only that wheel and pinned tools."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from kvbuild import log, proc, stamps, venv, wheel
from kvbuild.config import Config
from kvbuild.errors import TestFailure

NO_TESTS_COLLECTED = 5
"""pytest's exit code"""


@dataclass(frozen=True, kw_only=True)
class Counts:
    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        parts = [f"{self.passed} passed", f"{self.failed} failed" if self.failed else ""]
        return ", ".join(filter(None, [*parts, f"{self.skipped} skipped" if self.skipped else ""]))


def environments(cfg: Config, built: Path, log_path: Path) -> tuple[Path, Path]:
    """Interpreters of the environment with the wheel, and of the one with the unpatched release."""
    shared = [venv.test_requirements(cfg)]
    patched = venv.ensure(cfg, cfg.base_dir / f"venv-test-{cfg.variant}", shared, log_path, wheels=[built])
    stock_folder = cfg.base_dir / f"venv-stock-{cfg.python_tag}"
    stock = venv.ensure(cfg, stock_folder, [*shared, venv.stock_requirements(cfg)], log_path)
    for python in (patched, stock):
        found = wheel.second_runtime(python)
        if len(found) != 1:
            msg = f"{python.parent.parent} holds {len(found)} ONNX Runtime packages: {', '.join(found) or 'none'}"
            raise TestFailure(msg, "two of them overwrite each other's files", f"remove {python.parent.parent}")
    return patched, stock


def folders(cfg: Config) -> list[Path]:
    """The suites that run: those of the operator, and with --all those of the tools around it."""
    names = ["reference", "mlas", "op", "transformers", *(["kernel", "bench", "tool"] if cfg.all_tests else [])]
    return [path for name in names if (path := cfg.repo / "python_tests" / name).is_dir()]


def digest(cfg: Config, wheel_sha256: str) -> str:
    sources = {".py", ".h", ".cpp", ".cc", ".cu", ".npz"}
    files = [path for path in (cfg.repo / "python_tests").rglob("*") if path.suffix in sources]
    pins = [venv.test_requirements(cfg), venv.stock_requirements(cfg)]
    return stamps.digest_of(
        {
            "wheel": wheel_sha256,
            "tests": stamps.digest_files(cfg.repo, [*files, *pins, cfg.repo / "pyproject.toml"]),
            "folders": [path.name for path in folders(cfg)],
            "require_gpu": cfg.require_gpu,
        }
    )


def run(cfg: Config, built: Path, log_path: Path) -> Counts:
    """Raises TestFailure on a failing test, on a suite that collects nothing, and on missing GPU tests if required."""
    suites = folders(cfg)
    if not suites:
        msg = f"no tests ran: {cfg.repo / 'python_tests'} has none"
        raise TestFailure(msg, "the checkout of this repository is not complete")
    patched, stock = environments(cfg, built, log_path)
    report = cfg.logs / f"tests-{cfg.variant}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    # On a GPU the operator's cases run on the CUDA provider instead of the CPU's. One word: pytest reads options before
    # it knows which of them take a value.
    gpu = ["--provider=cuda", "--require-gpu"] if cfg.require_gpu else []
    cmd: proc.Command = [patched, "-m", "pytest", "-q", f"--junitxml={report}", *gpu, *suites]
    env = {**venv.ISOLATED, "KVQ_STOCK_PYTHON": str(stock), "PYTEST_ADDOPTS": None}
    done = proc.run(cmd, cwd=cfg.repo, env=env, log=log_path, check=False, on_line=_show, what="pytest")
    if done.returncode == NO_TESTS_COLLECTED or not report.exists():
        msg = "no tests ran"
        raise TestFailure(msg, _tail(done), f"see {log_path}")
    counts = _counts(report)
    if done.returncode != 0:
        msg = f"the tests failed: {counts}"
        repeat = proc.repeatable(cmd, cfg.repo)
        raise TestFailure(msg, _tail(done), f"see {log_path}; repeat with\n  KVQ_STOCK_PYTHON={stock} {repeat}")
    if counts.passed == 0:
        msg = f"no test passed: {counts}"
        raise TestFailure(msg, "every test was skipped", f"see {log_path} for the reasons")
    return counts


def _counts(report: Path) -> Counts:
    suite = ET.parse(report).getroot()
    suite = suite if suite.tag == "testsuite" else suite[0]
    number = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    return Counts(passed=number["tests"] - failed - number["skipped"], failed=failed, skipped=number["skipped"])


def _show(line: str) -> None:
    """pytest's own progress: its dots with the percentage."""
    if re.search(r"\[ *\d+%\]$", line):
        log.progress("  " + line)


def _tail(done: proc.Completed) -> str:
    return "\n".join(f"  | {line}" for line in done.stdout.decode("utf-8", "replace").splitlines())
