"""Upstream's repository over the network: whether it answers, and the pinned tag."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvbuild import log
from kvbuild.config import Base
from kvbuild.errors import SourceError
from kvbuild.git import Git

REACH_SECONDS = 10
"""How long git may take to say whether it reaches upstream."""

HEARTBEAT_SECONDS = 30.0

_NETWORK = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=20", "-c", "protocol.version=2")


def unreachable(base: Base) -> str:
    """Why the tag cannot be read from upstream's repository; empty when it can."""
    told: list[str] = []
    try:
        done = Git(None, error=SourceError).run(
            *_NETWORK,
            "ls-remote",
            base.git.url,
            f"refs/tags/{base.git.tag}",
            check=False,
            timeout=REACH_SECONDS,
            user_settings=True,
            on_line=told.append,
            what="git ls-remote",
        )
    except SourceError as exc:
        return exc.what
    if done.returncode != 0:
        reasons = [line.removeprefix("fatal: ") for line in told if line.startswith("fatal: ")]
        return reasons[0] if reasons else f"git ls-remote failed with exit code {done.returncode}"
    return "" if done.stdout.strip() else f"it has no tag {base.git.tag}"


def download_tag(base: Base, store: Git, ref: str) -> None:
    """Fetch the commit of the base's tag, without its history, to `ref`. Raises SourceError."""
    tag = f"refs/tags/{base.git.tag}"
    options = ["--depth=1", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", "--no-auto-gc"]
    what = f"git fetch {base.git.url} {base.git.tag}"
    command = [*_NETWORK, "fetch", *options, base.git.url, f"+{tag}:{ref}"]
    with log.step(what):
        store.run(*command, user_settings=True, on_tick=_heartbeat(what), what="git fetch")


def pinned_commit(base: Base, store: Git, ref: str) -> str:
    """The commit at `ref`. Raises SourceError where it is not the one that bases.toml names."""
    commit = store.text("rev-parse", f"{ref}^{{commit}}")
    if commit != base.git.commit:
        differ = f"\n  expected {base.git.commit}\n  got      {commit}"
        msg = f"{base.git.url}: tag {base.git.tag} is not the pinned commit{differ}"
        raise SourceError(msg, "the tag was moved, or the address leads elsewhere", "use --source debian or PATH")
    return commit


def _heartbeat(what: str) -> Callable[[], None]:
    """Tells that a silent transfer goes on: in place on a terminal, in a log twice a minute."""
    start = time.monotonic()
    last = start

    def tick() -> None:
        nonlocal last
        now = time.monotonic()
        if log.is_terminal():
            log.progress(f"  {what}: {log.format_seconds(now - start)}")
        elif now - last >= HEARTBEAT_SECONDS:
            last = now
            log.info(f"  {what}: {log.format_seconds(now - start)}")

    return tick
