"""Numerics without a GPU: tests again, in one process where Triton interprets its kernels on the CPU.

One process for all files, because each spends longer on starting than most of them on their kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("triton")

# Tests that are skipped there: they need a GPU or the compiler.
SKIPPED = {"test_numerics": 0, "test_parallel_rows": 0, "test_peers": 0, "test_dense": 15, "test_vllm_norm": 4}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[set[str]]]:
    """What became of each test (the tags of its junit element), by file."""
    here, report = Path(__file__).parent, tmp_path_factory.mktemp("interpreted") / "report.xml"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    files = [str(here / f"{name}.py") for name in SKIPPED]
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found: dict[str, list[set[str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found.setdefault(case.attrib["classname"].rpartition(".")[2], []).append({child.tag for child in case})
    return found


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreting")
@pytest.mark.parametrize("name", SKIPPED)
def test_numerics_in_the_interpreter(interpreted: dict[str, list[set[str]]], name: str) -> None:
    tags = interpreted[name]
    assert not any({"failure", "error"} & one for one in tags)
    assert sum("skipped" in one for one in tags) == SKIPPED[name]
    assert any(not one for one in tags), "passed"
