"""The forms that requests and results take: packed files, tables, log-probabilities, tools."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import threading
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.fields import PARAMETERS
from deepinfer_offline.job.options import JobOptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_kit import CHAT, TEXT, Runner, chat, error_of, jobs, line


def test_a_gzip_file_has_the_same_results_as_the_plain_one(run, tmp_path):
    plain = run(jobs(5))
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    assert run(str(packed), output=tmp_path / "second.jsonl") == [
        {**entry, "response": entry["response"]} for entry in without(plain, run)
    ]


def without(results, run):
    second = [json.loads(raw) for raw in (run.folder / "second.jsonl").read_bytes().splitlines()]
    for mine, theirs in zip(results, second, strict=True):
        mine["response"]["body"]["created"] = theirs["response"]["body"]["created"]
    return results


def test_a_pipe_is_read_once_and_copied(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    os.mkfifo(tmp_path / "pipe")
    text = "".join(json.dumps(entry) + "\n" for entry in jobs(3))
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
    writer.start()
    assert len(run(str(tmp_path / "pipe"))) == 3
    writer.join()
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which file is flushed")
def test_a_full_disk_at_the_end_keeps_every_answer(run, monkeypatch):
    real = os.fsync

    def fsync(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".partial"):
            raise OSError(28, "No space left on device")
        return real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(JobError, match=r"cannot write .*out.jsonl.partial: No space left on device"):
        run(jobs(3))
    assert run.leftovers() == ["out.jsonl.journal"]
    monkeypatch.undo()
    assert len(run(jobs(3))) == 3
    assert len(run.engines) == 1


def test_an_output_that_is_a_link_stays_one(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "elsewhere" / "there.jsonl")
    assert len(run(jobs(3))) == 3
    assert (tmp_path / "out.jsonl").is_symlink()
    assert len((tmp_path / "elsewhere" / "there.jsonl").read_text().splitlines()) == 3


def test_a_link_to_output_is_checked_and_locked_as_the_file_it_names(run, tmp_path):
    (tmp_path / "lk").mkdir()
    content = json.dumps(line("a", prompt="x")) + "\n"
    for name in ("res.partial", "res.journal"):
        (tmp_path / "lk" / name).write_text(content)
        (tmp_path / "lkout").unlink(missing_ok=True)
        (tmp_path / "lkout").symlink_to("lk/res")
        with pytest.raises(JobError, match=rf"are the same file, .*{name}; choose another OUTPUT$"):
            run(str(tmp_path / "lk" / name), output=tmp_path / "lkout")
        assert (tmp_path / "lk" / name).read_text() == content
        (tmp_path / "lk" / name).unlink()


def test_two_names_of_one_output_are_one_job(run, tmp_path):
    (tmp_path / "once.out").symlink_to(tmp_path / "twice.out")
    (tmp_path / "twice.out").symlink_to("out.jsonl")
    other = Runner(tmp_path)
    real = run.make_engine

    def make_engine(options):
        for name in ("once.out", "twice.out"):
            with pytest.raises(JobError, match=r"another run is writing .*out\.jsonl at this moment"):
                other(str(tmp_path / "in.jsonl"), output=tmp_path / name)
        return real(options)

    run.make_engine = make_engine
    assert len(run(jobs(3))) == 3
    assert other(str(tmp_path / "in.jsonl"), output=tmp_path / "once.out") == run(str(tmp_path / "in.jsonl"))
    assert other.engines == []
    assert len(run.engines) == 1


def test_a_link_that_leads_nowhere_is_named_before_anything_runs(run, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone" / "there.jsonl")
    with pytest.raises(JobError, match=r"gone does not exist"):
        run(jobs(3), output=tmp_path / "out")
    assert run.engines == []


def test_a_csv_file(run, tmp_path):
    rows = [
        ("prompt", "max_tokens", "temperature", "label", "stop"),
        ('Say "hi",\nplease', "5", "0", "x", ""),
        ("42", "6", "", "y", '["a", "b"]'),
        ("cold", "7", "cold", "z", ""),
        ("short row",),
        ("ünï\u2028code", "8", "0", "x", ""),
    ]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    (tmp_path / "in.csv").write_bytes(b"\xef\xbb\xbf" + text.getvalue().encode() + b"bad \xff byte,1,,,\r\n")
    results = run(str(tmp_path / "in.csv"))
    assert [entry["custom_id"] for entry in results] == ["row-1", "row-2", "row-3", "row-4", "row-5", "row-6"]
    assert [entry["response"]["status_code"] for entry in results] == [200, 200, 400, 400, 200, 400]
    tokens = [results[n]["response"]["body"]["usage"] for n in (0, 1, 4)]
    assert [usage["completion_tokens"] for usage in tokens] == [5, 6, 8]
    assert [usage["prompt_tokens"] for usage in tokens] == [16, 2, len("ünï\u2028code".encode())]
    assert error_of(results[2])["message"].startswith("line 3: temperature must be a number from 0 to 2, got 'cold'")
    assert "1 cells" in error_of(results[3])["message"]
    assert "0xff" in error_of(results[5])["message"]
    assert run.notes.notes[0].endswith("ignored: label")


def test_a_csv_file_with_messages_and_ids(run, tmp_path):
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    text = io.StringIO()
    csv.writer(text).writerows([("custom_id", "messages"), ("7", messages), ("b", "[{]")])
    (tmp_path / "in.csv").write_text(text.getvalue())
    results = run(str(tmp_path / "in.csv"))
    assert results[0]["custom_id"] == "7"
    assert results[0]["response"]["body"]["object"] == "chat.completion"
    assert error_of(results[1])["message"] == "line 2: messages must be a list, got '[{]'"


def test_a_parquet_file(run, tmp_path):
    messages = [
        [{"role": "user", "content": "Hi", "name": None}],
        [{"role": "user", "content": "Ho", "name": "x"}],
        None,
    ]
    table = pa.table(
        {
            "messages": messages,
            "max_tokens": pa.array([5.0, float("nan"), 3.0]),
            "custom_id": [10, 11, 12],
            "stop": [["x"], None, None],
            "source": ["web", "web", "web"],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    results = run(str(tmp_path / "in.parquet"))
    assert [entry["custom_id"] for entry in results] == ["10", "11", "12"]
    assert [entry["response"]["status_code"] for entry in results] == [200, 200, 400]
    assert results[0]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert run.notes.notes[0].endswith("ignored: source")


def test_tables_without_a_prompt_say_what_they_have(run, tmp_path):
    (tmp_path / "in.csv").write_text("text,label\na,b\n")
    with pytest.raises(JobError, match=r"no column 'prompt' or 'messages'; its columns are 'text', 'label'"):
        run(str(tmp_path / "in.csv"))
    (tmp_path / "in.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(JobError, match="is not a Parquet file"):
        run(str(tmp_path / "in.parquet"))


def test_echo_and_logprobs(run):
    body = run([line("a", prompt="ab", echo=True, logprobs=1, max_tokens=3, temperature=0)])[0]["response"]["body"]
    choice = body["choices"][0]
    assert choice["text"][:2] == "ab"
    assert choice["logprobs"]["tokens"] == list(choice["text"])
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None


def test_logprobs_without_numbers_are_valid_json(run):
    run([chat("a", "x", logprobs=True, top_logprobs=5, max_tokens=4)])

    def refuse(name):
        raise AssertionError(name)

    found = json.loads(run.output.read_bytes(), parse_constant=refuse)
    first = found["response"]["body"]["choices"][0]["logprobs"]["content"][0]
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.5, -9999.0, -9999.0, -9999.0, -9999.0]


WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def test_tool_calls_are_found_in_answers(run):
    named = {"type": "function", "function": {"name": "get_weather"}}
    results = run(
        [
            chat("auto", "call a tool", tools=[WEATHER], max_tokens=200),
            chat("text", "just talk", tools=[WEATHER], max_tokens=5),
            chat("named", "x", tools=[WEATHER], tool_choice=named),
            chat("none", "call a tool", tools=[WEATHER], tool_choice="none"),
        ]
    )
    choices = [entry["response"]["body"]["choices"][0] for entry in results]
    call = choices[0]["message"]["tool_calls"][0]
    key = results[0]["id"].removeprefix("batch_req_")
    assert call == {
        "id": f"call_{key}_0_0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
    }
    assert choices[0]["message"]["content"] == "Sure."
    assert choices[0]["finish_reason"] == "tool_calls"
    assert "tool_calls" not in choices[1]["message"]
    assert choices[2]["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":"Paris"}'
    assert choices[2]["finish_reason"] == "stop"
    assert "<tool_call>" in choices[3]["message"]["content"]
    assert run.report["structured_output"] == {
        "answers": 1,
        "complete": 1,
        "cut_by_length": 0,
        "tool_calls": 2,
        "notes": {},
    }


def test_a_message_can_be_continued(run):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once upon"}]
    body = run([line("a", CHAT, messages=messages, continue_final_message=True)])[0]["response"]["body"]
    assert body["usage"]["prompt_tokens"] == len("<user>x<assistant>Once upon")


def test_served_names(run, tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    names = [str(folder), "my-model", "fake-model", "alias", "other"]
    results = run(
        [line(str(n), prompt="x", model=name) for n, name in enumerate(names)],
        engine=EngineOptions(model=str(folder)),
        served_names=("alias",),
    )
    assert [entry["response"]["status_code"] for entry in results] == [200, 200, 200, 200, 404]


def test_a_model_folder_that_changed_is_another_model(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    options = JobOptions("in", tmp_path / "out", engine=EngineOptions(model=str(tmp_path / "m")))
    before = options.fingerprint()
    assert replace(options, order="input", engine=replace(options.engine, max_running=2)).fingerprint() == before
    (tmp_path / "m" / "config.json").write_text("{} ")
    assert options.fingerprint() != before


def test_the_time_of_the_job_can_be_fixed(run, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "12345")
    run(jobs(3))
    first = run.output.read_bytes()
    run(jobs(3), fresh=True)
    assert run.output.read_bytes() == first
    assert json.loads(first.split(b"\n")[0])["response"]["body"]["created"] == 12345


@pytest.mark.parametrize("time", ["abc", "1.5", "-1", "٣"])
def test_a_time_that_is_none_is_refused_before_anything_runs(run, monkeypatch, time):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", time)
    with pytest.raises(JobError, match=f"SOURCE_DATE_EPOCH is '{time}', not a whole number"):
        run(jobs(3))
    assert (run.engines, run.leftovers()) == ([], [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(sorted(PARAMETERS)), json_values, max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([CHAT, TEXT]), bodies), max_size=30))
def test_any_bodies_have_one_answer_a_line(tmp_path_factory, asked):
    runner = Runner(tmp_path_factory.mktemp("any"))
    required = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, TEXT: {"prompt": "x"}}
    lines = [line(str(n), url, **{**required[url], **body}) for n, (url, body) in enumerate(asked)]
    results = runner(lines)
    assert [entry["custom_id"] for entry in results if entry["custom_id"]] == [
        str(n) for n, entry in enumerate(results) if entry["custom_id"]
    ]
    for entry in results:
        assert entry["error"] is None, entry
        assert entry["response"]["status_code"] in (200, 400, 404)


def test_a_line_of_any_depth_is_answered(run):
    def nested(depth):
        return "[" * depth + "]" * depth

    raw = json.dumps(chat("a", "x", structured_outputs={"json": {"enum": "HERE"}}, temperature=0))
    results = run([raw.replace('"HERE"', nested(depth)) for depth in (50, 90, 120, 260, 900, 990, 5000)])
    codes = [entry["response"]["status_code"] == 200 or error_of(entry)["code"] for entry in results]
    assert codes[0] is True
    assert set(codes[2:]) == {"invalid_json"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.binary(max_size=60) | st.sampled_from([json.dumps(e).encode() for e in jobs(3)]), max_size=12)
)
def test_any_file_has_one_answer_a_line(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("any")
    runner = Runner(folder)
    data = b"\n" + b"\n".join(pieces)  # the empty first line keeps UTF-16 marks off the file's start
    (folder / "in.jsonl").write_bytes(data)
    wanted = [raw for raw in data.split(b"\n") if raw.strip(b" \t\r\v\f")]
    results = runner(str(folder / "in.jsonl"))
    assert len(results) == len(wanted)
    seen = set()
    for raw, result in zip(wanted, results, strict=True):
        good = raw.startswith(b'{"custom_id": "id-') and raw not in seen
        seen.add(raw)
        assert result["error"] is None
        assert result["response"]["status_code"] == (200 if good else 400)


ROWS = [
    ("good-1", "hi", "", "1"),
    ("half a pair", "hi", '"\\ud800"', "1"),
    ("deep", "hi", "[" * 600 + "]" * 600, "1"),
    ("deeper", "hi", "[" * 3000 + "]" * 3000, "1"),
    ("infinite", "hi", "", "1e999"),
    ("named so", "hi", "", "Infinity"),
    ("short", "hi"),
    ("long", "hi", "a", "1", "2"),
    ("no number", "hi", "", "NaN"),
    ("good-2", "hi", '["a"]', "0.5"),
]


def test_a_bad_cell_costs_its_row_only_which_keeps_its_name(run, tmp_path):
    text = io.StringIO()
    csv.writer(text).writerows([("custom_id", "prompt", "stop", "temperature"), *ROWS])
    (tmp_path / "in.csv").write_text(text.getvalue())
    results = run(str(tmp_path / "in.csv"))
    assert [entry["custom_id"] for entry in results] == [row[0] for row in ROWS]
    good = {entry["custom_id"] for entry in results if entry["response"]["status_code"] == 200}
    assert good == {
        "good-1",
        "deep",
        "deeper",
        "no number",
        "good-2",
    }  # deep lists stay text; a NaN is a missing number, as pandas writes one
    said = {entry["custom_id"]: error_of(entry)["message"] for entry in results if entry["custom_id"] not in good}
    assert "surrogate" in said["half a pair"]
    assert "temperature must be a number" in said["infinite"]
    assert "'Infinity'" in said["named so"]
    assert "the row has 2 cells and the header has 4" in said["short"]


def test_a_row_of_another_length_is_not_taken_for_another_row(run, tmp_path):
    """Where cells may have moved, the name is not known."""
    for header, row, name in (
        ("prompt,custom_id,seed", "hi, there,a,1", None),
        ("prompt,custom_id", "hi, there,a", "a"),
        ("prompt,custom_id", "hi", None),
        ("custom_id,prompt", "a", "a"),
        ("prompt,seed", "hi", "row-1"),
    ):
        good = ",".join({"prompt": "x", "custom_id": "a", "seed": "1"}[column] for column in header.split(","))
        (tmp_path / "in.csv").write_text(f"{header}\n{row}\n{good}\n")
        bad, fine = run(str(tmp_path / "in.csv"), fresh=True)
        assert bad["custom_id"] == name
        assert bad["response"]["status_code"] == 400
        assert fine["response"]["status_code"] == 200, (
            "a row that may have moved does not make another one a repetition"
        )
