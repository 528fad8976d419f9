"""Time of GroupQueryAttention in any installed onnxruntime wheel, several wheels in turns in one run.

python -m python_tests.bench.bench_gqa --suite decode [--site ours=FOLDER --site stock=FOLDER] [--json FILE]
python -m python_tests.bench.bench_gqa --preset qwen2.5-7b --cache plain int8 fp8:PER_TENSOR --tokens 4096 65536
python -m python_tests.bench.bench_gqa --provider cpu --tokens 1024

Each wheel has a process of its own. A model of many nodes, each with a cache of its own (together more than any L2
cache holds), random contents, rotary on, past and present one buffer. Before it is timed, a case is compared with
float64 attention over the dequantized cache. CUDA: events on the stream that the session is given, around replays of
the captured graph. The read bandwidth is measured in the same process. A wheel that cannot run a case gives a row with
the reason. Columns and JSON: bench_rows.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from python_tests.bench import bench_rows
from python_tests.bench.bench_rows import Row
from python_tests.bench.gqa_bars import bar_lines, find_bars
from python_tests.bench.gqa_case import PRESETS, Case, cache_text, layer_count, with_cache
from python_tests.bench.gqa_site import Place, Worker, read_kernel_library
from python_tests.bench.gqa_suites import SUITES
from python_tests.bench.layers_model import build
from python_tests.bench.row_adapters import recorded_rows

MODULE = "python_tests.bench.bench_gqa"
CACHES = ("plain", "int8", "fp8", "int4")
TURNS = 3
# Calls with this many new tokens are bound by arithmetic: what the L2 cache holds does not decide.
MANY_ROWS = 64


@dataclass(frozen=True)
class Job:
    """A case and how many layers its model has."""

    case: Case
    layers: int


def parser() -> argparse.ArgumentParser:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    p.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--site", action="append", default=[], help="NAME=FOLDER with onnxruntime, or NAME=INTERPRETER")
    p.add_argument("--suite", nargs="+", default=[], choices=sorted(SUITES), help="named cases, instead of the options")
    p.add_argument("--preset", nargs="+", default=["llama3-8b"], choices=list(PRESETS))
    p.add_argument("--cache", nargs="+", help="plain, int8, fp8, int4, each but plain with :MODE or :K_MODE/V_MODE")
    p.add_argument("--activation", nargs="+", choices=("fp16", "bf16", "fp32"), help="default: fp16, on the CPU fp32")
    p.add_argument("--scale-type", choices=("fp32", "fp16"), default="fp32", help="of PER_TOKEN scales")
    p.add_argument("--batch", type=int, nargs="+", default=[1])
    p.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 131072], help="after the call")
    p.add_argument("--seq", type=int, nargs="+", default=[1], help="how many of them are new")
    p.add_argument("--prompt", action="store_true", help="all tokens are new")
    p.add_argument("--capacity", type=int, default=0, help="rows of the buffers, default: the tokens")
    p.add_argument("--window", type=int, help="instead of the preset's")
    p.add_argument("--separate", action="store_true", help="query, key and value as three tensors")
    p.add_argument("--layers", type=int, default=0, help="default: as many as reach --least-mb")
    p.add_argument("--least-mb", type=int, default=-1, help="of all caches together; default: 512, on the CPU 0")
    p.add_argument("--budget-gb", type=float, default=24.0, help="most memory of a case in one wheel")
    p.add_argument("--rounds", type=int, default=24)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the CPU provider")
    p.add_argument("--time-limit", type=float, default=0.0, help="seconds after which no case is begun, 0: none")
    p.add_argument("--json", type=Path, help="write the rows to this file")
    p.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    return p


def cases(arguments: argparse.Namespace) -> list[Case]:
    """What the command line asks for. Raises ValueError for what cannot be."""
    if arguments.suite:
        return [case for name in arguments.suite for case in SUITES[name]()]
    found = []
    activations = arguments.activation or ["fp16" if arguments.provider == "cuda" else "fp32"]
    axes = (arguments.preset, activations, arguments.batch, arguments.tokens, arguments.seq)
    for preset, activation, batch, tokens, seq in itertools.product(*axes):
        base = Case(
            preset=preset, cache=activation, activation=activation, batch=batch, tokens=tokens,
            seq=tokens if arguments.prompt else seq, capacity=arguments.capacity, prompt=arguments.prompt,
            packed=not arguments.separate, window=arguments.window,
        )  # fmt: skip
        found += [with_cache(base, cache, arguments.scale_type) for cache in arguments.cache or CACHES]
    for case in found:
        if fault := case.valid():
            raise ValueError(fault)
    return found


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """Cases with their layers."""
    cpu = arguments.provider == "cpu"
    megabytes = arguments.least_mb if arguments.least_mb >= 0 else 0 if cpu else 512
    found = []
    for case in cases(arguments):
        few = cpu or case.seq >= MANY_ROWS
        count = layer_count(
            case, 0 if case.seq >= MANY_ROWS else megabytes * 10**6, 1 if cpu else 4 if few else 16,
            256, int(arguments.budget_gb * 1e9),
        )  # fmt: skip
        found.append(Job(case, arguments.layers or count))
    return found


def repeat_command(job: Job, arguments: argparse.Namespace, places: Sequence[Place]) -> str:
    """The command that measures this case alone, in these wheels."""
    case, d = job.case, Case()
    words = ["--provider", arguments.provider, "--preset", case.preset, "--cache", cache_text(case)]
    words += ["--activation", case.activation, "--batch", str(case.batch), "--tokens", str(case.tokens)]
    words += ["--prompt"] if case.prompt else ["--seq", str(case.seq)]
    optional = (
        (["--capacity", str(case.capacity)], case.capacity != d.capacity),
        (["--window", str(case.window)], case.window is not None),
        (["--separate"], not case.packed),
        (["--scale-type", case.scale_type], case.scale_type == "fp16"),
    )
    words += [word for part, wanted in optional if wanted for word in part]
    words += ["--layers", str(job.layers), "--rounds", str(arguments.rounds)]
    words += ["--threads", str(arguments.threads)] if arguments.provider == "cpu" else []
    words += [word for place in places if place.path for word in ("--site", f"{place.name}={place.path}")]
    return shlex.join(["python", "-m", MODULE, *words])


def blank_row(job: Job, worker: Worker, arguments: argparse.Namespace) -> Row:
    """A row with all that is known before the case runs."""
    case, about = job.case, worker.about
    m = case.model
    return Row(
        harness="gqa", site=worker.place.name, version=about.get("version", ""), ours=bool(about.get("ours")),
        provider=arguments.provider, device=about.get("device", ""), date=time.strftime("%Y-%m-%d"),
        command=repeat_command(job, arguments, [worker.place]), preset=case.preset, heads=m.heads,
        kv_heads=m.kv_heads, head_size=m.head_size, cache=case.cache, activation=case.activation, batch=case.batch,
        tokens=case.tokens, seq=case.seq, capacity=case.rows, prompt=case.prompt, window=m.window, sinks=m.sinks,
        packed=case.packed, k_mode=case.k_mode, v_mode=case.v_mode, scale_type=case.scale_type, layers=job.layers,
        graph=arguments.provider == "cuda", bytes=case.read_bytes, cache_bytes=case.cache_bytes,
        operations=case.operations, read_gb_s=about.get("read_gb_s", 0.0), read_method=about.get("read_method", ""),
    )  # fmt: skip


def measure(job: Job, workers: Sequence[Worker], arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """One case in every wheel: loaded and checked, then measured in turns."""
    rows = [blank_row(job, worker, arguments) for worker in workers]
    if any(not row.reason and "reason" not in worker.about for row, worker in zip(rows, workers, strict=True)):
        model = folder / "model.onnx"
        model.write_bytes(build(job.case, job.layers))
    for number, worker in enumerate(workers):
        answer = worker.about if "reason" in worker.about else worker.load(model, job.case, job.layers)
        kept = {k: answer[k] for k in ("error", "kernel", "session_bytes", "reason") if k in answer}
        rows[number] = replace(rows[number], **kept)
    late = [0] * len(rows)
    for _ in range(TURNS):
        for number, worker in enumerate(workers):
            if rows[number].reason:
                continue
            # What another wheel's threads still do is not to be measured.
            time.sleep(0.05 if arguments.provider == "cpu" else 0)
            answer = worker.ask(measure=-(-arguments.rounds // TURNS))
            if "reason" in answer:
                rows[number] = replace(rows[number], us=(), reason=answer["reason"])
                continue
            rows[number] = replace(rows[number], us=(*rows[number].us, *answer["us"]))
            late[number] += answer["late"]
    for number, worker in enumerate(workers):
        worker.ask(unload=True)
        if late[number] and rows[number].ran:
            text = f"{late[number]} of {len(rows[number].us)} times include the host's wait for the device"
            rows[number] = replace(rows[number], note=text)
    return rows


def describe(workers: Sequence[Worker]) -> list[str]:
    """What is measured where, and how to repeat it."""
    lines = [f"{platform.platform()}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"]
    for worker in workers:
        about = worker.about
        if "reason" in about:
            lines.append(f"{worker.place.name}: {about['reason']}")
            continue
        lines.append(
            f"{worker.place.name}: onnxruntime {about['version']} on {about['device']}, "
            f"read bandwidth {about['read_gb_s']:.0f} GB/s by {about['read_method']}"
        )
    lines.append(f"repeat: {shlex.join(['python', '-m', MODULE, *sys.argv[1:]])}")
    return lines


def run_all(arguments: argparse.Namespace, workers: Sequence[Worker]) -> Iterator[list[Row]]:
    """The rows of each case as it is done."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for job in jobs(arguments):
            if 0 < arguments.time_limit < time.monotonic() - begin:
                reason = f"not begun within {arguments.time_limit:g} s"
                yield [replace(blank_row(job, worker, arguments), reason=reason) for worker in workers]
            else:
                yield measure(job, workers, arguments, Path(name))


def main() -> int:
    """Measure, print, and judge the bars."""
    arguments = parser().parse_args()
    try:
        cases(arguments)
        places = [Place.parse(text) for text in arguments.site] or [Place("installed")]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    library = read_kernel_library() if arguments.provider == "cuda" else None
    workers = [Worker(place, arguments.provider, arguments.threads, library) for place in places]
    about, rows = describe(workers), []
    print("\n".join([*about, "", *bench_rows.HEADER]), flush=True)
    for found in run_all(arguments, workers):
        rows += found
        print("\n".join(bench_rows.line(row) for row in found), flush=True)
        if arguments.json:
            bench_rows.save(arguments.json, about, rows)
    for worker in workers:
        worker.close()
    notes = [
        f"{row.site}, {row.shape}, B {row.batch}, {row.tokens}, {row.format}: {row.note}" for row in rows if row.note
    ]
    print("\n".join(["", *notes]))
    bars = find_bars([*rows, *recorded_rows()])
    print("\n".join(["", *bar_lines(bars)]))
    wrong = any(row.ours and row.reason.startswith("wrong") for row in rows)
    missed = any(bar.passed is False for bar in bars if bar.group != "aim")
    return 1 if wrong or (arguments.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
