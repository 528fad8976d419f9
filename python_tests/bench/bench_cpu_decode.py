"""Decode latency of one GroupQueryAttention node on the CPU: the installed wheel, and others beside it in the same run.

python -m python_tests.bench.bench_cpu_decode --peer-python PATH [--peer-python PATH] [--json FILE]

One layer, batch 1, one new token, 32 query and 8 KV heads, D 128, cache full and in place. Every wheel has a process of
its own; all rows of one length are loaded, checked against the reference, and then measured in turns, so that what
else the machine does hits all of them. GB/s = bytes of cache and scales / median time, 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.bench.cpu_bars import bar_lines, find_bars
from python_tests.bench.cpu_case import HEAD_SIZE, HEADS, KV_HEADS, PEER_SETUPS, SETUPS, Setup
from python_tests.bench.cpu_expected import expected_output
from python_tests.bench.cpu_model import build

ROOT = Path(__file__).parents[2]
# Largest error in units of the largest output value.
TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3}


class Worker:
    """A wheel in a process of its own."""

    def __init__(self, python: str, threads: int) -> None:
        command = [python, "-m", "python_tests.bench.cpu_worker", str(threads)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self.version = ""

    def ask(self, **request: object) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            msg = f"the worker of {shlex.join(self.process.args)} ended"  # type: ignore[arg-type]
            raise RuntimeError(msg)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


@dataclass
class Row:
    """One line of the table. wheel: 0 is the installed one, then the peers in order."""

    wheel: int
    version: str
    setup: Setup
    tokens: int
    bytes: int = 0
    ms: list[float] = field(default_factory=list)
    unsupported: str = ""
    error: float = 0.0

    @property
    def key(self) -> str:
        """Name within the worker."""
        return f"{self.setup.activation}-{self.setup.cache}-{self.setup.mode}-{self.tokens}"

    def percentile(self, q: float) -> float:
        """Milliseconds."""
        return float(np.percentile(self.ms, q))


def load_rows(workers: list[Worker], tokens: int, folder: Path, only: str) -> list[Row]:
    """Load every setup of one length in every wheel that can run it."""
    rows = []
    for setup in [s for s in SETUPS if only in s.label]:
        model = folder / f"{setup.activation}-{setup.cache}-{setup.mode}-{tokens}.onnx"
        model.write_bytes(build(setup, tokens))
        for number, worker in enumerate(workers):
            if number and setup not in PEER_SETUPS:
                continue
            row = Row(number, worker.version, setup, tokens)
            parts = [setup.activation, setup.cache, setup.mode]
            answer = worker.ask(load=row.key, model=str(model), setup=parts, tokens=tokens)
            worker.version = row.version = answer["version"]
            row.bytes, row.unsupported = answer.get("bytes", 0), answer.get("unsupported", "")
            if row.unsupported and number == 0:
                print(f"{row.version} does not run {setup.label}: {row.unsupported}", file=sys.stderr)
            rows.append(row)
    return [row for row in rows if not row.unsupported]


def check_rows(workers: list[Worker], rows: list[Row], folder: Path) -> None:
    """One run of each, compared with the reference: a wrong kernel must not be timed."""
    outputs: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for row in rows:
        if row.key not in outputs:
            outputs[row.key] = expected_output(row.setup, row.tokens)
        workers[row.wheel].ask(measure=row.key, runs=1)
        path = folder / "output.npy"
        workers[row.wheel].ask(save=row.key, path=str(path))
        wanted = outputs[row.key]
        row.error = float(np.max(np.abs(np.load(path).ravel() - wanted)) / np.max(np.abs(wanted)))
        if not row.error <= TOLERANCE[row.setup.activation]:
            msg = f"{row.version} {row.setup.label} at {row.tokens} tokens: relative error {row.error:.2e}"
            raise AssertionError(msg)


def time_rows(workers: list[Worker], rows: list[Row], rounds: int, burst_ms: float) -> None:
    """Measure in turns. A pause lets the thread pool of the wheel before stop spinning."""
    for turn in range(rounds):
        for row in rows:
            time.sleep(0.05)
            runs = 3 if not row.ms else max(3, min(100, int(burst_ms / np.median(row.ms))))
            times = workers[row.wheel].ask(measure=row.key, runs=runs)["ms"]
            row.ms = [*row.ms, *times] if turn else times


def describe(arguments: argparse.Namespace) -> list[str]:
    """What was measured where, and how to repeat it."""
    model = next(
        (x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.processor(),
    )
    command = shlex.join([Path(sys.executable).name, "-m", "python_tests.bench.bench_cpu_decode", *sys.argv[1:]])
    return [
        f"{model}, {os.cpu_count()} cores, {arguments.threads} threads, load {os.getloadavg()[0]:.1f} at the start",
        f"{platform.platform()}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}",
        f"batch 1, one new token, {HEADS}/{KV_HEADS} heads, D {HEAD_SIZE}, cache full, in place",
        f"repeat: {command}",
    ]


HEADER = [
    "| tokens | wheel | cache | median ms | p10 | p90 | GB/s | MB read | error |",
    "|---:|---|---|---:|---:|---:|---:|---:|---:|",
]


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table."""
    lines = []
    for row in rows:
        median = row.percentile(50)
        lines.append(
            f"| {row.tokens} | {row.version} | {row.setup.label} | {median:.3f} | {row.percentile(10):.3f} "
            f"| {row.percentile(90):.3f} | {row.bytes / median / 1e6:.1f} | {row.bytes / 1e6:.1f} | {row.error:.1e} |"
        )
    return lines


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--peer-python", action="append", default=[], help="interpreter with another onnxruntime")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--burst-ms", type=float, default=150.0, help="time of one row's turn")
    parser.add_argument("--only", default="", help="rows whose label contains this")
    parser.add_argument("--slack", type=float, default=0.05, help="what 'not slower' may be off by, for noise")
    parser.add_argument("--json", type=Path, help="write every time and the environment to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and judge the bars."""
    arguments = parse()
    about, busy = describe(arguments), os.getloadavg()[0] / (os.cpu_count() or 1)
    workers = [Worker(python, arguments.threads) for python in [sys.executable, *arguments.peer_python]]
    rows: list[Row] = []
    print("\n".join([*about, "", *HEADER]), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for tokens in arguments.tokens:
            now = load_rows(workers, tokens, folder, arguments.only)
            check_rows(workers, now, folder)
            time_rows(workers, now, arguments.rounds, arguments.burst_ms)
            for row in now:
                workers[row.wheel].ask(unload=row.key)
            rows += now
            print("\n".join(table(now)), flush=True)
    for worker in workers:
        worker.close()
    bars = find_bars(rows, arguments.slack)
    print("\n".join(["", *bar_lines(bars)]))
    if busy > 0.3:
        print(f"the machine was busy at the start ({busy:.0%} of its cores): measure again before judging a MISS")
    if arguments.json:
        record = {"about": about, "rows": [asdict(row) for row in rows], "bars": [asdict(bar) for bar in bars]}
        arguments.json.write_text(json.dumps(record, indent=1))
    return int(arguments.check and not all(bar.passed for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
