"""The operators of the decoder profile: kernel registrations without the others."""

from __future__ import annotations

import filecmp
import re
import shutil
from pathlib import Path

from kvbuild import proc
from kvbuild.config import Config
from kvbuild.errors import SourceError

GENERATED = "op_reduction.generated"
"""The folder that ONNX Runtime's operator reduction writes and its CMake files read."""
CUDA_CONTRIB = "onnxruntime/contrib_ops/cuda/cuda_contrib_kernels.cc"
_DOMAINS = {"ONNX": "ai.onnx", "MS": "com.microsoft"}
_REGISTRATION = re.compile(r"\s*BuildKernelCreateInfo<CUDA_(ONNX|MS)_OP_\w*CLASS_NAME\([^)]*\b(\w+)\)>,")


def configuration(cfg: Config) -> Path:
    """The operators to keep, in ONNX Runtime's own format: domain;versions;names."""
    return cfg.data / "decoder.config"


def reduce(cfg: Config, python: Path, env: dict[str, str | None], log_path: Path) -> None:
    """Write the reduced kernel registrations; files that stay the same keep their mtime, so nothing recompiles."""
    scratch = cfg.base_dir / "op-reduction.part"
    shutil.rmtree(scratch, ignore_errors=True)
    script = cfg.src / "tools" / "ci_build" / "reduce_op_kernels.py"
    flags = ["--use_cuda"] if cfg.cuda_home else []
    cmd: proc.Command = [python, script, configuration(cfg), "--cmake_build_dir", scratch, *flags]
    proc.run(cmd, env=env, log=log_path, what="reduce_op_kernels.py")
    fresh, target = scratch / GENERATED, cfg.build_dir / GENERATED
    if cfg.cuda_home:
        # Upstream's script does not know the macros of this file and leaves it as it is.
        contrib = fresh / CUDA_CONTRIB
        text = contrib.read_text(encoding="utf-8")
        contrib.write_text(without_registrations(text, read(configuration(cfg))), encoding="utf-8")
    for old in sorted(target.rglob("*"), reverse=True):
        if old.is_file() and not (fresh / old.relative_to(target)).exists():
            old.unlink()
    for new in (path for path in fresh.rglob("*") if path.is_file()):
        old = target / new.relative_to(fresh)
        if not old.exists() or not filecmp.cmp(new, old, shallow=False):
            old.parent.mkdir(parents=True, exist_ok=True)
            new.replace(old)
    shutil.rmtree(scratch)


def read(path: Path) -> dict[str, set[str]]:
    """Domain -> names of its operators."""
    rows = [line.split(";") for line in path.read_text(encoding="utf-8").splitlines()]
    return {row[0]: set(row[2].split(",")) for row in rows if len(row) == 3 and not row[0].startswith("#")}


def without_registrations(text: str, kept: dict[str, set[str]]) -> str:
    """The source with the registrations of other operators than those of `kept` as comments."""
    lines, found = [], set()
    for line in text.splitlines(keepends=True):
        match = _REGISTRATION.match(line)
        keep = not match or match[2] in kept[_DOMAINS[match[1]]]
        if match and keep:
            found.add(match[2])
        lines.append(line if keep else f"// {line}")
    if not found:
        msg = f"{CUDA_CONTRIB} registers none of the profile's operators"
        raise SourceError(msg, "this release writes registrations in another way", "change kvbuild/operators.py")
    return "".join(lines)
