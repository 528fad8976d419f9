"""The wheel's KV cache tools: the installed ones, or, where the wheel is older than they are, this checkout's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnxruntime.transformers

OVERLAY = Path(__file__).resolve().parents[2] / "patches/overlay/onnxruntime/python/tools/transformers"
if str(OVERLAY) not in onnxruntime.transformers.__path__:
    # Last: a module that the wheel has is found there first.
    onnxruntime.transformers.__path__.append(str(OVERLAY))

_RUN = (
    "import runpy, sys, onnxruntime.transformers as t; t.__path__.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def command(name: str, *args: str | Path) -> list[str]:
    """The command line that runs onnxruntime.transformers.<name> as `python -m` does."""
    return [sys.executable, "-c", _RUN, str(OVERLAY), f"onnxruntime.transformers.{name}", *map(str, args)]


def run(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool in a process of its own; its exit status is not checked."""
    return subprocess.run(command(name, *args), capture_output=True, text=True, check=False, timeout=300)
