"""Device memory of a long decode by cache format. As a program it prints the table: run it on an idle GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from python_tests.op.kernel_paths import SWITCH, parse
from python_tests.op.memory_model import FORMATS, Decoder

ROOT = Path(__file__).parents[2]
LAYERS, TOKENS = 32, 131072
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Measured:
    """Bytes. workspace: of one layer's attention, -1 where the kernel does not say. total: all that the process uses
    more than before it made its session; run: the part that came with the first step."""

    workspace: int
    total: int
    run: int


class StepFailed(Exception):
    """The step did not run; the text is the process's error output."""


@lru_cache(maxsize=16)
def measure(decoder: Decoder, limit: int) -> Measured:
    """One step at the decoder's length, with at most `limit` bytes for the session, 0: any number."""
    command = [sys.executable, "-m", "python_tests.op.memory_worker"]
    command += [decoder.format, str(decoder.layers), str(decoder.tokens), str(limit)]
    env = {**os.environ, SWITCH: "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=env)
    if done.returncode != 0:
        raise StepFailed(done.stderr)
    sizes = json.loads(done.stdout.splitlines()[-1])
    workspaces = [int(line.get("WorkspaceBytes", "-1")) for line in parse(done.stdout)]
    return Measured(max(workspaces, default=-1), sizes["total"], sizes["run"])


def table(limit: int = 0) -> str:
    """Markdown: one row per format. limit: of the sessions with a quantized cache, see measure."""
    head = f"{LAYERS} layers, batch 1, 32 query and 8 KV heads of 128, {TOKENS:,} tokens, one step"
    lines = [
        head, "",
        "| cache | K and V, GiB | scales, GiB | weights, GiB | attention scratch, MiB | whole process, GiB |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in FORMATS:
        decoder = Decoder(name, LAYERS, TOKENS)
        measured = measure(decoder, limit if name != "fp16" else 0)
        scratch = "-" if measured.workspace < 0 else f"{measured.workspace / MIB:.1f}"
        sizes = (decoder.cache_bytes, decoder.scale_bytes, decoder.weight_bytes)
        shown = " | ".join(f"{size / GIB:.2f}" for size in sizes)
        lines.append(f"| {name} | {shown} | {scratch} | {measured.total / GIB:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
