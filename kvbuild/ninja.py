"""Runs ninja: as many jobs as cores and memory allow, fewer after an out-of-memory kill, progress on the way."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbuild import log, proc
from kvbuild.config import Config
from kvbuild.errors import BuildError

GIB = 1 << 30
CXX_GIB_PER_JOB = 2
CUDA_GIB_PER_JOB = 6
"""nvcc's device compiler needs that much for one architecture of an attention kernel."""
HEARTBEAT_SECONDS = 30.0

_STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")
_OUT_OF_MEMORY = re.compile(
    r"Killed signal terminated program|died due to signal 9|unable to execute command: Killed|^Killed$|: \d+ Killed "
    r"|code=137\b|out of memory allocating \d+ bytes|: Cannot allocate memory$|instance of 'std::bad_alloc'"
)
"""As GCC, nvcc, clang, shells, ninja, and compilers that were refused memory say it."""
_KILLED = (137, -9)
"""Exit code of a process that the kernel's out-of-memory killer ended, as a shell and as Python report it."""


def default_jobs(cfg: Config) -> int:
    """--jobs, else what cores and available memory allow."""
    if cfg.jobs:
        return cfg.jobs
    per_job = (CUDA_GIB_PER_JOB if cfg.cuda_home else CXX_GIB_PER_JOB) * GIB
    return max(1, min(cores(), available_memory() // per_job))


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors that this process may use: its affinity, and a container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        usable = min(usable, max(1, int(quota) // int(period)))
    return usable


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that new processes can take without swapping, within a container's limit."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(meminfo), re.MULTILINE)
    available = int(found[1]) * 1024 if found else 2 * GIB
    limit = _read(cgroup / "memory.max")
    if limit.isdigit():
        used = int(_read(cgroup / "memory.current") or 0)
        reclaimable = re.search(r"^inactive_file (\d+)", _read(cgroup / "memory.stat"), re.MULTILINE)
        available = min(available, int(limit) - used + (int(reclaimable[1]) if reclaimable else 0))
    return max(0, available)


def build(ninja: Path, build_dir: Path, jobs: int, log_path: Path, env: dict[str, str | None]) -> int:
    """Build everything in `build_dir`; returns the number of jobs that it ended with. Raises BuildError."""
    while True:
        progress = Progress()
        done = _run(ninja, build_dir, jobs, log_path, env, progress)
        if done.returncode == 0:
            return jobs
        if not (done.returncode in _KILLED or progress.out_of_memory):
            raise _failure(ninja, build_dir, jobs, log_path, done.returncode, progress.failures or done.stdout.decode())
        if jobs == 1:
            msg = "the compiler was killed for lack of memory although only one job ran"
            why = f"{available_memory() / GIB:.1f} GiB are available\n{_indented(progress.failures)}".rstrip()
            raise BuildError(msg, why, f"add memory or swap space; see {log_path}")
        jobs //= 2
        log.warn(f"out of memory: going on with {jobs} job{'s' if jobs > 1 else ''}")


class Progress:
    """Turns ninja's lines into a bar on a terminal, or one line every half minute elsewhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._last_line = self._start
        self._first_step = 0
        self._done = 0
        self._total = 0
        self._doing = ""
        self._in_failure = False
        self._failures: list[str] = []
        self.out_of_memory = False

    @property
    def failures(self) -> str:
        """The output of failed steps, which other jobs' lines may have scrolled away."""
        return "\n".join(self._failures)

    def line(self, text: str) -> None:
        step = _STEP.match(text)
        if step:
            if not self._total:
                self._first_step = int(step[1]) - 1
            self._done, self._total, self._doing = int(step[1]), int(step[2]), step[3]
            self._in_failure = False
            log.progress(self._bar())
            return
        if text.startswith("FAILED: "):
            self._in_failure = True
        if self._in_failure and len(self._failures) < proc.TAIL_LINES:
            self._failures.append(text)
        if _OUT_OF_MEMORY.search(text):
            self.out_of_memory = True

    def tick(self) -> None:
        if log.is_terminal():
            if self._total:
                log.progress(self._bar())
        elif self._clock() - self._last_line >= HEARTBEAT_SECONDS and self._total:
            self._last_line = self._clock()
            log.info("  " + self._state())

    def _bar(self) -> str:
        filled = 24 * self._done // self._total
        return f"  {'#' * filled}{'.' * (24 - filled)} {self._state()}  {Path(self._doing.split(' ')[-1]).name}"

    def _state(self) -> str:
        elapsed = self._clock() - self._start
        steps = self._done - self._first_step
        left = (
            f", about {log.format_seconds(elapsed / steps * (self._total - self._done))} left"
            if steps >= 5 and elapsed >= 2
            else ""
        )
        return f"[{self._done}/{self._total}] {log.format_seconds(elapsed)}{left}"


def _run(
    ninja: Path, build_dir: Path, jobs: int, log_path: Path, env: dict[str, str | None], progress: Progress
) -> proc.Completed:
    return proc.run(
        _command(ninja, build_dir, jobs),
        env={**env, "NINJA_STATUS": "[%f/%t] ", "CLICOLOR_FORCE": None},
        log=log_path,
        check=False,
        on_line=progress.line,
        on_tick=progress.tick,
        what="ninja",
    )


def _command(ninja: Path, build_dir: Path, jobs: int) -> Sequence[str | Path]:
    return [ninja, "-C", build_dir, "-j", str(jobs)]


def _failure(ninja: Path, build_dir: Path, jobs: int, log_path: Path, code: int, shown: str) -> BuildError:
    msg = f"ninja failed with exit code {code}"
    repeat = proc.repeatable(_command(ninja, build_dir, jobs))
    return BuildError(
        msg, f"the first failing steps say\n{_indented(shown)}", f"see {log_path}; repeat with\n  {repeat}"
    )


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines()[: proc.TAIL_LINES])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
