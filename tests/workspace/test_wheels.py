"""Each member builds a wheel that installs and imports alone, beside nothing else of this workspace."""

import json
import os
import re
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


def install_and_probe(folder: Path, wheel: Path | str, *more: str) -> dict:
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([UV, "pip", "install", "-q", "--python", python, wheel, *more], check=True)
    module = Path(wheel).name.split("-")[0]
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


def snippets(readme: Path) -> str:
    """The Python code of a page, as a reader would paste it."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL))


def run_readme(name: str, wheels: dict[str, Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Install what a README says in an environment of its own, and run its code there."""
    readme = ROOT / "packages" / name / "README.md"
    extras = re.search(rf"pip install \"?\./packages/{name}(\[[a-z,]+\])?", readme.read_text())[1] or ""
    if extras == "[npu]":  # torch-npu is of use beside an Ascend driver only
        extras = ""
    install_and_probe(folder / "venv", f"{wheels[name]}{extras}")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TRITON"))}
    command = [folder / "venv/bin/python", "-I", "-c", snippets(readme)]
    return subprocess.run(command, cwd=folder, env=kept | variables, capture_output=True, text=True)


@pytest.mark.parametrize("name", [*CORES, *WITH_TORCH])
def test_the_readme_runs_as_printed(name, wheels, tmp_path):
    done = run_readme(name, wheels, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_the_kernels_readme_runs_to_its_end_in_the_interpreter(wheels, tmp_path):
    done = run_readme("deepinfer-kernels-cuda", wheels, tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("torch.Size([4, 512])\n")


def test_the_readme_of_the_workspace_runs_as_printed(tmp_path):
    command = [sys.executable, "-c", snippets(ROOT / "README.md")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
