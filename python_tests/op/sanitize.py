"""Runs the tests marked `sanitizer` under compute-sanitizer.

Usage: python -m python_tests.op.sanitize [TOOL ...] [-- PYTEST ARGUMENT ...]. Tools: memcheck, racecheck, synccheck,
initcheck; by default the first two. Arrays then end where their allocations do, so that a read behind one is seen, too.
The kernels' own tests have the same marker and environment variable. Exit status 1: a tool found something, a test
failed, or none ran.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from python_tests.op.guarded import EXACT_VARIABLE

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
DEFAULT = TOOLS[:2]
FOUND = 86


def sanitizer() -> str:
    """Path of compute-sanitizer: on PATH or in the toolkit's folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(Path(home) / "bin"))
    if found is None:
        msg = f"no compute-sanitizer on PATH or in {home}/bin"
        raise SystemExit(msg)
    return found


def run(tool: str, arguments: list[str]) -> bool:
    """One pass over the marked tests; whether it was clean."""
    # Libraries probe what a device can do with calls that fail: only what kernels do counts.
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += [sys.executable, "-m", "pytest", "-q", "-m", "sanitizer", *arguments]
    print(f"++ {' '.join(command)}", flush=True)
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, EXACT_VARIABLE: "1"}, check=False).returncode
    print(f"{tool}: {'clean' if status == 0 else f'exit status {status}'}", flush=True)
    return status == 0


def main(arguments: list[str]) -> int:
    """0 where every tool was content."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    tools = arguments[:split] or list(DEFAULT)
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown:
        msg = f"unknown tool {', '.join(unknown)}; there are {', '.join(TOOLS)}"
        raise SystemExit(msg)
    rest = arguments[split + 1 :] or ["python_tests/op/test_cuda_sanitizer.py", "--require-gpu"]
    return 0 if all([run(tool, rest) for tool in tools]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
