"""A handful of files that stand for ONNX Runtime: as a clone with tags, as an archive, and a patch set on them.

Everything here is made with git, tarfile and plain writes, not with kvbuild, so that kvbuild is tested against
something else than itself. Paths have spaces and letters beyond ASCII throughout.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbuild.config import Base, Config, load_base

ARCHIVE = "fake_1.0.0+dfsg.orig.tar.xz"
KERNEL = "onnxruntime/core/kernel größe.cc"
REGISTRY = "onnxruntime/core/registry.cc"
CRLF = "docs/with crlf.md"
HOOK = "core-kernel-hook"

SETUP_PY = """\
import os, pathlib, sys, zipfile
assert sys.argv[1] == "bdist_wheel"
version = pathlib.Path(__file__).with_name("VERSION_NUMBER").read_text().strip() + os.environ["KVQ_LOCAL_VERSION"]
(library,) = pathlib.Path().glob("onnxruntime_pybind11_state*.so")
module = f"__version__ = {version!r}\\nget_build_info = lambda: {library.read_text()!r}\\n"
module += "get_available_providers = list\\n"
info = f"onnxruntime-{version}.dist-info"
files = {
    "onnxruntime/__init__.py": module,
    "onnxruntime/weight": "x" * (4 << 20),
    f"{info}/METADATA": f"Metadata-Version: 2.1\\nName: onnxruntime\\nVersion: {version}\\n",
    f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
}
pathlib.Path("dist").mkdir()
with zipfile.ZipFile(f"dist/onnxruntime-{version}-py3-none-any.whl", "w") as wheel:
    for name, text in {**files, f"{info}/RECORD": "".join(f"{name},,\\n" for name in files)}.items():
        wheel.writestr(zipfile.ZipInfo(name), text)
"""
"""Packs what the stand-in for ninja linked, as upstream's setup.py does in the build directory."""

KERNEL_LINES = ["class Kernel {", "public:", *(f"int line_{number}();" for number in range(3, 41))]
"""With `diff=cpp`, git would name the class in hunk headers; without, the label."""

FILES: dict[str, bytes] = {
    "VERSION_NUMBER": b"1.0.0\n",
    ".gitattributes": b"*.sln text eol=crlf\n*.cc diff=cpp ident\n",
    ".gitignore": b"*.generated\n",
    "ignored.generated": b"tracked although it is ignored\n",
    KERNEL: ("\n".join(KERNEL_LINES) + "\n").encode(),
    REGISTRY: b"// $Id$\nvoid Register();\n",
    CRLF: b"one\r\ntwo\r\nthree\r\n",
    "tools/fake.sln": b"line feeds here, although a checkout would convert them\n",
    "tools/run.sh": b"#!/bin/sh\nexit 0\n",
    "setup.py": SETUP_PY.encode(),
    "dropped/model.onnx": b"\x00\x01binary",
}
"""Files of version 1.0.0; `dropped/` is not in the archive, as the real one lacks files of the tag."""

HEADER = """
Upstream calls nothing here, so that our code would never run.
The edit adds one call, in the only place that sees every kernel.

Upstream-Status: Inappropriate [belongs to the test]
Covered-By: python_tests/test_hook.py
"""


def git(cwd: Path, *args: str, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> str:
    """Plain git with an identity of its own."""
    identity = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in _PERSON.items()}
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C.UTF-8"}
    full = {**os.environ, **identity, **quiet, **(env or {})}
    done = subprocess.run(["git", *args], cwd=cwd, env=full, input=stdin, capture_output=True)
    assert done.returncode == 0, f"git {args}: {done.stdout!r} {done.stderr!r}"
    return os.fsdecode(done.stdout).rstrip("\n")


_PERSON = {"NAME": "Jürgen Tester", "EMAIL": "tester@example.org", "DATE": "2025-03-04T05:06:07+0200"}


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    for rel, data in files.items():
        path = root / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@dataclass(frozen=True)
class Upstream:
    """`clone` has the tags v1.0.0, v1.1.0 (lines moved) and v2.0.0 (the patched line gone)."""

    clone: Path
    archive: Path
    commit: str
    """of v1.0.0"""
    tree: str
    archive_tree: str


def make_upstream(root: Path) -> Upstream:
    clone = root / "up stream ü"
    clone.mkdir(parents=True)
    git(clone, "init", "--quiet", "--initial-branch=main")
    # As in the real repository, blobs hold what the project committed, whatever attributes say on checkout.
    (clone / ".git" / "info" / "attributes").write_text("* -text -ident !diff\n")
    write_files(clone, FILES)
    (clone / "tools" / "run.sh").chmod(0o755)
    (clone / "link").symlink_to("VERSION_NUMBER")
    commit = _release(clone, "1.0.0")
    tree = git(clone, "rev-parse", "HEAD^{tree}")
    archive = root / ARCHIVE
    dropped = {path: data for path, data in FILES.items() if not path.startswith("dropped/")}
    write_archive(archive, dropped, links={"link": "VERSION_NUMBER"}, executable={"tools/run.sh"})
    git(clone, "rm", "--quiet", "-r", "dropped")
    archive_tree = git(clone, "write-tree")
    git(clone, "reset", "--quiet", "--hard")

    moved = ["// a new first line", *KERNEL_LINES]
    write_files(clone, {KERNEL: ("\n".join(moved) + "\n").encode(), "VERSION_NUMBER": b"1.1.0\n"})
    _release(clone, "1.1.0")
    gone = [line.replace("line_20", "renamed_20") for line in moved]
    write_files(clone, {KERNEL: ("\n".join(gone) + "\n").encode(), "VERSION_NUMBER": b"2.0.0\n"})
    _release(clone, "2.0.0")
    git(clone, "checkout", "--quiet", "v1.0.0")
    return Upstream(clone, archive, commit, tree, archive_tree)


def _release(clone: Path, version: str) -> str:
    git(clone, "add", "--all", "--force")
    git(clone, "commit", "--quiet", "-m", f"Release {version}")
    git(clone, "tag", "-a", "-m", version, f"v{version}")
    return git(clone, "rev-parse", "HEAD")


def write_archive(
    path: Path,
    files: Mapping[str, bytes],
    *,
    links: Mapping[str, str] | None = None,
    executable: frozenset[str] | set[str] = frozenset(),
    top: str = "fake-1.0.0/",
) -> None:
    with tarfile.open(path, "w:xz", preset=0) as tar:
        for rel, data in files.items():
            member = tarfile.TarInfo(top + rel)
            member.size = len(data)
            member.mode = 0o755 if rel in executable else 0o664
            tar.addfile(member, io.BytesIO(data))
        for rel, target in (links or {}).items():
            member = tarfile.TarInfo(top + rel)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bases_toml(upstream: Upstream, *, url: str = "", **other: str) -> str:
    """The table of v1.0.0; `other` overrides commit, sha256, or a tree id by `<kind>_upstream` and `<kind>_patched`."""
    return f"""# A comment that must survive.

["v1.0.0"]
version = "1.0.0"
revision = 3
git_url = "{url or upstream.clone}"  # and this one
tag = "v1.0.0"
commit = "{other.get("commit", upstream.commit)}"
cuda_min = "12.0"
cuda_max = "13.0"
python_min = "3.11"
python_max = "3.13"
patchset = "{other.get("patchset", "")}"

["v1.0.0".sources.debian]
package = "fake"
version = "1.0.0+dfsg-1"
suite = "stable"
archive = "{ARCHIVE}"
sha256 = "{other.get("sha256", sha256(upstream.archive))}"
upstream_tree = "{other.get("debian_upstream", upstream.archive_tree)}"
patched_tree = "{other.get("debian_patched", "")}"

["v1.0.0".sources.git]
upstream_tree = "{other.get("git_upstream", upstream.tree)}"  # a third
patched_tree = "{other.get("git_patched", "")}"
"""


OVERLAY_FILES = {
    "onnxruntime/contrib/quant ä.h": b"#pragma once\n",
    "onnxruntime/contrib/quant.cc": b'#include "quant.h"\n',
}


@dataclass
class Project:
    """A checkout of this repository with a patch set of its own on the fake upstream."""

    repo: Path
    upstream: Upstream
    cfg: Config

    @property
    def base(self) -> Base:
        """Read anew: tests edit bases.toml."""
        return load_base(self.cfg)

    @property
    def series(self) -> Path:
        return self.cfg.series_dir / "series"

    def write_bases(self, **other: str) -> None:
        (self.repo / "patches" / "bases.toml").write_text(bases_toml(self.upstream, **other), encoding="utf-8")

    def add_patch(
        self, name: str, edit: Callable[[Path], None], *, body: str = HEADER, onto: str = "v1.0.0", subject: str = ""
    ) -> Path:
        """Append a patch to the series: what `edit` does to upstream's files, written by git format-patch."""
        work = self.repo.parent / f"edit {name}"
        git(self.upstream.clone, "worktree", "add", "--quiet", "--force", "--detach", str(work), onto)
        try:
            edit(work)
            git(work, "add", "--all")
            git(work, "commit", "--quiet", "-m", f"{subject or f'{name}: call the overlay'}\n{body}")
            flags = ["--zero-commit", "--full-index", "--no-signature", "--no-stat", "--subject-prefix=", "-N", "-1"]
            text = git(work, "-c", "core.quotePath=false", "format-patch", "--stdout", *flags, "HEAD")
        finally:
            git(self.upstream.clone, "worktree", "remove", "--force", str(work))
        path = self.cfg.series_dir / f"{name}.patch"
        path.write_bytes(os.fsencode(text) + b"\n")
        with self.series.open("a", encoding="utf-8") as stream:
            stream.write(f"{name}.patch\n")
        return path

    def commit(self, subject: str, files: Mapping[str, bytes | None], *, body: str = HEADER) -> str:
        """A commit of a user's in the build tree; None removes a file."""
        src = self.cfg.src
        write_files(src, {rel: data for rel, data in files.items() if data is not None})
        for rel in (rel for rel, data in files.items() if data is None):
            (src / rel).unlink()
        git(src, "add", "--all")
        git(src, "commit", "--quiet", "-m", f"{subject}\n{body}")
        return git(src, "rev-parse", "HEAD")


def make_project(root: Path, upstream: Upstream) -> Project:
    """A patch set of two overlay files and one patch, nothing fetched yet."""
    repo = root / "my repo é"
    write_files(repo / "patches" / "overlay", OVERLAY_FILES)
    write_files(repo, {"python_tests/test_hook.py": b"", "patches/v1.0.0/series": b"# what is applied, in order\n"})
    cfg = Config(
        repo=repo,
        base="v1.0.0",
        work_dir=root / "work dir ø",
        cache_dir=root / "cache",
        source=str(upstream.clone),
    )
    project = Project(repo, upstream, cfg)
    project.write_bases()
    project.add_patch(HOOK, hook_edit)
    return project


def hook_edit(tree: Path) -> None:
    """One line into the kernel file, one into a file with CR LF line ends."""
    _replace(tree / KERNEL, b"int line_20();\n", b"int line_20();\nint hook();\n")
    _replace(tree / CRLF, b"two\r\n", b"two and a half\r\n")


def _replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """mtime in ns and bytes of every file below `root`, git's own left out."""
    paths = [path for path in root.rglob("*") if path.is_file() and path.name != ".git"]
    return {path.relative_to(root).as_posix(): (path.lstat().st_mtime_ns, path.read_bytes()) for path in paths}


def contents(root: Path) -> dict[str, bytes]:
    return {rel: data for rel, (_, data) in snapshot(root).items()}
