"""Third-party sources: unpacked aside, edited as upstream edits them, from upstream where no registry serves them."""

from __future__ import annotations

import hashlib
import io
import platform
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvbuild import deps
from kvbuild.config import Config, read_toml
from kvbuild.errors import DigestMismatch, SourceError
from python_tests.tool.engine import REPO, make_cfg

PATCH = b"""\xef\xbb\xbfdiff --git a/lib.h b/lib.h
index 111..222 100644
--- a/lib.h
+++ b/lib.h
@@ -11,3 +11,3 @@
 before
-old
+new
 after
"""
"""As upstream's: a byte order mark in front, line numbers that are a little off."""
LIB = b"// first\nbefore\nold\nafter\n"
PIP = Path("no pip is needed here")


class Fixture:
    """A repository with one dependency, whose archive lies in a mirror."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mirror = root / "the mirror"
        self.mirror.mkdir()
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as tar:
            for name, data in {"lib-1.0/lib.h": LIB, "lib-1.0/docs/big.txt": b"x"}.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        self.archive = stream.getvalue()
        (self.mirror / "lib_1.0.orig.tar.gz").write_bytes(self.archive)
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("lib-upstream/lib.h", LIB + b"// upstream\n")
            archive.writestr("lib-upstream/CMakeLists.txt", b"# its own\n")
        self.zip = stream.getvalue()
        self.shim = root / "repo" / "kvbuild" / "data" / "shims" / "lib.cmake"
        self.shim.parent.mkdir(parents=True)
        self.shim.write_bytes(b"# shim\n")
        self.patch = PATCH
        self.write(hashlib.sha256(self.archive).hexdigest())

    def write(self, sha256: str, extra: str = "") -> None:
        folder = self.root / "repo" / "patches" / "v1.21.0"
        folder.mkdir(parents=True, exist_ok=True)
        url = "https://forge.invalid/lib/v1.0.zip"
        (folder / "deps.toml").write_text(
            f'[lib]\nvariable = "LIB_DIR"\nkind = "debian"\npackage = "lib"\nversion = "1.0"\n'
            f'file = "lib_1.0.orig.tar.gz"\nsha256 = "{sha256}"\nstrip = 1\nort_patch = "cmake/lib.patch"\n'
            f'shim = "lib.cmake"\n{extra}\n'
            f'upstream.url = "{url}"\nupstream.sha1 = "{hashlib.sha1(self.zip).hexdigest()}"\n'
            '[only_gpu]\nvariable = "GPU_DIR"\nkind = "shim"\nshim = "lib.cmake"\ncuda = true\n',
            encoding="utf-8",
        )

    def cfg(self, **changes: object) -> Config:
        return make_cfg(self.root, repo=self.root / "repo", mirrors=(self.mirror,), **changes)

    def fetch(self, **changes: object) -> dict[str, str]:
        def read(path: str) -> bytes:
            assert path == "cmake/lib.patch"
            return self.patch

        return deps.fetch_all(self.cfg(**changes), read, PIP)

    def put_upstream(self) -> None:
        """Take the registry's file away and mirror upstream's, by its address as upstream's own mirror does."""
        (self.mirror / "lib_1.0.orig.tar.gz").unlink()
        path = self.mirror / "forge.invalid" / "lib" / "v1.0.zip"
        path.parent.mkdir(parents=True)
        path.write_bytes(self.zip)


@pytest.fixture
def lib(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def test_unpacked_patched_and_given_a_shim(lib: Fixture) -> None:
    folders = lib.fetch()
    assert list(folders) == ["LIB_DIR"]
    folder = Path(folders["LIB_DIR"])
    assert folder.parent == lib.cfg().deps_dir
    assert (folder / "lib.h").read_bytes() == LIB.replace(b"old", b"new")
    assert (folder / "CMakeLists.txt").read_bytes() == b"# shim\n"


def test_patch_takes_effect_inside_another_repository(lib: Fixture) -> None:
    """The default work directory lies in a checkout, where git apply skips what is not below the root."""
    subprocess.run(["git", "init", "-q", str(lib.root)], check=True)
    folder = Path(lib.fetch()["LIB_DIR"])
    assert b"new" in (folder / "lib.h").read_bytes()


def test_second_fetch_touches_nothing(lib: Fixture) -> None:
    folder = Path(lib.fetch()["LIB_DIR"])
    before = (folder / "lib.h").stat().st_mtime_ns
    (lib.mirror / "lib_1.0.orig.tar.gz").unlink()
    assert lib.fetch()["LIB_DIR"] == str(folder)
    assert (folder / "lib.h").stat().st_mtime_ns == before


def test_another_patch_or_shim_gives_another_folder(lib: Fixture) -> None:
    first, digest = lib.fetch()["LIB_DIR"], deps.inputs_digest(lib.cfg())
    lib.patch = PATCH.replace(b"+new", b"+newer")
    second = lib.fetch()["LIB_DIR"]
    lib.shim.write_bytes(b"# other\n")
    assert len({first, second, lib.fetch()["LIB_DIR"]}) == 3
    assert deps.inputs_digest(lib.cfg()) != digest


def test_leftover_of_a_killed_run_is_replaced(lib: Fixture) -> None:
    folder = Path(lib.fetch()["LIB_DIR"])
    part = folder.rename(folder.with_name(folder.name + ".part"))
    (part / "lib.h").write_bytes(b"half")
    assert Path(lib.fetch()["LIB_DIR"], "lib.h").read_bytes() == LIB.replace(b"old", b"new")
    assert not part.exists()


def test_patch_that_does_not_fit_stops_and_leaves_no_folder(lib: Fixture) -> None:
    lib.patch = PATCH.replace(b"-old", b"-something else")
    with pytest.raises(SourceError, match=r"cmake/lib\.patch"):
        lib.fetch()
    assert [path for path in lib.cfg().deps_dir.iterdir() if path.suffix != ".part"] == []


def test_upstream_is_the_way_out(lib: Fixture) -> None:
    lib.put_upstream()
    folder = Path(lib.fetch()["LIB_DIR"])
    assert (folder / "CMakeLists.txt").read_bytes() == b"# its own\n"
    assert b"new" in (folder / "lib.h").read_bytes()
    assert lib.fetch()["LIB_DIR"] == str(folder)


def test_unreachable_everywhere_names_both_ways(lib: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbuild.download.RETRY_PAUSE_SECONDS", 0.01)
    (lib.mirror / "lib_1.0.orig.tar.gz").unlink()
    with pytest.raises(SourceError) as caught:
        lib.fetch()
    assert "lib (1.0)" in caught.value.what
    assert "Debian archive" in caught.value.why
    assert "forge.invalid" in caught.value.why


def test_wrong_file_in_the_mirror_stops_before_upstream_is_asked(lib: Fixture) -> None:
    lib.put_upstream()
    (lib.mirror / "lib_1.0.orig.tar.gz").write_bytes(b"tampered")
    with pytest.raises(DigestMismatch, match="expected"):
        lib.fetch()


def test_regenerated_upstream_archive_is_named_with_both_digests(lib: Fixture) -> None:
    lib.put_upstream()
    (lib.mirror / "forge.invalid" / "lib" / "v1.0.zip").write_bytes(lib.zip + b"regenerated")
    with pytest.raises(SourceError, match="sha1 mismatch") as caught:
        lib.fetch()
    assert hashlib.sha1(lib.zip).hexdigest() in caught.value.what
    assert hashlib.sha1(lib.zip + b"regenerated").hexdigest() in caught.value.what


def test_keep_that_matches_nothing_is_an_error(lib: Fixture) -> None:
    sha256 = hashlib.sha256(lib.archive).hexdigest()
    lib.write(sha256, 'keep = ["lib.h", "no/such"]')
    with pytest.raises(SourceError, match="does not hold no/such"):
        lib.fetch()


def test_keep_leaves_the_rest_out(lib: Fixture) -> None:
    lib.write(hashlib.sha256(lib.archive).hexdigest(), 'keep = ["lib.h"]')
    folder = Path(lib.fetch()["LIB_DIR"])
    assert sorted(path.name for path in folder.iterdir()) == ["CMakeLists.txt", "lib.h"]


def test_cuda_rows_come_with_cuda_only(lib: Fixture) -> None:
    assert list(lib.fetch(cuda_home=lib.root)) == ["LIB_DIR", "GPU_DIR"]


def test_unknown_field_is_named(lib: Fixture) -> None:
    lib.write("0" * 64, 'colour = "red"')
    with pytest.raises(SourceError, match="colour"):
        lib.fetch()


def test_missing_downloads(lib: Fixture) -> None:
    assert deps.missing_downloads(lib.cfg()) == []
    (lib.mirror / "lib_1.0.orig.tar.gz").unlink()
    assert deps.missing_downloads(lib.cfg()) == ["lib"]


def test_program_is_executable_and_for_its_machine_only(lib: Fixture) -> None:
    """Wheels keep no permissions; a program for another processor is left out and built from source instead."""
    digest = hashlib.sha256(lib.archive).hexdigest()
    lib.write(digest, f'program = "lib.h"\nmachine = "{platform.machine()}"')
    program = Path(lib.fetch()["LIB_DIR"])
    assert program.name == "lib.h"
    assert program.stat().st_mode & 0o111 == 0o111
    lib.write(digest, 'program = "lib.h"\nmachine = "z80"')
    assert lib.fetch() == {}


@pytest.mark.parametrize("base", sorted(path.parent.name for path in (REPO / "patches").glob("*/deps.toml")))
def test_pins_of_every_base_are_complete(tmp_path: Path, base: str) -> None:
    cfg = make_cfg(tmp_path, base=base, cuda_home=tmp_path)
    found = deps.needed(cfg)
    here = [
        t for t in read_toml(cfg.series_dir / "deps.toml").values() if t.get("machine") in (None, platform.machine())
    ]
    assert len({dep.variable for dep in found}) == len(found) == len(here)
    for dep in found:
        assert not dep.shim or (cfg.data / "shims" / dep.shim).is_file(), dep.name
        if dep.kind == "shim":
            continue
        assert re.fullmatch(r"[0-9a-f]{64}", dep.sha256), dep.name
        assert dep.package, dep.name
        if dep.program:  # a tool that upstream's build would make itself
            continue
        assert dep.upstream, dep.name
        assert re.fullmatch(r"[0-9a-f]{40}", dep.upstream.sha1), dep.name
        assert dep.upstream.url.startswith("https://"), dep.name
