"""Packs the wheel and proves that it is the one that was asked for."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from kvbuild import configure, cudawheel, log, proc, venv
from kvbuild.config import Base, Config
from kvbuild.download import digest_file
from kvbuild.errors import BuildError

MIB = 1 << 20
SMALLEST_MIB = 3
"""A wheel without its native library is smaller than this."""


@dataclass(frozen=True, kw_only=True)
class Wheel:
    path: Path
    size: int
    sha256: str
    build_info: str
    """what the installed library says of itself"""


def local_version(base: Base) -> str:
    return f"+kvq.{base.revision}"


def pack(cfg: Config, base: Base, cuda: cudawheel.Target | None, log_path: Path) -> Path:
    """Run upstream's setup.py in the build directory; returns the finished file in `cfg.dist_dir`."""
    refresh_providers(cfg.build_dir)
    # setup.py adds to what an earlier run left in these folders.
    for stale in ("dist", "build"):
        shutil.rmtree(cfg.build_dir / stale, ignore_errors=True)
    flags = ["--wheel_name_suffix=gpu", f"--cuda_version={cuda.version}"] if cuda else []
    cmd: proc.Command = [venv.build_python(cfg), cfg.src / "setup.py", "bdist_wheel", *flags]
    env = {**configure.environment(cfg), "KVQ_LOCAL_VERSION": local_version(base)}
    proc.run(cmd, cwd=cfg.build_dir, env=env, log=log_path, what="setup.py bdist_wheel")
    made = sorted((cfg.build_dir / "dist").glob("*.whl"))
    if len(made) != 1:
        msg = f"setup.py made {len(made)} wheels instead of one"
        raise BuildError(msg, todo=f"see {log_path}")
    shutil.rmtree(cfg.dist_dir, ignore_errors=True)
    cfg.dist_dir.mkdir(parents=True)
    return Path(shutil.move(made[0], cfg.dist_dir / made[0].name))


def refresh_providers(build_dir: Path) -> None:
    """Bring the package's copies of the provider libraries up to date.

    Upstream copies them as a step after linking the Python module, which an edit of a provider alone does not relink.
    """
    for library in build_dir.glob("libonnxruntime_providers_*.so"):
        copy = build_dir / "onnxruntime" / "capi" / library.name
        if copy.exists() and copy.stat().st_mtime < library.stat().st_mtime:
            shutil.copy2(library, copy)


def check(
    cfg: Config, base: Base, wheel: Path, patchset: str, log_path: Path, cuda: cudawheel.Target | None = None
) -> Wheel:
    """Name, version, size, device code, and an import where nothing else is installed. Raises BuildError."""
    expected = f"onnxruntime{'-gpu' if cuda else ''}", base.version + local_version(base)
    if (found := _metadata(wheel)) != expected:
        msg = f"{wheel.name} is {' '.join(found)}, expected {' '.join(expected)}"
        raise BuildError(msg, "the patch that gives the wheel its version is not in effect", f"see {log_path}")
    size = wheel.stat().st_size
    if size < SMALLEST_MIB * MIB:
        msg = f"{wheel.name} has {size / MIB:.1f} MiB only"
        raise BuildError(msg, "the native library is not in it", f"see {log_path}")
    if cuda:
        with cudawheel.unpacked(wheel, cfg.base_dir) as library:
            log.info(f"  CUDA provider: code for {cudawheel.check(library, cuda)}")
            cudawheel.check_symbols(library, cuda)
    info = _import(cfg, wheel, log_path)
    if patchset not in info["build_info"]:
        msg = f"the library in {wheel.name} does not name the patch set {patchset}: {info['build_info']}"
        raise BuildError(msg, "it was compiled before the last change of the patch set", "run again with --from build")
    if cuda and "CUDAExecutionProvider" not in info["providers"]:
        msg = f"the library in {wheel.name} has no CUDA provider, only {', '.join(info['providers'])}"
        raise BuildError(msg, "an option after -- turned it off", f"see {log_path}")
    return Wheel(path=wheel, size=size, sha256=digest_file(wheel), build_info=info["build_info"])


def second_runtime(python: Path) -> list[str]:
    """Distributions of ONNX Runtime in the environment of `python`, such as onnxruntime 1.21.0.

    More than one overwrite each other's files, which shows as a missing provider or operator.
    """
    done = proc.run([python, "-c", _DISTRIBUTIONS], capture=True, check=False, timeout=60)
    return [str(name) for name in json.loads(done.stdout or b"[]")]


_DISTRIBUTIONS = """
import importlib.metadata as m, json
found = {(d.metadata["Name"], d.version) for d in m.distributions() if d.read_text("top_level.txt") == "onnxruntime\\n"}
print(json.dumps(sorted(f"{name} {version}" for name, version in found)))
"""

_IMPORT = """
import json, onnxruntime as ort
print(json.dumps(dict(file=ort.__file__, version=ort.__version__, build_info=ort.get_build_info(),
    providers=ort.get_available_providers())))
"""


def _import(cfg: Config, wheel: Path, log_path: Path) -> dict[str, Any]:
    """Import the wheel from a fresh environment. Its CUDA libraries load on demand, so no GPU is needed."""
    with tempfile.TemporaryDirectory(dir=cfg.base_dir, prefix="venv-import-") as folder:
        python = venv.ensure(cfg, Path(folder), [venv.test_requirements(cfg)], log_path, wheels=[wheel])
        done = proc.run(
            [python, "-c", _IMPORT], cwd=Path(folder), env=venv.ISOLATED, capture=True, what="import onnxruntime"
        )
        info: dict[str, Any] = json.loads(done.stdout)
        if not Path(info["file"]).is_relative_to(Path(folder).resolve()):
            msg = f"import onnxruntime took {info['file']} instead of the wheel"
            raise BuildError(msg, "another ONNX Runtime is visible in fresh environments of this interpreter")
    return info


def _metadata(wheel: Path) -> tuple[str, str]:
    """Name and version, from the wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    return fields["Name"], fields["Version"]
