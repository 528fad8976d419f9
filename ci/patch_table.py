"""Keeps the table of patches/README.md equal to the series: `python ci/patch_table.py [--fix]`."""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from kvbuild.patchfile import read_patches  # noqa: E402

README = REPO / "patches" / "README.md"
START = "<!-- table: python ci/patch_table.py --fix -->\n"
END = "<!-- end of table -->"


def table() -> str:
    """One row per patch of every base: name, what it does, files edited, lines added, upstream status."""
    rows = ["| base | patch | does | files | lines added | upstream |", "|---|---|---|---|---|---|"]
    for series in sorted((REPO / "patches").glob("*/series")):
        for patch in read_patches(series.parent):
            what = patch.subject.partition(": ")[2]
            status = patch.trailers.get("Upstream-Status", ["none"])[0]
            rows.append(
                f"| {series.parent.name} | [{patch.name}]({series.parent.name}/{patch.name}.patch) | {what} "
                f"| {len(patch.edits)} | {len(patch.added)} | {status} |"
            )
    return "\n".join(rows) + "\n"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    tail = rest.partition(END)[2]
    wanted = f"{head}{START}{table()}{END}{tail}"
    if wanted == text:
        return 0
    if "--fix" in sys.argv[1:]:
        README.write_text(wanted, encoding="utf-8")
        return 0
    print(f"{README.relative_to(REPO)}: the table is out of date; run python ci/patch_table.py --fix")
    return 1


if __name__ == "__main__":
    sys.exit(main())
