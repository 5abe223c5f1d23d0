"""CSV and Parquet: what a cell becomes, what a row is refused for, and what costs no row beside its own."""

from __future__ import annotations

import csv
import datetime
import io
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deepinfer_offline.job import csv_table
from deepinfer_offline.job.codec import loads
from deepinfer_offline.job.csv_table import read_csv
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.parquet_table import read_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from job_kit import error_of


def parquet(folder, **columns):
    pq.write_table(pa.table(columns), folder / "in.parquet")
    return folder / "in.parquet"


def bodies(path):
    read = read_csv if path.suffix == ".csv" else read_parquet
    return [loads(line.raw)["body"] if line.fault is None else line.fault for line in read(path)]


@pytest.mark.parametrize(
    ("text", "row", "last"),
    [
        ('prompt\n"One, two\nthree, four\nfive\n', 2, 4),
        ('prompt\none\n\n"two\nlines"\n"three\nfour\n', 6, 7),
        ('prompt\none\n"two', 3, 3),
        ('prompt,"max_tokens\none,2\n', 1, 2),
    ],
)
def test_a_quote_that_is_never_closed_swallows_no_row(run, tmp_path, text, row, last):
    (tmp_path / "in.csv").write_text(text)
    with pytest.raises(JobError, match=rf"at line {row} of the file is never closed, .*\(to line {last}\)"):
        run(str(tmp_path / "in.csv"))
    assert not run.output.exists()
    assert run.engines == []


def test_a_cell_that_goes_on_for_ever_is_asked_for_its_quote(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_table, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "in.csv").write_text('prompt\none\n"two\n' + "three\n" * 200_000 + '"\n')
    with pytest.raises(JobError, match=r"the row at line 3 of the file goes on for over 1 MiB"):
        list(read_csv(tmp_path / "in.csv"))
    (tmp_path / "in.csv").write_text("prompt\none\n" + "x" * (2 << 20) + "\nthree\n")
    one, long, three = read_csv(tmp_path / "in.csv")
    assert (one.fault, three.fault) == (None, None)
    assert "line 3 of the file) is not valid CSV: field larger than field limit" in long.fault


def test_a_quote_in_the_wrong_place_costs_its_row_only(run, tmp_path):
    (tmp_path / "in.csv").write_text('prompt,seed\n"say "hi" now",1\nfive 5" nails,2\n"a ""b""",3\n')
    bad, nails, good = run(str(tmp_path / "in.csv"))
    assert "(line 2 of the file) is not valid CSV" in error_of(bad)["message"]
    assert "a quote is written twice" in error_of(bad)["message"]
    assert (bad["custom_id"], nails["response"]["status_code"], good["response"]["status_code"]) == ("row-1", 200, 200)
    assert [body["prompt"] for body in bodies(tmp_path / "in.csv")[1:]] == ['five 5" nails', 'a "b"']


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12), min_size=1))
def test_what_pythons_writer_writes_is_read_back(tmp_path_factory, prompts):
    file = tmp_path_factory.mktemp("csv") / "in.csv"
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("prompt", "seed"), *((prompt, 1) for prompt in prompts)])
    file.write_bytes(text.getvalue().encode())
    assert [body["prompt"] for body in bodies(file)] == prompts


def test_whole_numbers_that_pandas_wrote_as_floats_are_whole_in_both_formats(tmp_path):
    (tmp_path / "in.csv").write_text("prompt,max_tokens,temperature\na,4.0,0.5\nb,,1.0\n")
    wanted = [{"prompt": "a", "max_tokens": 4, "temperature": 0.5}, {"prompt": "b", "temperature": 1}]
    table = parquet(tmp_path, prompt=["a", "b"], max_tokens=[4.0, None], temperature=[0.5, 1.0])
    for path in (tmp_path / "in.csv", table):
        found = bodies(path)
        assert found == wanted
        assert type(found[0]["max_tokens"]) is int


def test_binary_text_is_text(run, tmp_path):
    path = parquet(
        tmp_path,
        custom_id=pa.array([b"a", b"b", b"c"]),
        prompt=pa.array([b"One, two,", "ünï".encode(), b"half\xff"], pa.binary()),
        stop=pa.array([[b"x"], None, None]),
    )
    assert bodies(path)[:2] == [{"prompt": "One, two,", "stop": ["x"]}, {"prompt": "ünï"}]
    results = run(str(path))
    assert [entry["custom_id"] for entry in results] == ["a", "b", "c"]
    assert [entry["response"]["status_code"] for entry in results] == [200, 200, 400]
    said = error_of(results[2])["message"]
    assert said == "line 3: prompt is binary and not UTF-8 text: byte 0xff at place 5"


def test_decimals_are_numbers(tmp_path):
    big = 12345678901234567890123
    path = parquet(
        tmp_path,
        custom_id=pa.array([Decimal(big), Decimal(big + 1)], pa.decimal128(38, 0)),
        prompt=["a", "b"],
        temperature=pa.array([Decimal("0.5"), None]),
        max_tokens=pa.array([Decimal("4.00"), Decimal("7.00")]),
    )
    assert bodies(path) == [{"prompt": "a", "temperature": 0.5, "max_tokens": 4}, {"prompt": "b", "max_tokens": 7}]
    assert [loads(line.raw)["custom_id"] for line in read_parquet(path)] == [str(big), str(big + 1)]


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["temperature", "max_tokens"])
def test_an_infinity_is_refused_as_in_every_format(run, tmp_path, name, value):
    path = parquet(tmp_path, prompt=["a", "b", "c"], **{name: [value, 1.0, float("nan")]})
    results = run(str(path))
    assert [entry["response"]["status_code"] for entry in results] == [400, 200, 200]
    assert error_of(results[0])["message"].startswith(f"line 1: {name} is {value}, ")


def test_types_that_json_does_not_have_are_refused_by_name(run, tmp_path):
    path = parquet(
        tmp_path,
        prompt=pa.array([datetime.date(2026, 11, 30), None]),
        logit_bias=pa.array([None, [("5", 1.0)]], pa.map_(pa.string(), pa.float64())),
    )
    first, second = run(str(path))
    assert error_of(first)["message"].startswith("line 1: prompt holds a date; text, binary text, numbers, ")
    assert error_of(second)["message"].startswith("line 2: logit_bias[0] holds a map; ")


def test_an_empty_row_is_told_of_a_column_that_is_there(run, tmp_path):
    chat = [{"role": "user", "content": "x"}]
    only = run(str(parquet(tmp_path, messages=[chat, None])))
    assert error_of(only[1])["message"] == "line 2: messages is missing"
    both = run(str(parquet(tmp_path, messages=[chat, None, None], prompt=["", None, "x"])), fresh=True)
    assert [entry["response"]["status_code"] for entry in both] == [200, 400, 200]
    assert error_of(both[1])["message"] == "line 2: the row has neither prompt nor messages"
