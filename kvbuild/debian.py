"""Files of the Debian archive, fetched by apt with the machine's own configuration.

Where a machine cannot reach the upstream forges, its distribution's archive often holds the same sources.
Pool paths are stable while any suite carries the version, so no package index is downloaded: the pinned SHA-256
says what a file must be, and apt brings the mirror, the proxy, retries and resuming.
"""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from urllib.parse import quote

from kvbuild import proc
from kvbuild.errors import DigestMismatch, EnvironmentProblem, SourceError

APT_HELPER = Path("/usr/lib/apt/apt-helper")
_RELEASE_FILE = re.compile(r"^'(?P<archive>.+/debian)/+dists/[^']+/InRelease'")


@functools.cache
def archives() -> tuple[str, ...]:
    """Base addresses of the Debian archives in apt's configuration; empty without apt or on another distribution."""
    if not APT_HELPER.exists() or not shutil.which("apt-get"):
        return ()
    # Unlike indextargets, this also answers where the package lists were removed, as in container images.
    done = proc.run(["apt-get", "update", "--print-uris"], capture=True, check=False, timeout=30, what="apt-get")
    found = (_RELEASE_FILE.match(line) for line in done.stdout.decode("utf-8", "replace").splitlines())
    return tuple(dict.fromkeys(match["archive"] for match in found if match))


def unavailable() -> str:
    """Why this route cannot be taken here; empty when it can."""
    if archives():
        return ""
    return "apt is not configured with a Debian archive on this machine"


def pool_path(source_package: str, file: str) -> str:
    """Where the archive keeps a file of `source_package`."""
    prefix = source_package[:4] if source_package.startswith("lib") else source_package[:1]
    return f"pool/main/{prefix}/{source_package}/{quote(file, safe='+~')}"


def download(source_package: str, file: str, sha256: str, target: Path, *, log: Path | None = None) -> None:
    """Fetch `file` to `target`, going on from what `target` already holds. Raises SourceError with apt's own words."""
    bases = archives()
    if not bases:
        raise SourceError(unavailable())
    reasons = []
    for base in bases:
        url = f"{base}/{pool_path(source_package, file)}"
        options = ["-o", "Acquire::Retries=3", "-o", "Acquire::http::Timeout=30", "-o", "Acquire::https::Timeout=30"]
        cmd: proc.Command = [APT_HELPER, *options, "download-file", url, target, f"SHA256:{sha256}"]
        try:
            done = proc.run(cmd, log=log, check=False, timeout=1800, error=SourceError, what="apt-helper")
        except EnvironmentProblem as exc:
            raise SourceError(exc.what, exc.why) from exc
        failed = target.with_name(target.name + ".FAILED")
        if done.returncode == 0:
            return
        failed.unlink(missing_ok=True)
        _stop_at_mismatch(url, done.stdout)
        reasons.append(f"{url}: {_reason(done.stdout)}")
    raise SourceError("; ".join(reasons))


def _stop_at_mismatch(url: str, output: bytes) -> None:
    text = output.decode("utf-8", "replace")
    hashes = re.findall(r"SHA256:([0-9a-f]{64})", text)
    if "Hash Sum mismatch" in text and len(hashes) >= 2:
        msg = f"{url}: sha256 mismatch\n  expected {hashes[0]}\n  got      {hashes[1]}"
        why = "the archive replaced the file, or the transfer was altered on the way"
        raise DigestMismatch(msg, why, "give --mirror with a directory that holds the pinned file")


def _reason(output: bytes) -> str:
    """apt's own first error line."""
    told = [line[2:].strip() for line in output.decode("utf-8", "replace").splitlines() if line.startswith("E:")]
    return told[0] if told else "no reason given"
