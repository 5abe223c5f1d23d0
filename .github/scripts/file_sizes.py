"""Refuse Python files over 400 lines: a file holds one idea. Kernels are exempt, since a kernel is long by nature."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMIT = 400
EXEMPT_FOLDERS = {"kernels", "ops", "deepinfer_kernels_cuda"}


def oversized(root: Path) -> list[tuple[int, str]]:
    """Return (lines, path) of each tracked or new Python file over the limit, longest first."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = []
    for name in listing.stdout.split("\n"):
        path = root / name
        if not name or not path.is_file() or EXEMPT_FOLDERS & set(Path(name).parts[:-1]):
            continue
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > LIMIT:
            found.append((lines, name))
    return sorted(found, reverse=True)


if __name__ == "__main__":
    bad = oversized(Path(__file__).resolve().parents[2])
    for lines, name in bad:
        print(f"{name}: {lines} lines, limit {LIMIT}: split it by idea")
    sys.exit(1 if bad else 0)
