"""The script of README.md runs as it stands and prints what README.md says that it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_readme_script(tmp_path: Path) -> None:
    """Outside the checkout, in an interpreter of its own."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```\n+It prints `([^`]*)`", text, re.DOTALL)
    assert len(blocks) == 1
    script, printed = blocks[0]
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The last digit of the error may differ between processors.
    shown, wanted = (re.sub(r"(0\.0\d)\d+", r"\1", line.strip()) for line in (done.stdout, printed))
    assert shown == wanted
