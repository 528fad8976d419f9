"""One wheel's side of the operator's benchmark: loads, checks and measures what it is told to, line by line.

Started by bench_gqa.py in an environment with the wheel and NumPy; nothing else is needed. Each request on stdin is a
JSON object, each answer one JSON line on what was stdout at the start. An answer with "reason" says why not; with
"broken", too, the process is of no more use.
  {"about": true, "library": path or ""}  -> {"version", "device", "read_gb_s", "read_method", "ours"}
  {"load": path, "case": {...}, "layers": n}  -> {"error", "kernel", "session_bytes"}: loaded, run and checked
  {"measure": n}                              -> {"us": [...], "late": of these, how many include the host's wait}
  {"unload": true}                            -> {}
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnxruntime as ort

from python_tests.bench.gqa_case import Case
from python_tests.bench.gqa_session import Loaded, Target
from python_tests.bench.gqa_timing import device_name, device_read_bandwidth, host_read_bandwidth
from python_tests.op.cuda_runtime import DeviceMemory

_KERNEL = re.compile(r"SdpaKernel=(\w+)")


class Site:
    """What this process answers with. At most one case is loaded."""

    def __init__(self, provider: str, threads: int) -> None:
        self.target = Target(provider, threads)
        self.loaded: Loaded | None = None

    def about(self, library: str) -> dict[str, Any]:
        """The wheel, the device and its read bandwidth."""
        build = str(getattr(ort, "get_build_info", lambda: "")())
        if self.target.stream is None:
            name, bandwidth = processor_name(), host_read_bandwidth(self.target.threads)
        else:
            name = device_name()
            bandwidth = device_read_bandwidth(self.target.stream, self._fill, Path(library) if library else None)
        return {
            "version": wheel_version(), "device": name, "read_gb_s": bandwidth[0], "read_method": bandwidth[1],
            "ours": "kv-cache-quant" in build or "+kvq" in wheel_version(), "build_info": build,
        }  # fmt: skip

    def _fill(self, memory: DeviceMemory, size: int) -> None:
        self.target.allocator.fill(memory, size, "codes", 1.0, 0)
        self.target.allocator.settle()

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load, run and check a case."""
        with printed() as lines:
            self.loaded = Loaded(self.target, request["load"], Case(**request["case"]), request["layers"])
        found = sorted({m.group(1) for m in _KERNEL.finditer("".join(lines))})
        error, fault = self.loaded.check()
        answer: dict[str, Any] = {"error": error, "kernel": " ".join(found)}
        answer["session_bytes"] = self.loaded.session_bytes
        return answer | ({"reason": fault} if fault else {})

    def unload(self) -> None:
        """Free what is loaded."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            loaded.close()

    def survives(self) -> bool:
        """Free what is loaded after a failure; whether the device still answers. Some errors stay with a process."""
        try:
            self.unload()
            self.target.settle()
        except Exception:
            return False
        return True

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for."""
        if "about" in request:
            return self.about(request["library"])
        if "load" in request:
            return self.load(request)
        if "measure" in request:
            assert self.loaded is not None
            times, late = self.loaded.microseconds(request["measure"])
            return {"us": times, "late": late}
        self.unload()
        return {}


@contextmanager
def printed() -> Iterator[list[str]]:
    """What the process writes to stdout inside, C++ included."""
    lines: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            lines.append(file.read().decode(errors="replace"))


def shortened(text: str) -> str:
    """An error in one line. Messages name the model first and what is wrong last."""
    words = " ".join(text.split())
    return words if len(words) <= 300 else f"{words[:60]} ... {words[-235:]}"


def wheel_version() -> str:
    """The wheel's version with its local part, which onnxruntime itself does not know."""
    folder = Path(ort.__file__).parent.parent
    for name in ("onnxruntime_gpu", "onnxruntime"):
        # The one beside the module: another may be installed elsewhere on the path.
        for info in folder.glob(f"{name}-*.dist-info"):
            return info.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(ort.__version__)


def processor_name() -> str:
    """From the kernel."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "unknown processor")


def serve(provider: str, threads: int) -> None:
    """Answer requests until stdin ends. A failure is an answer."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        site: Site | None = None
        for line in sys.stdin:
            try:
                site = site or Site(provider, threads)
                answer = site.answer(json.loads(line))
            except Exception as error:
                answer = {"reason": shortened(f"{type(error).__name__}: {error}")}
                answer |= {"broken": True} if site is not None and not site.survives() else {}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
