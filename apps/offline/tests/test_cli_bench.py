"""`deepinfer bench`: whose cases run, and how they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepinfer_offline.cli import bench
from deepinfer_offline.cli.main import call

RUNNER = """
class UnknownCaseError(ValueError): pass
def cases(): return {"fast": "A fast one."}
def run(name, argv):
    if name != "fast": raise UnknownCaseError(f"there is no benchmark {name!r}")
    print("ran", argv)
    return 1
"""
PROJECT = '[project]\nname = "deepinfer-workspace"\n'


def write_project(folder: Path, project: str) -> Path:
    """A folder with cases of its own."""
    (folder / "benchmarks" / "cases").mkdir(parents=True)
    (folder / "benchmarks" / "run.py").write_text(RUNNER)
    (folder / "pyproject.toml").write_text(project)
    (folder / "deep" / "inside").mkdir(parents=True)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as a wheel has it, called inside a checkout."""
    folder = write_project(tmp_path / "checkout", PROJECT)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "deepinfer_offline" / "cli" / "bench.py"))
    monkeypatch.chdir(folder / "deep" / "inside")
    return folder


@pytest.mark.usefixtures("checkout")
def test_a_case_gets_its_arguments_and_gives_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["bench", "fast", "--json", "--size", "3", "more"]) == 1
    assert capsys.readouterr().out == "ran ['--size', '3', 'more', '--json']\n"


@pytest.mark.usefixtures("checkout")
def test_without_a_case_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["bench"]) == 0
    assert capsys.readouterr().out.split() == ["fast", "A", "fast", "one."]


@pytest.mark.usefixtures("checkout")
def test_an_unknown_case_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["bench", "slow"]) == 2
    assert capsys.readouterr().err == "deepinfer: there is no benchmark 'slow'\n"


@pytest.mark.parametrize("project", ['[project]\nname = "other"\n', "[tool.x]\n", "[broken"])
def test_another_projects_code_is_not_executed(
    checkout: Path, project: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "pyproject.toml").write_text(project)
    assert call(["bench", "fast"]) == 2
    assert capsys.readouterr().out == ""
    (checkout / "pyproject.toml").unlink()
    assert call(["bench", "fast"]) == 2
    assert capsys.readouterr().out == ""


def test_the_packages_own_checkout_goes_before_the_folder_it_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write_project(tmp_path, PROJECT))
    assert call(["bench"]) == 0
    assert "job-memory" in capsys.readouterr().out


def test_the_checkouts_own_cases_are_found_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from outside: the package knows where it lies in a checkout."""
    monkeypatch.chdir(tmp_path)
    assert call(["bench"]) == 0
    assert "job-memory" in capsys.readouterr().out
    assert call(["bench", "job_memry"]) == 2
    assert "did you mean job-memory" in capsys.readouterr().err
