"""Style, types, arrows and sizes are tests like any other: `uv run pytest` is the whole check."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

CHECKS = {
    "ruff-check": [str(BIN / "ruff"), "check", "."],
    "ruff-format": [str(BIN / "ruff"), "format", "--check", "."],
    "import-arrows": [str(BIN / "lint-imports")],
    "types": [str(BIN / "pyrefly"), "check"],
    "file-sizes": [sys.executable, ".github/scripts/file_sizes.py"],
}


@pytest.mark.parametrize("name", CHECKS)
def test_check(name):
    done = subprocess.run(CHECKS[name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(CHECKS[name])}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
