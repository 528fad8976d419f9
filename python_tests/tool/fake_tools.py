"""Stand-ins for the programs that a build calls, so that a whole run takes seconds and can be stopped anywhere.

`cmake` and `ninja` come as a wheel from a mirror, as the pinned ones do. `git` and `apt-get` lie first on PATH: git is
the real one behind a barrier, apt-get knows no archive. A program holds where KVQ_HOLD names it: it writes its process
id to KVQ_HELD and waits to be killed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from python_tests.tool.fake_upstream import Project, write_files

REPO = Path(__file__).resolve().parents[2]

_HOLD = """\
import os, pathlib, sys, time
def hold(point):
    if os.environ.get("KVQ_HOLD") == point:
        aside = pathlib.Path(os.environ["KVQ_HELD"] + ".tmp")
        aside.write_text(str(os.getpid()))
        aside.rename(os.environ["KVQ_HELD"])
        time.sleep(120)
"""

CMAKE = (
    _HOLD
    + """\
args = sys.argv[1:]
source, build = pathlib.Path(args[args.index("-S") + 1]), pathlib.Path(args[args.index("-B") + 1])
build.mkdir(parents=True, exist_ok=True)
hold("cmake")
options = sorted(arg[2:] for arg in args if arg.startswith("-D"))
(build / "CMakeCache.txt").write_text("\\n".join(options))
names = sorted(str(path) for path in (source.parent / "onnxruntime").rglob("*.cc"))
(build / "build.ninja").write_text("\\n".join(names))
"""
)

NINJA = (
    _HOLD
    + """\
build = pathlib.Path(sys.argv[sys.argv.index("-C") + 1])
sources = [pathlib.Path(line) for line in (build / "build.ninja").read_text().splitlines()]
objects = {source: build / "obj" / (source.name + ".o") for source in sources}
stale = [
    source for source, made in objects.items()
    if not made.exists() or made.stat().st_mtime_ns < source.stat().st_mtime_ns
]
library = build / "onnxruntime_pybind11_state.so"
for number, source in enumerate(stale, 1):
    print(f"[{number}/{len(stale) + 1}] CXX {source.name}", flush=True)
    hold(f"ninja {number}")
    with (build / "compiled.log").open("a") as log:
        log.write(source.name + "\\n")
    objects[source].parent.mkdir(exist_ok=True)
    objects[source].write_text("compiled: " + source.read_text())
patchset = next(o for o in (build / "CMakeCache.txt").read_text().splitlines() if o.startswith("KVQ_PATCHSET="))
text = f"kv-patchset={patchset.partition('=')[2]}, " + " ".join(made.read_text() for made in objects.values())
if stale or not library.exists() or library.read_text() != text:
    print(f"[{len(stale) + 1}/{len(stale) + 1}] LINK", flush=True)
    library.write_text(text)
"""
)

GIT = """\
args = sys.argv[1:]
skip = 0
while args[skip:] and args[skip].startswith("-"):
    skip += 2 if args[skip] == "-c" else 1
hold("git " + " ".join(args[skip:skip + 1]))
hold("git " + " ".join(args[skip:]))
os.execv({git!r}, ["git", *args])
"""


def write_wheel(folder: Path, name: str, scripts: Mapping[str, str]) -> str:
    """A wheel with programs and nothing else; returns its line for a requirements file."""
    stem, info = f"{name}-1.0", f"{name}-1.0.dist-info"
    files = {
        **{f"{stem}.data/scripts/{program}": f"#!{sys.executable}\n{text}" for program, text in scripts.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in {**files, f"{info}/RECORD": "".join(f"{member},,\n" for member in files)}.items():
            entry = zipfile.ZipInfo(member)
            entry.external_attr = 0o100755 << 16
            wheel.writestr(entry, text)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Machine:
    """A checkout of this repository with the fake patch set, and a PATH and a mirror with the stand-ins."""

    project: Project
    bin: Path
    mirror: Path

    @property
    def held(self) -> Path:
        return self.bin / "held"

    def start(
        self, *args: str, hold: str = "", env: Mapping[str, str] | None = None, file_limit: int = 0
    ) -> subprocess.Popen[str]:
        """build.py in the background; `hold` names where a program stops, `file_limit` is RLIMIT_FSIZE in bytes."""
        self.held.unlink(missing_ok=True)
        extra = {"KVQ_HOLD": hold, "KVQ_HELD": str(self.held), "XDG_CACHE_HOME": str(self.bin / "cache")}
        path = {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        limit = [shutil.which("prlimit") or "prlimit", f"--fsize={file_limit}:unlimited"] if file_limit else []
        cmd = [*limit, sys.executable, str(self.project.repo / "build.py"), *args]
        cmd += ["--work-dir", str(self.project.cfg.work_dir), "--mirror", str(self.mirror)]
        return subprocess.Popen(
            cmd,
            env={**os.environ, **path, **extra, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *args: str, env: Mapping[str, str] | None = None, file_limit: int = 0, timeout: float = 120
    ) -> Result:
        process = self.start(*args, env=env, file_limit=file_limit)
        out, err = process.communicate(timeout=timeout)
        return Result(process.returncode, out, err)

    def wait_held(self, process: subprocess.Popen[str], seconds: float = 60) -> int:
        """The id of the held program's process, once it is held."""
        deadline = time.monotonic() + seconds
        while not self.held.exists():
            assert process.poll() is None, f"ended before the hold: {process.communicate()}"
            assert time.monotonic() < deadline, "nothing was held"
            time.sleep(0.02)
        return int(self.held.read_text())

    def kill_at(self, hold: str, *args: str) -> int:
        """Run until `hold`, then kill -9 build.py; returns the held program's process id."""
        process = self.start(*args, hold=hold)
        try:
            held = self.wait_held(process)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        return held


def make_machine(root: Path, project: Project) -> Machine:
    """Copy the tool beside the project's patches, with pins of the stand-ins in place of the real ones."""
    shutil.copy(REPO / "build.py", project.repo)
    shutil.copytree(REPO / "kvbuild", project.repo / "kvbuild", ignore=shutil.ignore_patterns("__pycache__", "data"))
    mirror, programs = root / "mir ror", root / "bin"
    mirror.mkdir()
    pin = write_wheel(mirror, "faketools", {"cmake": CMAKE, "ninja": NINJA}).encode()
    data = {f"kvbuild/data/{kind}-requirements.txt": pin for kind in ("build", "test")}
    data["kvbuild/data/precompile.cmake"] = (REPO / "kvbuild/data/precompile.cmake").read_bytes()
    write_files(project.repo, {**data, "patches/v1.0.0/stock-requirements.txt": pin, "patches/v1.0.0/deps.toml": b""})
    real = shutil.which("git")
    assert real
    scripts = {"git": _HOLD + GIT.format(git=real), "apt-get": ""}
    for name, text in scripts.items():
        write_files(programs, {name: f"#!{sys.executable}\n{text}".encode()})
        (programs / name).chmod(0o755)
    return Machine(project, programs, mirror)
