"""`deepinfer schema`: check and score."""

from __future__ import annotations

import gzip
import json

import pytest
from deepinfer_offline.cli.schema import app
from deepinfer_offline.schema.score import Verdict, read_cases, score, score_case, summarise
from deepinfer_structured import Options
from typer.testing import CliRunner

INTEGER = {"type": "integer", "minimum": 3}
CASES = [
    {"name": "right", "schema": INTEGER, "tests": [{"valid": True, "data": 5}, {"valid": False, "data": 1}]},
    {"name": "mislabelled invalid", "schema": INTEGER, "tests": [{"valid": False, "data": 5}]},
    {"name": "mislabelled valid", "schema": INTEGER, "tests": [{"valid": True, "data": 1}]},
    {"name": "refused", "schema": {"pattern": "(a)\\1"}, "tests": []},
    {
        "name": "order",
        "schema": {"properties": {"a": {}, "b": {}}},
        "tests": [{"valid": True, "data": {"b": 1, "a": 2}}],
    },
]


@pytest.fixture
def cases_file(tmp_path):
    path = tmp_path / "cases.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        lines.writelines(json.dumps(c) + "\n" for c in CASES)
    return path


def test_each_kind_of_verdict(cases_file):
    found = [score_case(case, Options(property_order="any")).status for case in read_cases(cases_file)]
    assert found == ["pass", "accepts_invalid", "refuses_valid", "compile_error", "pass"]
    assert score_case(CASES[4], Options()).status == "refuses_valid"


def test_score_in_workers(cases_file):
    found = score(cases_file, Options(property_order="any"), processes=2)
    report = found.report()
    assert {k: report[k] for k in ("total", "pass", "compile_error", "accepts_invalid", "refuses_valid")} == {
        "total": 5,
        "pass": 2,
        "compile_error": 1,
        "accepts_invalid": 1,
        "refuses_valid": 1,
    }
    assert report["compile_ms_p99"] >= report["compile_ms_median"] > 0
    assert report["mask_us_p99"] >= report["mask_us_median"] > 0
    refused = next(f for f in report["failures"] if f["name"] == "refused")
    assert "pattern" in refused["reason"]


def test_a_slow_schema_is_a_compile_error(cases_file):
    found = score(cases_file, Options(), processes=1, seconds=0.0005, limit=1)
    assert (found.total, found.compile_error) == (1, 1)
    assert "more than" in found.failures[0]["reason"]


def test_percentiles_of_the_report():
    verdicts = [Verdict(str(i), "pass", "", float(i), (float(i),)) for i in range(101)]
    found = summarise(verdicts, Options())
    assert (found.compile_ms_median, found.compile_ms_p99, found.mask_us_median, found.mask_us_p99) == (50, 99, 50, 99)


def test_score_command_prints_json(cases_file):
    result = CliRunner().invoke(app, ["score", str(cases_file), "--json", "--limit", "1"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["total"], report["pass"], report["property_order"]) == (1, 1, "any")


@pytest.mark.parametrize(
    ("schema", "code", "text"),
    [
        (INTEGER, 0, "enforced"),
        ({"items": {"pattern": "(a)\\1"}}, 1, "/items"),
        ({"type": "strng"}, 1, "unknown type"),
    ],
)
def test_check_command(tmp_path, schema, code, text):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == code
    assert text in result.stdout
    report = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)
    assert report["enforced"] == (code == 0)
    assert code == 0 or "message" in report


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"custom_id": "a", "body": {}}', "line 2: no 'name'"),
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not an object"),
        ('{"name": "a", "schema": {}, "tests": "no"}', "line 2: 'tests' is no list"),
    ],
)
def test_a_file_that_holds_no_cases_is_told_by_its_line(tmp_path, text, said):
    file = tmp_path / "cases.jsonl"
    file.write_text('{"name": "a", "schema": {}, "tests": []}\n' + text + "\n")
    result = CliRunner().invoke(app, ["score", str(file)], env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_an_empty_file_is_no_score(tmp_path):
    file = tmp_path / "cases.jsonl"
    file.write_text("\n")
    result = CliRunner().invoke(app, ["score", str(file)])
    assert result.exit_code == 2
    assert "no cases" in result.output


def test_what_is_left_out_is_not_enforced_in_full(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(r'{"type": "object", "properties": {"a": {"pattern": "^(a)\\1$"}}}')
    result = CliRunner().invoke(app, ["check", str(file), "--on-unsupported", "warn"])
    assert result.exit_code == 0
    assert "in full" not in result.output
    found = json.loads(CliRunner().invoke(app, ["check", str(file), "--on-unsupported", "warn", "--json"]).output)
    assert (found["enforced"], found["in_full"]) == (True, False)
