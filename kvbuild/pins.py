"""For maintainers: `python -m kvbuild.pins` writes the *-requirements.txt beside every *-requirements.in.

Each requirement is downloaded for every supported interpreter and processor, so a hash stands there only for a file
that was seen. The lists stay short enough to review, unlike those with every file of a release.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from kvbuild import log, proc
from kvbuild.download import digest_file

REPO = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
GLIBC_TAGS = ("manylinux2014", "manylinux_2_12", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")
_MARKER = re.compile(r'python_version (<|>=) "3\.(\d+)"$')


def main() -> int:
    folders = ("kvbuild/data", "patches/*", "ci")
    sources = [path for folder in folders for path in REPO.glob(f"{folder}/*-requirements.in")]
    for source in sorted(sources):
        lines = [line.strip() for line in source.read_text(encoding="utf-8").splitlines()]
        rows = [_pinned(line) for line in lines if line and not line.startswith("#")]
        head = (
            f"# Written by `python -m kvbuild.pins` from {source.name}: CPython {', '.join(PYTHONS)} on glibc Linux.\n"
        )
        source.with_suffix(".txt").write_text(head + "".join(rows), encoding="utf-8")
    return 0


def _pinned(requirement: str) -> str:
    name, _, marker = (part.strip() for part in requirement.partition(";"))
    hashes = set()
    for python in PYTHONS:
        if _applies(marker, python):
            for machine in MACHINES:
                hashes.add(_download(name, python, machine))
    return f"{requirement} \\\n" + " \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(hashes)) + "\n"


def _applies(marker: str, python: str) -> bool:
    if not marker:
        return True
    match = _MARKER.match(marker)
    if not match:
        msg = f"marker {marker!r}: only python_version < or >= is understood"
        raise ValueError(msg)
    minor, bound = int(python.split(".")[1]), int(match[2])
    return minor < bound if match[1] == "<" else minor >= bound


def _download(requirement: str, python: str, machine: str) -> str:
    platforms = [f"--platform={tag}_{machine}" for tag in GLIBC_TAGS]
    with tempfile.TemporaryDirectory() as folder:
        cmd = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        cmd += [f"--python-version={python}", "--implementation=cp", *platforms, f"--dest={folder}", requirement]
        proc.run(cmd, what=f"pip download {requirement}")
        (file,) = Path(folder).iterdir()
        log.info(file.name)
        return digest_file(file)


if __name__ == "__main__":
    sys.exit(main())
