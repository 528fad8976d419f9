"""git as plumbing: fixed identity and dates, none of the user's settings, no search for a repository."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGXFSZ

from kvbuild import proc
from kvbuild.errors import EnvironmentProblem, KvBuildError, PatchError

MIN_VERSION = (2, 32)
"""GIT_CONFIG_GLOBAL appeared there, GIT_CONFIG_COUNT one release earlier."""

ZERO_ID = "0" * 40
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"

_NAME, _EMAIL, _DATE = "kvbuild", "kvbuild@localhost", "2025-01-01T00:00:00+0000"
_IDENTITY = {
    "GIT_AUTHOR_NAME": _NAME,
    "GIT_AUTHOR_EMAIL": _EMAIL,
    "GIT_AUTHOR_DATE": _DATE,
    "GIT_COMMITTER_NAME": _NAME,
    "GIT_COMMITTER_EMAIL": _EMAIL,
    "GIT_COMMITTER_DATE": _DATE,
}

_SETTINGS = {
    "advice.detachedHead": "false",
    "core.autocrlf": "false",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,  # a hook of the user's must not change what git am commits
    "core.quotePath": "false",
    "core.symlinks": "true",
    "gc.auto": "0",
    "safe.directory": "*",  # a work directory that another user owns is still ours to build in
}

_USER_SETTINGS_OFF = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
}

_DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large", f"killed by signal {SIGXFSZ:d}")

_REPOSITORY_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_CONFIG",
    "GIT_CONFIG_COUNT",
    "GIT_CONFIG_PARAMETERS",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)


@dataclass(frozen=True)
class Entry:
    """A file of a tree: mode as git writes it (100644, 100755, 120000, 160000) and blob id."""

    mode: str
    oid: str


@dataclass(frozen=True)
class Change:
    """A path that differs between two trees; None where it does not exist."""

    path: str
    old: Entry | None
    new: Entry | None


class Git:
    """One repository, by its git directory (or the `.git` file of a linked work tree); None for commands without one.

    `objects` replaces the repository's own object directory. Paths inside a tree are str with surrogate escapes, as
    os.fsdecode makes them.
    A failing command raises `error`.
    """

    def __init__(
        self,
        git_dir: Path | None,
        work_tree: Path | None = None,
        *,
        objects: Path | None = None,
        error: type[KvBuildError] = PatchError,
    ) -> None:
        self._git_dir = git_dir
        self.work_tree = work_tree
        self.objects = objects
        self.error = error

    @property
    def git_dir(self) -> Path:
        assert self._git_dir is not None
        return self._git_dir

    def run(
        self,
        *args: str | Path,
        input: bytes | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float | None = None,
        user_settings: bool = False,
        on_line: Callable[[str], None] | None = None,
        on_tick: Callable[[], None] | None = None,
        what: str = "",
    ) -> proc.Completed:
        """Standard output and exit code of `git *args`.

        `user_settings` lets proxies, credentials and URL rewriting of the user's configuration in, for network access.
        `on_line` gets each line of standard error, `on_tick` is called about once a second.
        """
        try:
            return proc.run(
                ["git", *args],
                cwd=self.work_tree,
                env={**self.environment(user_settings=user_settings), **(env or {})},
                check=check,
                capture=True,
                input=input,
                timeout=timeout,
                on_line=on_line,
                on_tick=on_tick,
                error=self.error,
                what=what or f"git {args[0]}",
            )
        except self.error as exc:
            if any(sign in f"{exc.what} {exc.why}" for sign in _DISK_FULL):
                raise EnvironmentProblem(exc.what, exc.why, "make room on the disk and run again") from exc
            raise

    def environment(self, *, user_settings: bool = False) -> dict[str, str | None]:
        """Variables for a git process; None removes one."""
        inherited = (
            _REPOSITORY_VARIABLES
            if user_settings
            else [k for k in os.environ if k.startswith("GIT_") and k != "GIT_EXEC_PATH"]
        )
        env: dict[str, str | None] = dict.fromkeys(inherited)
        env |= {} if user_settings else _USER_SETTINGS_OFF
        env |= _IDENTITY
        env |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_COUNT": str(len(_SETTINGS))}
        for number, (key, value) in enumerate(_SETTINGS.items()):
            env[f"GIT_CONFIG_KEY_{number}"] = key
            env[f"GIT_CONFIG_VALUE_{number}"] = value
        if self._git_dir:
            env["GIT_DIR"] = str(self._git_dir)
        if self.work_tree:
            env["GIT_WORK_TREE"] = str(self.work_tree)
        if self.objects:
            env["GIT_OBJECT_DIRECTORY"] = str(self.objects)
        return env

    def text(self, *args: str | Path, env: Mapping[str, str] | None = None, input: bytes | None = None) -> str:
        """Output without the trailing newline."""
        return os.fsdecode(self.run(*args, env=env, input=input).stdout).rstrip("\n")

    def fields(self, *args: str | Path) -> list[str]:
        """Output of a command with -z."""
        return os.fsdecode(self.run(*args).stdout).split("\0")[:-1]

    def resolve(self, rev: str) -> str | None:
        """The object id of `rev`, None where it does not exist."""
        done = self.run("rev-parse", "--verify", "--quiet", "--end-of-options", rev, check=False)
        return done.stdout.decode().strip() if done.returncode == 0 else None

    def tree_of(self, rev: str) -> str:
        return self.text("rev-parse", "--verify", "--end-of-options", rev + "^{tree}")

    def is_ancestor(self, rev: str, of: str) -> bool:
        return self.run("merge-base", "--is-ancestor", rev, of, check=False).returncode == 0

    def entries(self, tree: str) -> dict[str, Entry]:
        """All files of a tree by path."""
        found = {}
        for line in self.fields("ls-tree", "-r", "-z", "--full-tree", tree):
            meta, path = line.split("\t", 1)
            mode, _, oid = meta.split()
            found[path] = Entry(mode, oid)
        return found

    def changes(self, old: str, new: str) -> list[Change]:
        """Files that differ between two trees or commits, sorted by path."""
        out = self.fields("diff-tree", "-r", "-z", "--no-renames", "--no-ext-diff", "--full-index", old, new)
        found = []
        for meta, path in zip(out[::2], out[1::2], strict=True):
            old_mode, new_mode, old_id, new_id, _ = meta[1:].split()
            found.append(
                Change(
                    path,
                    Entry(old_mode, old_id) if old_id != ZERO_ID else None,
                    Entry(new_mode, new_id) if new_id != ZERO_ID else None,
                )
            )
        return found

    def blobs(self, oids: Sequence[str], at_once: int = 128) -> Iterator[bytes]:
        """Contents in the order asked for, a batch of `at_once` in memory at a time."""
        for start in range(0, len(oids), at_once):
            wanted = oids[start : start + at_once]
            out = self.run("cat-file", "--batch", input="".join(f"{oid}\n" for oid in wanted).encode()).stdout
            position = 0
            for oid in wanted:
                end_of_header = out.index(b"\n", position)
                header = out[position:end_of_header].split()
                if len(header) != 3 or header[1] != b"blob":
                    msg = f"{self.git_dir}: no blob {oid}"
                    raise self.error(msg, "the repository is damaged", f"remove {self.git_dir.parent} and run again")
                position = end_of_header + 1
                size = int(header[2])
                yield out[position : position + size]
                position += size + 1

    def store_files(self, paths: Sequence[Path]) -> list[str]:
        """Write files as blobs, byte for byte; returns their ids in order."""
        found: list[str] = []
        for start in range(0, len(paths), 256):
            batch = paths[start : start + 256]
            found += self.text("hash-object", "-w", "--no-filters", "--", *batch).split()
        return found

    def store_tree(self, onto: str, entries: Mapping[str, Entry | None], scratch: Path) -> str:
        """The tree `onto` with `entries` laid over it (None removes a path); `scratch` is a free file name."""
        env = {"GIT_INDEX_FILE": str(scratch)}
        rows = [
            f"{entry.mode} {entry.oid}\t{path}\0" if entry else f"0 {ZERO_ID}\t{path}\0"
            for path, entry in entries.items()
        ]
        try:
            self.run("read-tree", onto, env=env)
            self.run("update-index", "-z", "--index-info", input=os.fsencode("".join(rows)), env=env)
            return self.text("write-tree", env=env)
        finally:
            for leftover in (scratch, scratch.with_name(scratch.name + ".lock")):
                leftover.unlink(missing_ok=True)

    def commit(self, tree: str, parents: Iterable[str], message: str) -> str:
        """A commit with the fixed identity and date: the same arguments give the same id everywhere."""
        flags = [flag for parent in parents for flag in ("-p", parent)]
        return self.text("commit-tree", tree, *flags, "-F", "-", input=message.encode())

    def set_ref(self, name: str, oid: str) -> None:
        self.run("update-ref", "--no-deref", name, oid)


def init_store(git_dir: Path, *, error: type[KvBuildError] = PatchError) -> Git:
    """Create the bare repository, or take the one that is there."""
    git = Git(git_dir, error=error)
    if not (git_dir / "HEAD").exists():
        git_dir.mkdir(parents=True, exist_ok=True)
        git.run("init", "--quiet", "--bare", "--object-format=sha1", "--template=")
        for key in ("core.autocrlf", "core.fileMode", "core.symlinks", "gc.auto"):
            git.run("config", key, _SETTINGS[key])  # for the commands that a user runs in the work tree
    # A checkout must give the bytes that are stored, whatever upstream's attributes say.
    info = git_dir / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text("* -text -filter -ident -working-tree-encoding\n")
    # An archive may lack upstream's .gitignore, and the build runs Python scripts of the tree.
    (info / "exclude").write_text("__pycache__/\n*.pyc\n")
    for stale in [git_dir / "shallow.lock", *git_dir.glob("refs/kvq/**/*.lock")]:
        stale.unlink(missing_ok=True)  # left by a run that was killed; nobody else writes these
    return git


@contextmanager
def scratch_work_tree(store: Git, path: Path, commit: str) -> Iterator[Git]:
    """An index at `commit` and no files, for `git am`: it checks out what a patch touches. Objects go to `store`."""
    shutil.rmtree(path, ignore_errors=True)  # left by a run that was killed
    scratch = Git(path / ".git", path, objects=store.git_dir / "objects", error=store.error)
    try:
        path.mkdir(parents=True)
        scratch.run("init", "--quiet", "--object-format=sha1", "--template=")
        shutil.copytree(store.git_dir / "info", path / ".git" / "info", dirs_exist_ok=True)
        scratch.run("update-ref", "--no-deref", "HEAD", commit)
        scratch.run("read-tree", commit)
        yield scratch
    finally:
        shutil.rmtree(path, ignore_errors=True)
