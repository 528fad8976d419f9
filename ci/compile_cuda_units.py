"""Compile what the patch set adds to and edits in the CUDA provider against the real headers, and nothing else.

    python ci/compile_cuda_units.py --cuda-home /usr/local/cuda [--jobs 2] [options of build.py]

A whole CUDA build takes hours on a small machine. This one configures it as `build.py` does, then has ninja build only
the objects whose source file comes from the overlay or is named by a patch. No GPU is needed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from kvbuild import cli, configure, proc, venv  # noqa: E402
from kvbuild.config import Config  # noqa: E402
from kvbuild.ninja import default_jobs  # noqa: E402
from kvbuild.patchfile import read_patches  # noqa: E402

FOLDERS = ("onnxruntime/contrib_ops/cuda/", "onnxruntime/core/providers/cuda/")
SUFFIXES = (".cc", ".cu")
OBJECT = re.compile(r"^build (\S+\.o): C\S+COMPILER__\S+ (\S+)", re.MULTILINE)


def patched_sources(cfg: Config) -> set[str]:
    """Translation units of the CUDA provider, relative to ONNX Runtime's root, that overlay or series touch."""
    overlay = cfg.repo / "patches" / "overlay"
    names = {path.relative_to(overlay).as_posix() for path in overlay.rglob("*") if path.is_file()}
    for patch in read_patches(cfg.series_dir):
        names |= {edit.path for edit in patch.edits}
    return {name for name in names if name.startswith(FOLDERS) and name.endswith(SUFFIXES)}


def objects(cfg: Config, sources: set[str]) -> list[str]:
    """Ninja targets of the sources; a source that the build does not know is an error of the overlay."""
    rules = (cfg.build_dir / "build.ninja").read_text(encoding="utf-8")
    known = {source: target for target, source in OBJECT.findall(rules)}
    wanted = {name: known.get(str(cfg.src / name)) for name in sorted(sources)}
    lost = [name for name, target in wanted.items() if target is None]
    if lost:
        sys.exit(f"no rule of the build compiles {', '.join(lost)}")
    return [target for target in wanted.values() if target]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-arch", default="90-real", help="default: %(default)s")
    parser.add_argument("--jobs", default="", help="default: from processors and memory")
    own, rest = parser.parse_known_args()
    options = ["--cuda-arch", own.cuda_arch, *rest]
    status = cli.main([*options, "--until", "configure"], REPO)
    if status != 0:
        return status
    cfg = cli.make_config(cli.parse(options), REPO)
    targets = objects(cfg, patched_sources(cfg))
    if not targets:
        sys.exit("the patch set touches no source of the CUDA provider")
    ninja = venv.build_python(cfg).parent / "ninja"
    jobs = ["-j", own.jobs or str(default_jobs(cfg))]
    proc.run(
        [ninja, "-C", cfg.build_dir, *jobs, *targets],
        env=configure.environment(cfg),
        on_line=lambda line: print(line, flush=True),
        what="ninja",
    )
    print(f"{len(targets)} translation units of the CUDA provider compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
