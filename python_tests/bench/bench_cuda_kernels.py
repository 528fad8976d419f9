"""Time of the CUDA kernels alone: LaunchGqa over many layers in one CUDA graph, on the GPU of this machine.

python -m python_tests.bench.bench_cuda_kernels [--path decode|prefill|prompt] [--tokens 1024 ...] [--json FILE]

Every layer has a cache of its own, at least 512 MB together, so that none is found in the L2 cache; contents are
random and rotary is on. A graph is replayed --rounds times between CUDA events; the table has the median time of a
layer, with the 10th and 90th percentile. GB/s = bytes of codes and scales / median, 1e9 bytes; the percentage is of a
read bandwidth measured in the same run. Each row is compared with the reference before it is timed. The single
launchers are measured the same way, in graphs that hold nothing else.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from python_tests.bench.cuda_layers import Layers, Shape
from python_tests.kernel import toolchain
from python_tests.kernel.device import Device, Graph, Kernel, missing, open_device
from python_tests.reference.format import CacheDtype

DECODE_TOKENS = (1024, 4096, 16384, 65536, 131072)
CHUNKS = ((512, 32768), (2048, 32768))
PROMPTS = (512, 2048, 8192)
LEAST_BYTES = 512 * 10**6
LEAST_LAYERS = 16
# Largest error in units of the largest output value: 16-bit rounding of random data.
TOLERANCE = 1e-2
WARM_UP = 3


@dataclass
class Row:
    """One line of the table. us: microseconds of a layer in each round; parts: medians of single launchers."""

    shape: Shape
    layers: int
    path: str
    splits: int
    workspace: int
    error: float
    us: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    def percentile(self, q: float) -> float:
        """Microseconds."""
        return float(np.percentile(self.us, q))


class Timer:
    """CUDA events around what is enqueued on the device's stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events = [device.event() for _ in range(2)]

    def milliseconds(self, enqueue: Callable[[], None]) -> float:
        """Time on the device."""
        self._device.record(self._events[0])
        enqueue()
        self._device.record(self._events[1])
        self._device.synchronize()
        return self._device.elapsed(*self._events)

    def rounds(self, enqueue: Callable[[], None], count: int) -> list[float]:
        """Milliseconds of `count` runs after a warm-up."""
        for _ in range(WARM_UP):
            enqueue()
        return [self.milliseconds(enqueue) for _ in range(count)]


def read_bandwidth(device: Device, timer: Timer, size: int = 2**32) -> float:
    """GB/s of a kernel that only reads `size` bytes, at the best of several grid sizes."""
    address = device.allocate(size)
    device.random_codes(address, size, 7)
    total = device.allocate(256)
    best = float("inf")
    for blocks in (4, 8, 16, 32):
        grid = blocks * device.multiprocessors
        best = min(best, float(np.median(timer.rounds(lambda: device.read(address, size, grid, total), 10))))  # noqa: B023
    for pointer in (address, total):
        device.free(pointer)
    return size / best / 1e6


def layer_times(layers: Layers, timer: Timer, kernel: Kernel, rounds: int) -> list[float]:
    """Microseconds of one layer, from a graph with this launcher for every layer."""
    graph = Graph(layers.device)
    with layers.device.capture(graph):
        for params in layers.params:
            layers.device.launch(kernel, params, layers.plan)
    times = [1000 * ms / layers.count for ms in timer.rounds(graph.launch, rounds)]
    graph.close()
    return times


def measure(device: Device, timer: Timer, shape: Shape, arguments: argparse.Namespace) -> Row:
    """One shape: layers on the device, check, whole call, single launchers."""
    # Prompts and chunks are bound by arithmetic: what the L2 cache holds does not decide.
    few = shape.seq >= 64
    count = 4 if few else max(LEAST_LAYERS, -(-LEAST_BYTES // shape.cache_bytes))
    layers = Layers(device, shape, count)
    try:
        error = 0.0 if shape.prompt else layers.check()
        plan = layers.plan
        row = Row(shape, count, device.path_name(plan), plan.splits, plan.workspace_bytes, error)
        if not error <= TOLERANCE:
            msg = f"{shape}: relative error {error:.2e}"
            raise AssertionError(msg)
        row.us = layer_times(layers, timer, "gqa", arguments.rounds)
        # A decode step is one launch, two where it has more splits than a block merges.
        kernels: list[Kernel] = ["decode"] if plan.path == 0 else ["append", "prefill"]
        if plan.splits > 1 and plan.cluster == 1 and plan.counters == 0:
            kernels.append("merge")
        for kernel in kernels:
            row.parts[kernel] = float(np.median(layer_times(layers, timer, kernel, arguments.rounds)))
    finally:
        layers.close()
    return row


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    """What the command line asks for."""
    model = {"batch": arguments.batch, "heads": arguments.heads, "kv_heads": arguments.kv_heads}
    model["head_size"] = arguments.head_size
    formats = [CacheDtype(name) for name in arguments.formats]
    if arguments.path == "decode":
        sizes = [(arguments.seq, tokens) for tokens in arguments.tokens or DECODE_TOKENS]
    elif arguments.path == "prefill":
        sizes = [(chunk, tokens) for chunk, tokens in CHUNKS if not arguments.tokens] or [
            (chunk, tokens) for chunk in (512, 2048) for tokens in arguments.tokens
        ]
    else:
        sizes = [(tokens, tokens) for tokens in arguments.tokens or PROMPTS]
    return [Shape(dtype=dtype, tokens=tokens, seq=seq, **model) for seq, tokens in sizes for dtype in formats]


HEADER = [
    "| tokens | new | cache | us | p10 | p90 | GB/s | of read | TFLOP/s | append | attend | merge | splits | error |",
    "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
]


def line(row: Row, bandwidth: float) -> str:
    """A line of the Markdown table."""
    shape, median = row.shape, row.percentile(50)
    rate = shape.cache_bytes / median / 1e3
    parts = [row.parts.get("append"), row.parts.get("decode", row.parts.get("prefill")), row.parts.get("merge")]
    cells = [
        str(shape.tokens), str(shape.seq), str(shape.dtype), f"{median:.2f}", f"{row.percentile(10):.2f}",
        f"{row.percentile(90):.2f}", f"{rate:.0f}", f"{rate / bandwidth:.0%}",
        f"{shape.operations / median / 1e6:.1f}", *("" if part is None else f"{part:.2f}" for part in parts),
        str(row.splits), f"{row.error:.1e}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def describe(device: Device, bandwidth: float, arguments: argparse.Namespace) -> list[str]:
    """What was measured where, and how to repeat it."""
    command = shlex.join([Path(sys.executable).name, "-m", "python_tests.bench.bench_cuda_kernels", *sys.argv[1:]])
    same = device.sources() == toolchain.sources_digest()
    sources = f"{device.sources()}{'' if same else ' (not those of this checkout)'}"
    return [
        f"{device.name}, {device.multiprocessors} multiprocessors, read bandwidth {bandwidth:.0f} GB/s, "
        f"{time.strftime('%Y-%m-%d')}",
        f"batch {arguments.batch}, {arguments.heads}/{arguments.kv_heads} heads, D {arguments.head_size}, float16, "
        f"rotary, PER_TOKEN with float scales, {arguments.path}, sources {sources}",
        f"repeat: {command}",
    ]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--path", choices=("decode", "prefill", "prompt"), default="decode")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths after the call")
    parser.add_argument("--seq", type=int, default=1, help="new tokens of --path decode")
    parser.add_argument(
        "--formats", nargs="+", default=[str(d) for d in CacheDtype], choices=[str(d) for d in CacheDtype]
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write every time and the environment to this file")
    return parser.parse_args()


def record(row: Row) -> dict[str, Any]:
    """A row as it goes into the JSON file."""
    return vars(row) | {"shape": {k: v for k, v in vars(row.shape).items() if k != "row_bytes"}}


def main() -> int:
    """Measure and print."""
    arguments = parse()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 3
    device = open_device()
    timer = Timer(device)
    bandwidth = read_bandwidth(device, timer)
    about = describe(device, bandwidth, arguments)
    print("\n".join([*about, "", *HEADER]), flush=True)
    rows = []
    for shape in shapes(arguments):
        rows.append(measure(device, timer, shape, arguments))
        print(line(rows[-1], bandwidth), flush=True)
    if arguments.json:
        content = {"about": about, "read_gb_s": bandwidth, "rows": [record(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
