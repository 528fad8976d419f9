"""Lint without ONNX Runtime's source: `python ci/check.py [--fix]` runs ruff, mypy, clang-format and the patch lint."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
OVERLAY = REPO / "patches" / "overlay"
SOURCES = ("*.h", "*.cc", "*.cpp", "*.cu", "*.cuh")
MAX_COLUMNS = 120


def lint_environment() -> Path:
    """A virtual environment with the pinned linters, made once per state of the pins; returns its bin folder."""
    pins = REPO / "ci" / "lint-requirements.txt"
    venv = REPO / ".work" / f"venv-lint-cp{sys.version_info.major}{sys.version_info.minor}"
    stamp = venv / "pins.txt"
    if not stamp.exists() or stamp.read_bytes() != pins.read_bytes():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        install = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--require-hashes", "-r", str(pins)], check=True)
        stamp.write_bytes(pins.read_bytes())
    return venv / "bin"


def run(cmd: list[str]) -> bool:
    """Run one tool from the repository's root; True if it is content."""
    print("$", " ".join(cmd), flush=True)
    return subprocess.run(cmd, cwd=REPO, check=False).returncode == 0


def check_overlay_format(clang_format: Path, *, fix: bool) -> bool:
    ok = True
    groups: dict[str, list[str]] = {"clang-format.yaml": [], "clang-format-mlas.yaml": []}
    for pattern in SOURCES:
        for path in sorted(OVERLAY.rglob(pattern)):
            mlas = "/core/mlas/" in path.as_posix()
            groups["clang-format-mlas.yaml" if mlas else "clang-format.yaml"].append(str(path.relative_to(REPO)))
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                # MLAS has no limit of its own upstream; its argument lists run long.
                if not mlas and len(line) > MAX_COLUMNS:
                    print(f"{path.relative_to(REPO)}:{number}: {len(line)} columns, more than {MAX_COLUMNS}")
                    ok = False
    for style, files in groups.items():
        mode = ["-i"] if fix else ["--dry-run", "-Werror"]
        if files:
            ok &= run([str(clang_format), f"--style=file:ci/{style}", *mode, *files])
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--fix", action="store_true", help="let the formatters rewrite files")
    fix = parser.parse_args().fix
    tools = lint_environment()
    os.environ["MYPY_CACHE_DIR"] = str(REPO / ".work" / "mypy")
    python = str(tools / "python")
    results = {
        "ruff check": run([str(tools / "ruff"), "check", *(["--fix"] if fix else [])]),
        "ruff format": run([str(tools / "ruff"), "format", *([] if fix else ["--check"])]),
        "mypy": run([str(tools / "mypy"), "--python-executable", python]),
        "clang-format": check_overlay_format(tools / "clang-format", fix=fix),
        "patch headers": run([sys.executable, "build.py", "check", "--no-source"]),
        "patch table": run([sys.executable, "ci/patch_table.py", *(["--fix"] if fix else [])]),
    }
    for name, ok in results.items():
        print(f"{'ok  ' if ok else 'FAIL'} {name}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
