"""The seven stages of a build: what each depends on, does, and leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbuild import (
    checkout,
    configure,
    cudawheel,
    deps,
    doctor,
    log,
    ninja,
    patchset,
    stamps,
    testrun,
    toolchain,
    toolkit,
    venv,
)
from kvbuild import wheel as wheels
from kvbuild.errors import BuildError, SourceError
from kvbuild.git import Git
from kvbuild.source import fetch_digest, fetch_source
from kvbuild.stages import Outputs, Run, Stage

PYTHON_MODULE = "onnxruntime_pybind11_state*.so"
"""The native library, in the build directory."""


# --- doctor


def _doctor(run: Run) -> Outputs:
    doctor.examine(run.cfg, run.base)
    return {}


# --- fetch: everything that needs the network


def _fetch_digest(run: Run) -> str:
    cfg = run.cfg
    pins = [venv.build_requirements(cfg), venv.test_requirements(cfg), venv.stock_requirements(cfg)]
    cuda = [str(cfg.cuda_home), stamps.file_id(cfg.cuda_home / "bin" / "nvcc")] if cfg.cuda_home else []
    return stamps.digest_of(
        {
            "source": fetch_digest(cfg, run.base),
            "dependencies": deps.inputs_digest(cfg),
            "wheels": [path.read_text(encoding="utf-8") for path in pins],
            "python": [str(cfg.python), stamps.file_id(cfg.python)],
            "cuda": [*cuda, str(cfg.cudnn_home), str(cfg.cuda_arch)],
        }
    )


def _fetch(run: Run) -> Outputs:
    cfg, log_path = run.cfg, run.log_path("fetch")
    python = venv.ensure_build_venv(cfg, log_path)
    for requirements in (venv.test_requirements(cfg), venv.stock_requirements(cfg)):
        venv.download_wheels(cfg, python, requirements, log_path)
    source = fetch_source(cfg, run.base)
    store = Git(cfg.repo_store, error=SourceError)
    outputs: Outputs = {
        "commit": source.commit,
        "dependencies": deps.fetch_all(cfg, lambda path: _upstream_file(store, path), python),
        "note": f"source from {source.kind}",
    }
    if cfg.cuda_home:
        outputs["cuda_version"] = toolchain.nvcc_version(cfg.cuda_home)
        outputs["cuda_arch"] = toolkit.architectures(cfg, cfg.cuda_home)
        outputs["toolkit"] = str(toolkit.prepare(cfg, cfg.cuda_home, python))
    return outputs


def _upstream_file(store: Git, path: str) -> bytes:
    return store.run("cat-file", "blob", f"{patchset.UPSTREAM}:{path}").stdout


def _fetch_valid(run: Run, outputs: Outputs) -> bool:
    if not run.cfg.repo_store.exists() or not venv.build_python(run.cfg).exists():
        return False
    folders = [*outputs["dependencies"].values(), *filter(None, [outputs.get("toolkit")])]
    held = Git(run.cfg.repo_store, error=SourceError).resolve(patchset.UPSTREAM)
    return held == outputs["commit"] and all(Path(folder).exists() for folder in folders)


# --- apply


def _apply_digest(run: Run) -> str:
    return stamps.digest_of([run.outputs["fetch"]["commit"], patchset.patchset_digest(run.cfg, run.base)])


def _apply(run: Run) -> Outputs:
    result = patchset.apply(run.cfg, run.base)
    return {"commit": result.commit, "note": f"patched tree {result.tree[:12]}"}


def _apply_valid(run: Run, outputs: Outputs) -> bool:
    """The user's own commits on top are welcome: they are built until `build.py export` or the next apply."""
    if not (run.cfg.src / ".git").exists():
        return False
    return checkout.open_tree(Git(run.cfg.repo_store), run.cfg.src).is_ancestor(outputs["commit"], "HEAD")


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """The build tree as it is now, with what the user changed there."""

    head: str
    edits: dict[str, list[int]]
    """files that differ from the commit, with size and mtime"""
    git: Git


def _tree(run: Run) -> _Tree:
    git = checkout.open_tree(Git(run.cfg.repo_store), run.cfg.src)
    status = git.fields("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
    edits = {row[3:]: stamps.file_id(run.cfg.src / row[3:]) for row in status}
    return _Tree(head=git.resolve("HEAD") or "", edits=edits, git=git)


# --- configure


def _inputs(run: Run, tree: _Tree) -> configure.Inputs:
    fetched = run.outputs["fetch"]
    edited = tree.edits or tree.head != run.outputs["apply"]["commit"]
    digest = patchset.patchset_digest(run.cfg, run.base)[:12]
    return configure.Inputs(
        dependencies=fetched["dependencies"],
        patchset=f"{digest}-edited" if edited else digest,
        cuda=_cuda_target(fetched),
    )


def _cuda_target(fetched: Outputs) -> cudawheel.Target | None:
    if "toolkit" not in fetched:
        return None
    return cudawheel.Target(
        version=fetched["cuda_version"], architectures=fetched["cuda_arch"], toolkit=Path(fetched["toolkit"])
    )


def _configure_digest(run: Run) -> str:
    tree = _tree(run)
    names = tree.git.text("ls-tree", "-r", "--name-only", "HEAD")
    added_or_removed = [f"{name} {state[0] > 0}" for name, state in sorted(tree.edits.items())]
    files = stamps.digest_of([names, added_or_removed])
    return configure.digest(run.cfg, run.base, _inputs(run, tree), files)


def _configure(run: Run) -> Outputs:
    inputs = _inputs(run, _tree(run))
    configure.run(run.cfg, run.base, inputs, run.log_path("configure"))
    return {"patchset": inputs.patchset, "note": f"patch set {inputs.patchset}"}


def _configure_valid(run: Run, outputs: Outputs) -> bool:
    return (run.cfg.build_dir / "build.ninja").exists()


# --- build


def _build_digest(run: Run) -> str:
    tree = _tree(run)
    return stamps.digest_of([run.digests["configure"], tree.head, tree.edits])


def _build(run: Run) -> Outputs:
    cfg, log_path = run.cfg, run.log_path("build")
    python_files = _python_files(_tree(run))
    record = cfg.stamps / f"python-files-{cfg.variant}.json"
    known = stamps.load(record)
    if known is None or known.digest != python_files:
        # Upstream copies Python files as a step after linking this library; ninja does not know them as inputs.
        for library in cfg.build_dir.glob(PYTHON_MODULE):
            library.unlink()
    jobs = ninja.default_jobs(cfg)
    log.info(f"  {jobs} jobs, log: {log_path}")
    program = venv.build_python(cfg).parent / "ninja"
    used = ninja.build(program, cfg.build_dir, jobs, log_path, configure.environment(cfg))
    if not any(cfg.build_dir.glob(PYTHON_MODULE)):
        msg = f"ninja succeeded, but {cfg.build_dir}/{PYTHON_MODULE} is not there"
        raise BuildError(msg, "an option after -- turned the Python binding off")
    stamps.save(record, stamps.Stamp(digest=python_files, seconds=0))
    return {"note": f"{used} jobs"}


def _python_files(tree: _Tree) -> str:
    listed = tree.git.fields("ls-tree", "-r", "-z", "HEAD", "onnxruntime")
    edits = {name: state for name, state in tree.edits.items() if name.endswith(".py")}
    return stamps.digest_of([[row for row in listed if row.endswith(".py")], edits])


def _build_valid(run: Run, outputs: Outputs) -> bool:
    return any(run.cfg.build_dir.glob(PYTHON_MODULE))


# --- wheel


def _wheel_digest(run: Run) -> str:
    return stamps.digest_of([run.digests["build"], wheels.local_version(run.base)])


def _wheel(run: Run) -> Outputs:
    log_path = run.log_path("wheel")
    cuda = _cuda_target(run.outputs["fetch"])
    path = wheels.pack(run.cfg, run.base, cuda, log_path)
    made = wheels.check(run.cfg, run.base, path, run.outputs["configure"]["patchset"], log_path, cuda)
    return {
        "path": str(made.path),
        "file": stamps.file_id(made.path),
        "size": made.size,
        "sha256": made.sha256,
        "build_info": made.build_info,
        "note": made.path.name,
    }


def _wheel_valid(run: Run, outputs: Outputs) -> bool:
    return bool(stamps.file_id(Path(outputs["path"])) == outputs["file"])


# --- test


def _test_digest(run: Run) -> str:
    return testrun.digest(run.cfg, run.outputs["wheel"]["sha256"])


def _test(run: Run) -> Outputs:
    counts = testrun.run(run.cfg, Path(run.outputs["wheel"]["path"]), run.log_path("test"))
    return {"note": str(counts)}


def _nothing_to_lose(run: Run, outputs: Outputs) -> bool:
    """For stages that leave no files."""
    return True


TABLE: dict[str, Stage] = {
    "doctor": Stage(digest=lambda run: doctor.digest(run.cfg, run.base), execute=_doctor, valid=_nothing_to_lose),
    "fetch": Stage(digest=_fetch_digest, execute=_fetch, valid=_fetch_valid),
    "apply": Stage(digest=_apply_digest, execute=_apply, valid=_apply_valid),
    "configure": Stage(digest=_configure_digest, execute=_configure, valid=_configure_valid),
    "build": Stage(digest=_build_digest, execute=_build, valid=_build_valid),
    "wheel": Stage(digest=_wheel_digest, execute=_wheel, valid=_wheel_valid),
    "test": Stage(digest=_test_digest, execute=_test, valid=_nothing_to_lose),
}
