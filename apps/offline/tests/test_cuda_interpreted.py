"""Runs `test_cuda_ops.py` and `test_cuda_prompts.py` in processes where Triton interprets their kernels on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("deepinfer_kernels_cuda")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreting")
@pytest.mark.parametrize("name", ["test_cuda_ops.py", "test_cuda_prompts.py"])
def test_providers_in_the_interpreter(name: str) -> None:
    target = Path(__file__).with_name(name)
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
