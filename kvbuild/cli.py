"""The command line: options to a Config, a verb to what does it, an error to an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvbuild import check, clean, export, lock, log, rebase, report, stages, steps, venv
from kvbuild.config import STAGES, Base, Config, load_base, load_bases
from kvbuild.errors import INTERRUPTED, EnvironmentProblem, KvBuildError, UsageError
from kvbuild.sync import write_atomically

ALL = "all"
VERBS = (ALL, *STAGES, "status", "check", "export", "rebase", "clean")
_ONLY_WITH = {
    "mbox": ("export",),
    "onto": ("rebase",),
    "no_source": ("check",),
    "update_trees": ("check",),
    "everything": ("clean", "test", ALL),
    "first": (ALL,),
    "last": (ALL,),
    "require_gpu": ("test", ALL),
    "dry_run": (ALL, *STAGES),
}
"""Options that mean something with these verbs alone."""
_OPTION_NAMES = {"everything": "--all", "first": "--from", "last": "--until"}


def main(argv: Sequence[str], repo: Path) -> int:
    """Run one command; returns the exit code. `repo` is the checkout that build.py lies in."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        run(argv, repo)
    except KvBuildError as exc:
        log.error(f"{exc.kind}: {exc}" if exc.kind != "error" else str(exc))
        return exc.exit_code
    except KeyboardInterrupt:
        log.error("interrupted; the same command goes on from here")
        return INTERRUPTED
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        problem = EnvironmentProblem(
            f"the disk is full ({exc.filename or 'while writing'})", todo="free space and run again"
        )
        log.error(f"{problem.kind}: {problem}")
        return problem.exit_code
    return 0


def run(argv: Sequence[str], repo: Path) -> None:
    """As `main`, but failures are raised: what tests call."""
    args = parse(argv)
    log.set_level(args.verbosity)
    cfg = make_config(args, repo)
    base = load_base(cfg)
    if cfg.dry_run or args.verb == "status":
        rows = stages.plan(stages.Run(cfg=cfg, base=base), steps.TABLE)
        print(report.status(rows) if args.verb == "status" else report.dry_run(cfg, rows))
        return
    if args.verb == "check" and cfg.no_source:
        check.check(cfg, base)
        return
    if args.verb == "clean" and not cfg.work_dir.exists():
        log.info(f"{cfg.work_dir} does not exist: nothing to remove")
        return
    lock.claim(cfg.work_dir, ours=cfg.work_dir == _own_work_dir(repo))
    with lock.exclusive(cfg.work_dir):
        if args.verb != "clean":
            for name in filter(None, (cfg.base, cfg.onto)):
                lock.claim(cfg.work_dir / name)
        _dispatch(args.verb, cfg, base)


def _dispatch(verb: str, cfg: Config, base: Base) -> None:
    if verb == "clean":
        clean.clean(cfg)
    elif verb == "check":
        check.check(cfg, base)
    elif verb == "rebase":
        rebase.rebase(cfg, base)
    elif verb == "export" and cfg.mbox:
        export.export_mbox(cfg, base, cfg.mbox)
    elif verb == "export":
        export.export(cfg, base)
    else:
        _build(cfg, base)


def _build(cfg: Config, base: Base) -> None:
    shown = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    text = json.dumps(shown, default=str, indent=1)
    write_atomically(cfg.base_dir / "config.json", text.encode() + b"\n")
    log.info(f"{base.name}, {cfg.variant.replace('-', ', ')}, in {cfg.work_dir}")
    log.debug(text)
    state = stages.Run(cfg=cfg, base=base)
    results = stages.run_stages(state, steps.TABLE)
    print(report.summary(results, state.outputs))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Raises UsageError; `--help` prints and exits as usual."""
    own, cmake = _split(argv)
    args = _parser().parse_args(own)
    args.cmake_args = tuple(cmake)
    for name, verbs in _ONLY_WITH.items():
        if getattr(args, name) not in (None, False) and args.verb not in verbs:
            option = _OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
            msg = f"{option} means nothing with {args.verb}"
            raise UsageError(msg, todo=f"use it with {' or '.join(verbs)}")
    if args.verb in STAGES:
        args.first = args.last = args.verb
    args.first, args.last = args.first or STAGES[0], args.last or STAGES[-1]
    if STAGES.index(args.first) > STAGES.index(args.last):
        msg = f"--from {args.first} comes after --until {args.last}"
        raise UsageError(msg, todo=f"the order is {', '.join(STAGES)}")
    return args


def make_config(args: argparse.Namespace, repo: Path) -> Config:
    """Resolve paths and fill defaults. Raises UsageError for what does not exist."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    python = _interpreter(args.python)
    source = args.source
    if source not in ("auto", "git", "debian"):
        source = str(_existing("--source", source))
    return Config(
        repo=repo.resolve(),
        base=args.base or next(iter(load_bases(repo / "patches" / "bases.toml"))),
        work_dir=Path(args.work_dir).expanduser().resolve() if args.work_dir else _own_work_dir(repo),
        cache_dir=(Path(cache_home) if cache_home else Path.home() / ".cache") / "kvbuild",
        source=source,
        mirrors=tuple(_folder("--mirror", text) for text in args.mirror),
        cuda_home=_folder("--cuda-home", args.cuda_home) if args.cuda_home else None,
        cudnn_home=_folder("--cudnn-home", args.cudnn_home) if args.cudnn_home else None,
        cuda_arch=args.cuda_arch,
        python=python,
        python_tag=venv.probe(python).tag,
        jobs=args.jobs,
        profile=args.profile,
        first=args.first,
        last=args.last,
        force=args.force,
        dry_run=args.dry_run,
        verbosity=args.verbosity,
        cmake_args=args.cmake_args,
        require_gpu=args.require_gpu,
        all_tests=args.everything,
        clean_all=args.everything,
        mbox=Path(args.mbox).resolve() if args.mbox else None,
        onto=args.onto,
        no_source=args.no_source,
        update_trees=args.update_trees,
    )


def _own_work_dir(repo: Path) -> Path:
    return repo.resolve() / ".work"


def _interpreter(text: str | None) -> Path:
    if text is None:
        return Path(sys.executable)
    found = shutil.which(text)
    if not found:
        msg = f"--python {text}: no such program"
        raise UsageError(msg, todo="give the path of an interpreter, or its name on PATH")
    # Not resolved: a virtual environment's python is a link, and what it links to is another environment.
    return Path(found).absolute()


def _existing(option: str, text: str) -> Path:
    path = Path(text).expanduser().resolve()
    if not path.exists():
        msg = f"{option} {text}: no such path"
        raise UsageError(msg, f"it stands for {path}", "give a path that exists")
    return path


def _folder(option: str, text: str) -> Path:
    path = _existing(option, text)
    if not path.is_dir():
        msg = f"{option} {text} is not a directory"
        raise UsageError(msg, todo="give a directory")
    return path


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own arguments, and what follows `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, todo=f"see {self.prog} --help")


def _jobs(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        msg = f"{text!r} is not a number of jobs"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="build.py",
        description="Builds a wheel of ONNX Runtime with a quantized KV cache.",
        epilog="Exit codes: 2 usage, 3 environment, 4 source, 5 patch, 6 build, 7 test. What follows -- goes to CMake.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("verb", nargs="?", choices=VERBS, default=ALL, metavar="verb", help=f"{', '.join(VERBS)}; without one: {ALL}")
    what = parser.add_argument_group("what to build").add_argument
    what("--base", help="release of ONNX Runtime, a table of patches/bases.toml (default: its first)")
    what("--profile", choices=("full", "decoder"), default="full", help="decoder: only what language models use")
    what("--python", help="interpreter that the wheel is for (default: the one that runs build.py)")
    what("--cuda-home", help="CUDA toolkit; builds onnxruntime-gpu")
    what("--cudnn-home", help="cuDNN 9 (default: the toolkit's, else a pinned package)")
    what("--cuda-arch", help="such as 90-real or 80;90 (default: the GPUs of this machine, else 80-real;90)")
    where = parser.add_argument_group("where from, where to").add_argument
    where("--source", default="auto", help="git, debian, or the path of an unpacked tree or archive (default: auto)")
    where("--mirror", action="append", default=[], metavar="DIR", help="look for downloads here first; repeatable")
    where("--work-dir", help="everything that is built (default: .work beside build.py)")
    how = parser.add_argument_group("how").add_argument
    how("--jobs", type=_jobs, help="compilers at a time (default: from processors and memory)")
    how("--from", dest="first", choices=STAGES, metavar="STAGE", help="first stage")
    how("--until", dest="last", choices=STAGES, metavar="STAGE", help="last stage")
    how("--force", action="store_true", help="run stages that are current, and try untested CUDA releases")
    how("--dry-run", action="store_true", help="show what would run")
    how("-v", dest="verbosity", action="store_const", const=log.VERBOSE, default=log.NORMAL, help="show commands")
    how("-q", dest="verbosity", action="store_const", const=log.QUIET, help="show warnings and results only")
    only = parser.add_argument_group("with one verb").add_argument
    only(
        "--all",
        dest="everything",
        action="store_true",
        help="test: also the build tool's; clean: the whole work directory",
    )
    only("--require-gpu", action="store_true", help="test: fail where no GPU test ran")
    only("--mbox", metavar="FILE", help="export: overlay and patches as one mailbox for git am")
    only("--onto", metavar="BASE", help="rebase: the base to carry the patches to")
    only("--no-source", action="store_true", help="check: only what needs no source")
    only("--update-trees", action="store_true", help="check: record the tree ids in bases.toml")
    return parser


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
