"""Runs the tests of CUDA ops and captured steps in one process where Triton interprets their kernels on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("triton")
pytest.importorskip("deepinfer_kernels_cuda")

FILES = ("test_cuda_ops", "test_cuda_prompts", "test_cuda_ahead")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreting")
def test_providers_in_the_interpreter(tmp_path: Path) -> None:
    here, report = Path(__file__).parent, tmp_path / "report.xml"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    files = [str(here / f"{name}.py") for name in FILES]
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert {case.attrib["classname"].rpartition(".")[2] for case in cases} == set(FILES)
    assert not [case.attrib["name"] for case in cases if len(case)], "skipped"
