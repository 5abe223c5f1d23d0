"""Each member builds a wheel that installs and imports alone, beside nothing else of this workspace."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = (
    os.environ.get("UV")
    or shutil.which("uv")
    or pytest.fail("uv is neither on the PATH nor what runs this: uv run pytest")
)

CORES = ["deepinfer-sched", "deepinfer-cache", "deepinfer-specdec", "deepinfer-structured"]
WITH_TORCH = ["deepinfer-kernels-cuda", "deepinfer-kernels-ascend"]

PROBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
heavy = [name for name in ("torch", "vllm", "transformers") if name in sys.modules]
siblings = [name for name in sys.modules if name.startswith("deepinfer_") and name.split(".")[0] != sys.argv[1]]
print(json.dumps({"file": module.__file__, "missing": missing, "heavy": heavy, "siblings": siblings}))
"""


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheels")
    subprocess.run([UV, "build", "--all-packages", "--wheel", "--no-sources", "-o", out, "-q"], cwd=ROOT, check=True)
    return {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in out.glob("*.whl")}


@pytest.mark.parametrize("name", [*CORES, *WITH_TORCH, "deepinfer-offline"])
def test_a_wheel_brings_its_licence_and_says_what_it_is(name, wheels):
    with zipfile.ZipFile(wheels[name]) as wheel:
        info = next(file.partition("/")[0] for file in wheel.namelist() if ".dist-info/" in file)
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    for field in ("Author", "Keywords", "Classifier", "Summary"):
        assert metadata[field], f"{name}: no {field}"


def install_and_probe(folder: Path, wheel: Path, *more: str) -> dict:
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([UV, "pip", "install", "-q", "--python", python, wheel, *more], check=True)
    module = wheel.name.split("-")[0]
    done = subprocess.run([python, "-I", "-c", PROBE, module], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CORES)
def test_a_core_installs_and_imports_alone_without_torch(name, wheels, tmp_path):
    found = install_and_probe(tmp_path / "venv", wheels[name])
    assert found["missing"] == []
    assert found["siblings"] == []
    assert found["heavy"] == []
    assert str(tmp_path) in found["file"]


@pytest.mark.parametrize("name", WITH_TORCH)
def test_a_kernel_package_installs_and_imports_alone(name, wheels, tmp_path):
    found = install_and_probe(tmp_path / "venv", wheels[name], "torch==2.14.0")
    assert found["missing"] == []
    assert found["siblings"] == []


def test_the_app_installs_with_its_libraries_and_has_its_command(wheels, tmp_path):
    libraries = [str(wheels[name]) for name in CORES]
    found = install_and_probe(tmp_path / "venv", wheels["deepinfer-offline"], *libraries, "torch==2.14.0")
    assert found["missing"] == []
    done = subprocess.run([tmp_path / "venv/bin/deepinfer", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "run" in done.stdout
