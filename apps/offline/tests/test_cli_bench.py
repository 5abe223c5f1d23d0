from __future__ import annotations

import pytest
from deepinfer_offline.cli.main import call

RUNNER = """
class UnknownCaseError(ValueError): pass
def cases(): return {"fast": "A fast one."}
def run(name, argv):
    if name != "fast": raise UnknownCaseError(f"there is no benchmark {name!r}")
    print("ran", argv)
    return 1
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "benchmarks" / "cases").mkdir(parents=True)
    (tmp_path / "benchmarks" / "run.py").write_text(RUNNER)
    (tmp_path / "deep" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "inside")


@pytest.mark.usefixtures("checkout")
def test_a_case_gets_its_arguments_and_gives_its_status(capsys):
    assert call(["bench", "fast", "--json", "--size", "3", "more"]) == 1
    assert capsys.readouterr().out == "ran ['--size', '3', 'more', '--json']\n"


@pytest.mark.usefixtures("checkout")
def test_without_a_case_they_are_listed(capsys):
    assert call(["bench"]) == 0
    assert capsys.readouterr().out.split() == ["fast", "A", "fast", "one."]


@pytest.mark.usefixtures("checkout")
def test_an_unknown_case_is_one_sentence(capsys):
    assert call(["bench", "slow"]) == 2
    assert capsys.readouterr().err == "deepinfer: there is no benchmark 'slow'\n"


def test_the_checkouts_own_cases_are_found_by_their_files(tmp_path, monkeypatch, capsys):
    """Also from outside: the package knows where it lies in a checkout."""
    monkeypatch.chdir(tmp_path)
    assert call(["bench"]) == 0
    assert "job-memory" in capsys.readouterr().out
    assert call(["bench", "job_memry"]) == 2
    assert "did you mean job-memory" in capsys.readouterr().err
