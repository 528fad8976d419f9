#!/usr/bin/env python3
"""Builds a wheel of ONNX Runtime with a quantized KV cache. `python build.py --help` lists verbs and options."""

import sys

# Before any import of kvbuild, whose syntax older interpreters cannot even read.
if sys.version_info < (3, 11):
    sys.stderr.write(
        "error: environment error: build.py needs Python 3.11 or later, this is %d.%d\n"
        "do: run it with another interpreter, such as python3.11 build.py\n" % sys.version_info[:2]
    )
    sys.exit(3)

from pathlib import Path

from kvbuild.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent))
