"""`build.py check`: the patch set is well-formed, fits its source, and is exactly what an export writes."""

from __future__ import annotations

import re
from pathlib import Path

from kvbuild import log
from kvbuild.config import Base, Config
from kvbuild.errors import PatchError
from kvbuild.export import render
from kvbuild.git import ZERO_ID, Git
from kvbuild.patchfile import Patch, read_patches, read_series, subject_name
from kvbuild.patchset import (
    Prepared,
    known_trees,
    open_store,
    overlay_files,
    patchset_digest,
    prepare,
    recorded_patchset,
)
from kvbuild.source import kind_of_source
from kvbuild.sync import write_atomically

STATUS = re.compile(
    r"Pending \[.+\]|Submitted \[.+\]|Backport \[.+\]|Denied \[.+\]|Inappropriate \[.+\]",
)
_ZERO_COMMIT = b"From " + ZERO_ID.encode() + b" Mon Sep 17 00:00:00 2001\n"
_OVERLAY_TEXT = {".h", ".hpp", ".cuh", ".cc", ".cpp", ".cu", ".py", ".cmake", ".md", ".txt", ".inc"}


def check(cfg: Config, base: Base) -> None:
    """Raise PatchError that lists everything found wrong. `cfg.no_source` leaves out what needs upstream's source.

    With `cfg.update_trees` the tree ids are recorded instead of compared.
    """
    problems = lint(cfg)
    if not cfg.no_source:
        store = open_store(cfg)
        prepared = prepare(cfg, store)
        problems += _reexport(cfg, store, prepared)
        if cfg.update_trees:
            record_trees(cfg, base, prepared)
        else:
            problems += _tree_ids(cfg, base, prepared)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        msg = f"faults in the patch set of {cfg.base}: {len(problems)}\n{listed}"
        raise PatchError(msg, todo="see docs/patching.md; edit commits in the build tree and run build.py export")
    counts = f"patches: {len(read_series(cfg.series_dir))}, overlay files: {len(overlay_files(cfg.overlay))}"
    log.info(f"no fault in the patch set of {cfg.base} ({counts})")


def lint(cfg: Config) -> list[str]:
    """Faults that show without upstream's source, each with its file."""
    listed = {f"{name}.patch" for name in read_series(cfg.series_dir)}
    present = {path.name for path in cfg.series_dir.glob("*.patch")}
    problems = [f"{cfg.base}/series lists {name}, which does not exist" for name in sorted(listed - present)]
    problems += [f"{cfg.base}/{name} is not listed in the series" for name in sorted(present - listed)]
    if problems:
        return problems
    for patch in read_patches(cfg.series_dir):
        problems += [f"{cfg.base}/{patch.name}.patch: {fault}" for fault in _patch_faults(cfg.repo, patch)]
    for rel, path in overlay_files(cfg.overlay).items():
        if path.suffix in _OVERLAY_TEXT:
            problems += [f"overlay/{rel}: {fault}" for fault in _text_faults(path.read_bytes())]
    return problems


def _patch_faults(repo: Path, patch: Patch) -> list[str]:
    faults = []
    if not patch.raw.startswith(_ZERO_COMMIT):
        faults.append("its first line carries a commit id, which changes with every rebase")
    try:
        patch.raw.decode("utf-8")
    except UnicodeDecodeError:
        faults.append("it is not UTF-8")
    if patch.subject.startswith("["):
        faults.append("its subject starts with a bracket; `[PATCH n/m]` is stripped by an export")
    else:
        try:
            if subject_name(patch.subject) != patch.name:
                faults.append(f"its subject names {subject_name(patch.subject)}.patch")
        except PatchError as exc:
            faults.append(exc.what)
    faults += _header_faults(repo, patch)
    faults += [
        f"adds {edit.path}: files that upstream lacks go into the overlay"
        for edit in patch.edits
        if edit.old == ZERO_ID
    ]
    faults += [
        f"line {number} adds trailing white space" for number, text in patch.added if text.rstrip("\r") != text.rstrip()
    ]
    return faults


def _header_faults(repo: Path, patch: Patch) -> list[str]:
    trailers = patch.trailers
    faults = []
    statuses = trailers.get("Upstream-Status", [])
    if len(statuses) != 1 or not STATUS.fullmatch(statuses[0]):
        kinds = "Pending [..], Submitted [url], Backport [sha], Denied [url] or Inappropriate [reason]"
        faults.append(f"it needs one trailer `Upstream-Status:` with {kinds}; found {statuses or 'none'}")
    covered = [path for value in trailers.get("Covered-By", []) for path in re.split(r"[,\s]+", value) if path]
    if not covered:
        faults.append("it needs a trailer `Covered-By:` with the tests that would fail without it")
    faults += [f"Covered-By names {path}, which does not exist" for path in covered if not (repo / path).exists()]
    prose = patch.message.strip().split("\n\n")
    if len(prose) < (2 if trailers else 1) or len(" ".join(prose[:-1] if trailers else prose)) < 40:
        faults.append("its message does not say why upstream's code cannot do this, and what the edit does")
    return faults


def _text_faults(data: bytes) -> list[str]:
    """Line ends, encoding and trailing white space of a text file of ours."""
    faults = []
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ["not UTF-8"]
    if "\r" in text:
        faults.append("CR line ends")
    if text and not text.endswith("\n"):
        faults.append("no newline at its end")
    rows = [number for number, line in enumerate(text.split("\n"), 1) if line.rstrip("\r") != line.rstrip()]
    if rows:
        faults.append(f"trailing white space in line {', '.join(map(str, rows[:5]))}")
    return faults


def _reexport(cfg: Config, store: Git, prepared: Prepared) -> list[str]:
    """Patches whose bytes are not what an export of their own commits gives."""
    try:
        rendered = dict(render(store, prepared.upstream, prepared.overlay, prepared.patched).patches)
    except PatchError as exc:
        return [exc.what]
    return [
        f"{cfg.base}/{patch.name}.patch is not what an export writes: run build.py apply, then build.py export"
        for patch in read_patches(cfg.series_dir)
        if rendered.get(patch.name) != patch.raw
    ]


def _tree_ids(cfg: Config, base: Base, prepared: Prepared) -> list[str]:
    kind, expected = known_trees(base).get(prepared.upstream_tree, ("", ""))
    if not kind:
        return [f"bases.toml: no tree id is recorded for this source (its tree is {prepared.upstream_tree})"]
    if recorded_patchset(cfg, base) != patchset_digest(cfg, base) or expected != prepared.tree:
        shown = expected or "none"
        return [
            f"bases.toml: patched_tree of the {kind} source is {shown}, not {prepared.tree}: run check --update-trees"
        ]
    return []


def record_trees(cfg: Config, base: Base, prepared: Prepared) -> None:
    """Write the ids of this source, and the patch set that they belong to, into bases.toml; comments stay."""
    kind = known_trees(base).get(prepared.upstream_tree, ("", ""))[0] or kind_of_source(cfg)
    if kind not in ("git", "debian"):
        msg = f"the imported source of {base.name} is neither the tag nor the pinned archive"
        raise PatchError(
            msg, "it came from a path, and its tree is not recorded", "fetch it with --source git or debian"
        )
    path = cfg.patches / "bases.toml"
    text = path.read_text(encoding="utf-8")
    digest = patchset_digest(cfg, base)
    for other in ("git", "debian"):
        if other != kind and recorded_patchset(cfg, base) != digest:
            text = set_value(text, f'"{base.name}".sources.{other}', "patched_tree", "")
    table = f'"{base.name}".sources.{kind}'
    text = set_value(text, table, "upstream_tree", prepared.upstream_tree)
    text = set_value(text, table, "patched_tree", prepared.tree)
    text = set_value(text, f'"{base.name}"', "patchset", digest)
    write_atomically(path, text.encode())
    log.info(f"bases.toml: {kind} source of {base.name}: patched tree {prepared.tree}, patch set {digest[:12]}")


def set_value(text: str, table: str, key: str, value: str) -> str:
    """The TOML `text` with a string value of an existing `[table]` replaced or added; all other bytes stay."""
    start = re.search(rf"^\[{re.escape(table)}\][^\n]*\n", text, re.MULTILINE)
    if not start:
        msg = f"bases.toml: no table [{table}]"
        raise PatchError(msg)
    following = re.compile(r"^\[", re.MULTILINE).search(text, start.end())
    end = following.start() if following else len(text)
    body = text[start.end() : end]
    line = f'{key} = "{value}"'
    pattern = re.compile(rf'^{re.escape(key)}\s*=\s*"[^"\n]*"', re.MULTILINE)
    body = pattern.sub(line, body, count=1) if pattern.search(body) else f"{line}\n{body}"
    return text[: start.end()] + body + text[end:]
