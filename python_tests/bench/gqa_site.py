"""A wheel under test in a process of its own, and the library with the kernel that measures read bandwidth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from python_tests.bench.gqa_case import Case
from python_tests.kernel import toolchain

ROOT = Path(__file__).parents[2]
# With it the CUDA provider prints which kernel serves a node.
_DEBUG_VARIABLE = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"


@dataclass(frozen=True)
class Place:
    """Where a wheel is. path: a folder that holds the package onnxruntime, an interpreter, or "" for this one."""

    name: str
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Place:
        """From NAME=PATH. Raises ValueError where there is nothing of that kind."""
        name, _, path = text.partition("=")
        found = Path(path).expanduser()
        if not name or not path or not (found.is_file() or (found / "onnxruntime").is_dir()):
            msg = f"{text}: expected NAME=FOLDER with a package onnxruntime in it, or NAME=INTERPRETER"
            raise ValueError(msg)
        # An interpreter of a virtual environment is a link that must not be followed.
        return cls(name, str(found.absolute()))

    def command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """The worker's command and environment."""
        interpreter = self.path if self.path and Path(self.path).is_file() else sys.executable
        folders = [str(ROOT)] if not self.path or Path(self.path).is_file() else [self.path, str(ROOT)]
        # For the current environment what is on the path already, the wheel perhaps, stays on it.
        if not self.path and "PYTHONPATH" in os.environ:
            folders.append(os.environ["PYTHONPATH"])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), _DEBUG_VARIABLE: "1"}
        # The check's products are small, and NumPy's threads would be in the way of what is measured.
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        return [interpreter, "-m", "python_tests.bench.gqa_worker", *arguments], environment


class Worker:
    """A process with one wheel. Started again after an error that the process cannot get rid of."""

    def __init__(self, place: Place, provider: str, threads: int, library: Path | None) -> None:
        self.place, self._arguments = place, (provider, str(threads))
        self._library = str(library or "")
        self._start()
        # Of the first process: the bandwidth that percentages are of is measured once.
        self.about = self.ask(about=True, library=self._library)

    def _start(self) -> None:
        command, environment = self.place.command(*self._arguments)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def ask(self, **request: object) -> dict[str, Any]:
        """Send one request and wait for its answer; what goes wrong is the answer's "reason"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait(timeout=60)
            self._start()
            return {"reason": f"the process ended with {code}"}
        answer: dict[str, Any] = json.loads(line)
        if answer.get("broken"):
            self.close()
            self._start()
        return answer

    def load(self, model: Path, case: Case, layers: int) -> dict[str, Any]:
        """Load and check a case."""
        return self.ask(load=str(model), case=asdict(case), layers=layers)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(timeout=60)


def read_kernel_library() -> Path | None:
    """A library with the read kernel: the tests' own where the environment names it, else built here in seconds.

    None without nvcc or a GPU.
    """
    prebuilt = os.environ.get(toolchain.LIBRARY_VARIABLE)
    if prebuilt:
        return Path(prebuilt).resolve()
    nvcc = toolchain.find_nvcc()
    if nvcc is None or toolchain.gpu_architecture() is None:
        return None
    source = toolchain.NATIVE / "device_tools.cu"
    compiler = toolchain.Compiler(nvcc, toolchain.architectures())
    flags = [*toolchain.COMMON, *compiler.targets]
    library = ROOT / ".work" / "bench" / f"device_tools-{toolchain.digest(' '.join(flags), source)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.partial")
        command = [str(nvcc), *flags, "-shared", "-cudart", "static", str(source), "-o", str(partial)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"{source.name} does not compile, bandwidth is a copy's:\n{done.stderr}", file=sys.stderr)
            return None
        partial.replace(library)
    return library
