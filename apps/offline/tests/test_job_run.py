"""Whole jobs, in this process, on an engine without a model."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import itertools
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.job import window
from deepinfer_offline.job.errors import JobError, JobStopped
from deepinfer_offline.job.fields import PARAMETERS
from deepinfer_offline.job.options import JobOptions
from deepinfer_offline.job.progress import SilentReporter
from deepinfer_offline.job.report import make_report
from deepinfer_offline.job.run import Job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

spec = importlib.util.spec_from_file_location("fake_engine", Path(__file__).parent / "data" / "fake_engine.py")
fake_engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_engine)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(custom_id, url=TEXT, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id, content, **body):
    return line(custom_id, CHAT, messages=[{"role": "user", "content": content}], **body)


def jobs(count, **body):
    return [line(f"id-{n}", prompt=f"prompt number {n}", max_tokens=20, **body) for n in range(count)]


def write(path, lines):
    entries = [entry if isinstance(entry, str | bytes) else json.dumps(entry) for entry in lines]
    path.write_bytes(b"".join((entry if isinstance(entry, bytes) else entry.encode()) + b"\n" for entry in entries))
    return path


class Notes(SilentReporter):
    def __init__(self):
        self.notes = []
        self.updates = []
        self.stop_at = None

    def note(self, text):
        self.notes.append(text)

    def update(self, done, **facts):
        self.updates.append(done)


class Runner:
    """Runs jobs in a folder; `engines` are those that were started."""

    def __init__(self, folder):
        self.folder = folder
        self.output = folder / "out.jsonl"
        self.engines = []
        self.notes = Notes()

    def __call__(self, lines, **options):
        source = lines if isinstance(lines, str | Path) else write(self.folder / "in.jsonl", lines)
        options.setdefault("output", self.output)
        self.notes = Notes()
        job = Job(JobOptions(str(source), **options), self.make_engine, self.notes)
        self.facts = job.facts
        job.run()
        self.report = make_report(self.facts)
        return [json.loads(raw) for raw in options["output"].read_bytes().split(b"\n")[:-1]]

    def make_engine(self, options):
        self.engines.append(fake_engine.FakeEngine(options))
        return self.engines[-1]

    def leftovers(self):
        return sorted(
            path.name for path in self.folder.iterdir() if path.name not in ("in.jsonl", "out.jsonl", "other")
        )


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path)


def without_created(results):
    return [
        {
            **entry,
            "response": entry["response"]
            and {**entry["response"], "body": {**entry["response"]["body"], "created": 0}},
        }
        for entry in results
    ]


def error_of(result):
    return result["response"]["body"]["error"]


def test_results_are_in_input_order_and_shaped_like_openais(run):
    results = run([*jobs(100), chat("chat", "Hello", n=2, temperature=0.5, max_tokens=8)])
    assert [entry["custom_id"] for entry in results] == [*(f"id-{n}" for n in range(100)), "chat"]
    assert run.engines[0].closed
    assert run.leftovers() == []
    key = results[0]["id"].removeprefix("batch_req_")
    body = results[0]["response"]["body"]
    assert results[0] == {
        "id": f"batch_req_{key}",
        "custom_id": "id-0",
        "response": {"status_code": 200, "request_id": f"req_{key}", "body": body},
        "error": None,
    }
    assert body == {
        "id": f"cmpl-{key}",
        "object": "text_completion",
        "created": body["created"],
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "text": body["choices"][0]["text"],
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 15,
            "completion_tokens": 20,
            "total_tokens": 35,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    answer = results[100]["response"]["body"]
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    first, second = (choice["message"] for choice in answer["choices"])
    assert first["content"] != second["content"]
    assert first == {"role": "assistant", "content": first["content"], "refusal": None}
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("order", ["prefix", "input"])
def test_the_order_of_running_is_by_prefix_or_by_input(run, order):
    prefixes = ["a" * 64, "b" * 64, "c" * 64]
    lines = [line(f"{n}", prompt=prefixes[n % 3] + f" {n}", temperature=0) for n in range(30)]
    results = run(lines, order=order)
    assert [entry["custom_id"] for entry in results] == [str(n) for n in range(30)]
    place = {entry["id"].removeprefix("batch_req_"): n % 3 for n, entry in enumerate(results)}
    ran = [place[key] for key in run.engines[0].order]
    changes = sum(a != b for a, b in itertools.pairwise(ran))
    assert changes == (2 if order == "prefix" else 29)
    assert run.report["prefix_cache"]["bound"] == pytest.approx(27 * 64 / (30 * 66 + 20), rel=0.01)


def test_equal_greedy_requests_are_computed_once(run):
    same = {"prompt": "the same", "temperature": 0, "max_tokens": 9}
    lines = [line(str(n), **same, seed=n) for n in range(50)] + [line("other", **{**same, "prompt": "another"})]
    lines += [line(f"s{n}", **{**same, "temperature": 1}) for n in range(3)]
    results = run(lines)
    assert len(run.engines[0].order) == 5
    assert len({entry["response"]["body"]["choices"][0]["text"] for entry in results[:50]}) == 1
    assert len({entry["response"]["body"]["choices"][0]["text"] for entry in results[51:]}) == 3
    assert len({entry["id"] for entry in results}) == 54
    for entry in results:
        key = entry["id"].removeprefix("batch_req_")
        assert entry["response"]["request_id"] == f"req_{key}"
        assert entry["response"]["body"]["id"] == f"cmpl-{key}"
    counts = run.report["counts"]
    assert (counts["computed"], counts["deduplicated"], counts["answered"]) == (5, 49, 54)
    assert run.notes.updates[-1] <= 54


def test_a_copied_error_names_the_copys_line(run):
    long = "x" * 5000
    results = run([line("a", prompt=long, temperature=0), line("b", prompt=long, temperature=0)])
    assert [error_of(entry)["message"].split(":")[0] for entry in results] == ["line 1", "line 2"]


def test_every_kind_of_line_among_good_ones(run):
    bad = [
        (chat("long", "x" * 5000, max_tokens=5), 400, "context_length_exceeded", ["5017", "4096"]),
        (
            line("room", prompt="x" * 4000, max_tokens=200),
            400,
            "context_length_exceeded",
            ["4000", "200", "4096", "96"],
        ),
        (line("model", prompt="x", model="gpt-4o"), 404, "model_not_found", ["'gpt-4o'", "'fake-model'"]),
        (line("token", prompt=[5, 256]), 400, "invalid_value", ["256", "255"]),
        (line("bias", prompt="x", logit_bias={"300": 1}), 400, "invalid_value", ["300"]),
        (line("stop", prompt="x", stop_token_ids=[300]), 400, "invalid_value", ["300"]),
        (line("engine", prompt="too special"), 400, "engine_refuses", ["cannot run this"]),
        (chat("template", "refuse me"), 400, "chat_template_error", ["refuses"]),
        (line("good-0", prompt="again"), 400, "duplicate_custom_id", ["'good-0'", "line 1 "]),
        ("garbage", 400, "invalid_json", ["column 1"]),
    ]
    lines = []
    for n, (entry, *_) in enumerate(bad):
        lines += [line(f"good-{n}", prompt=f"good {n}"), "", entry]
    lines.append(line("model-ok", prompt="x", model="fake-model"))
    results = run(lines)
    assert len(results) == 2 * len(bad) + 1
    for n, (entry, status, code, words) in enumerate(bad):
        good, refused = results[2 * n], results[2 * n + 1]
        assert (good["custom_id"], good["response"]["status_code"]) == (f"good-{n}", 200)
        assert refused["custom_id"] == (entry["custom_id"] if isinstance(entry, dict) else None)
        assert refused["error"] is None
        assert refused["response"]["status_code"] == status
        error = error_of(refused)
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert error["message"].startswith(f"line {3 * n + 3}: ")
        assert all(word in error["message"] for word in words), error["message"]
    assert results[-1]["response"]["status_code"] == 200
    assert (run.facts.answered, run.facts.failed) == (len(bad) + 1, len(bad))
    assert any("of 21 lines are wrong" in note for note in run.notes.notes)


UNREADABLE = {
    "key twice": '{"custom_id": "a", "body": {"max_tokens": 1, "max_tokens": 2}}',
    "not a number": '{"custom_id": "a", "body": {"temperature": NaN}}',
    "half a surrogate": r'{"custom_id": "a", "body": {"prompt": "\ud83d"}}',
    "not UTF-8": b'{"custom_id": "a", "body": {"prompt": "\xff"}}',
    "too deep": '{"custom_id": "a", "body": ' + "[" * 150 + "]" * 150 + "}",
}


@pytest.mark.parametrize("raw", UNREADABLE.values(), ids=UNREADABLE)
def test_a_line_that_cannot_be_read_is_answered_under_its_name(run, raw):
    results = run([raw, line("a", prompt="x")])
    assert [result["custom_id"] for result in results] == ["a", "a"]
    assert error_of(results[0])["message"].startswith("line 1: ")
    assert error_of(results[1])["code"] == "duplicate_custom_id", "one name, one line, whatever is wrong with it"


@pytest.mark.parametrize(
    "raw",
    [
        '{"custom_id": "a", "custom_id": "b"}',
        '{"custom_id": 5, "n": NaN}',
        r'{"custom_id": "\ud83d"}',
        b'{"custom_id": "\xff"}',
        '[["custom_id", "a"], NaN]',
        '{"custom_id": "a"',
    ],
)
def test_a_line_whose_name_is_in_doubt_is_answered_under_none(run, raw):
    results = run([raw, line("b", prompt="x")])
    assert results[0]["custom_id"] is None
    assert results[1]["response"]["status_code"] == 200


def test_a_request_that_the_engine_fails_on_has_no_response(run, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "number 3")
    results = run(jobs(6))
    assert results[3] == {
        "id": results[3]["id"],
        "custom_id": "id-3",
        "response": None,
        "error": {"code": "engine_error", "message": "line 4: out of luck"},
    }
    assert [entry["error"] is None for entry in results] == [True, True, True, False, True, True]
    assert run.report["counts"]["engine_failures"] == 1


def test_a_finished_job_is_left_alone_and_can_be_done_afresh(run):
    first = run(jobs(5))
    before = run.output.stat().st_mtime_ns
    again = run(jobs(5))
    assert again == first
    assert run.output.stat().st_mtime_ns == before
    assert len(run.engines) == 1
    assert any("done already" in note for note in run.notes.notes)
    assert run.leftovers() == []
    run(jobs(5), fresh=True)
    assert len(run.engines) == 2


@pytest.mark.parametrize("change", ["prompt", "id", "more", "fewer", "model", "foreign"])
def test_the_output_of_another_job_is_not_overwritten(run, change, tmp_path):
    lines = jobs(5)
    run(lines)
    options = {}
    if change == "prompt":
        lines[2]["body"]["prompt"] = "changed"
    elif change == "id":
        lines[2]["custom_id"] = "changed"
    elif change == "more":
        lines.append(line("new", prompt="x"))
    elif change == "fewer":
        lines.pop()
    elif change == "model":
        options["engine"] = EngineOptions(dtype="float32")
    else:
        run.output.write_text("my diary\n")
    content = run.output.read_bytes()
    with pytest.raises(JobError, match=r"out.jsonl exists and .*--fresh"):
        run(lines, **options)
    assert run.output.read_bytes() == content
    assert run.leftovers() == []
    run(lines, fresh=True, **options)


def interrupt(run, lines, after=3, **options):
    """Run a job until some answers are there, as Ctrl-C would stop it."""
    real = run.make_engine

    def make_engine(engine_options):
        engine = real(engine_options)
        step = engine.step

        def stopping_step():
            if engine._stats.steps >= after:
                import signal

                signal.raise_signal(signal.SIGINT)
            return step()

        engine.step = stopping_step
        return engine

    run.make_engine = make_engine
    with pytest.raises(JobStopped):
        run(lines, **options)
    run.make_engine = real


def test_an_interrupted_job_goes_on_and_equals_the_uninterrupted_one(run, tmp_path):
    lines = [*jobs(60, temperature=1), *jobs(60, temperature=0)]
    for n, entry in enumerate(lines):
        entry["custom_id"] = str(n)
    other = tmp_path / "other"
    other.mkdir()
    whole = Runner(other)(lines)
    interrupt(run, lines)
    assert not run.output.exists()
    assert run.leftovers() == ["out.jsonl.journal"]
    resumed = run(lines)
    assert without_created(resumed) == without_created(whole)
    assert len({entry["response"]["body"]["created"] for entry in resumed}) == 1
    counts = run.report["counts"]
    assert counts["resumed"] > 0
    assert counts["resumed"] + counts["computed"] == 120
    computed = [key for engine in run.engines for key in engine.order]
    answered = [entry["id"].removeprefix("batch_req_") for entry in resumed]
    assert len(run.engines[1].order) == counts["computed"]
    assert set(computed) == set(answered)
    assert run.leftovers() == []


def test_going_on_after_the_last_answer_needs_no_engine(run, monkeypatch):
    monkeypatch.setattr(
        "deepinfer_offline.job.run.write_output", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        run(jobs(5))
    monkeypatch.undo()
    assert len(run(jobs(5))) == 5
    assert len(run.engines) == 1
    assert run.report["counts"] | {"resumed": 5, "computed": 0} == run.report["counts"]


def test_a_journal_of_another_job_is_refused(run):
    lines = jobs(60)
    interrupt(run, lines)
    journal = (run.folder / "out.jsonl.journal").read_bytes()
    with pytest.raises(JobError, match=r"input changed since .*--fresh"):
        run(lines[1:])
    with pytest.raises(JobError, match=r"begun with --dtype auto and this is float32.*--fresh"):
        run(lines, engine=EngineOptions(dtype="float32"))
    with pytest.raises(JobError, match=r"begun with --seed 0 and this is 7"):
        run(lines, engine=EngineOptions(seed=7))
    assert (run.folder / "out.jsonl.journal").read_bytes() == journal
    run(lines, engine=EngineOptions(max_running=3, kv_memory=1 << 20), order="input")
    assert run.report["counts"]["resumed"] > 0


def test_fresh_throws_the_journal_away_but_not_before_the_engine_stands(run):
    interrupt(run, jobs(60))
    journal = (run.folder / "out.jsonl.journal").read_bytes()

    def no_engine(options):
        raise RuntimeError("no memory")

    real, run.make_engine = run.make_engine, no_engine
    with pytest.raises(RuntimeError):
        run(jobs(60), fresh=True)
    assert (run.folder / "out.jsonl.journal").read_bytes() == journal
    run.make_engine = real
    run(jobs(60), fresh=True)
    assert run.report["counts"]["computed"] == 60


def test_an_engine_that_cannot_start_leaves_nothing_behind(run, monkeypatch):
    run.make_engine = lambda options: (_ for _ in ()).throw(RuntimeError("no"))
    with pytest.raises(RuntimeError):
        run(jobs(3))
    assert run.leftovers() == []


def test_an_engine_that_dies_keeps_what_was_answered(run, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "step")
    with pytest.raises(RuntimeError, match="device is lost"):
        run(jobs(60))
    assert run.engines[0].closed
    monkeypatch.delenv("FAKE_FAIL")
    run(jobs(60))
    assert run.report["counts"]["resumed"] == 24


def test_an_engine_that_loses_requests_is_noticed(run):
    real = run.make_engine

    def make_engine(options):
        engine = real(options)
        engine.step = lambda: engine._waiting.clear() or []
        return engine

    run.make_engine = make_engine
    with pytest.raises(JobError, match="stopped without answering 3 requests"):
        run(jobs(3))


@pytest.mark.parametrize("stage", ["finished", "interrupted"])
def test_errors_can_be_tried_again(run, monkeypatch, stage):
    lines = [*jobs(40), "garbage"]
    monkeypatch.setenv("FAKE_FAIL", "number 1")
    if stage == "finished":
        before = run(lines)
        assert run(lines) == before
    else:
        interrupt(run, lines, after=4, order="input")
    monkeypatch.delenv("FAKE_FAIL")
    computed = sum(len(engine.order) for engine in run.engines)
    results = run(lines, retry_errors=True)
    assert [entry["response"]["status_code"] for entry in results] == [200] * 40 + [400]
    if stage == "finished":
        assert len(run.engines[-1].order) == 11, "1 and 10 to 19"
        assert [a for a in before if a["error"] is None and a["custom_id"]] == [
            a for a, b in zip(results, before, strict=True) if b["error"] is None and a["custom_id"]
        ]
    else:
        assert computed
        assert run.report["counts"]["resumed"] > 0
    assert run.report["counts"]["failed"] == 1


def test_nothing_to_retry_is_a_finished_job(run):
    run(jobs(4))
    run(jobs(4), retry_errors=True)
    assert len(run.engines) == 1


def test_two_runs_do_not_write_one_output(run, tmp_path):
    lines = jobs(10)
    other = Runner(tmp_path)
    real = run.make_engine

    def make_engine(options):
        with pytest.raises(JobError, match="another run is writing"):
            other(run.folder / "in.jsonl")
        return real(options)

    run.make_engine = make_engine
    assert len(run(lines)) == 10


def test_windows_run_one_after_the_other(run, monkeypatch):
    monkeypatch.setattr(window, "WINDOW_REQUESTS", 7)
    results = run([*jobs(50), "garbage", line("last", prompt="x")])
    assert [entry["custom_id"] for entry in results] == [*(f"id-{n}" for n in range(50)), None, "last"]
    assert run.report["prefix_cache"]["windows"] == 8


def test_a_window_ends_when_its_prompts_are_long(run, monkeypatch):
    monkeypatch.setattr(window, "WINDOW_TOKENS", 2000)
    run([line(str(n), prompt=f"{n} " + "x" * 998) for n in range(10)])
    assert run.report["prefix_cache"]["windows"] == 5


def test_an_error_on_the_planning_thread_ends_the_job(run, monkeypatch):
    monkeypatch.setattr(window.WindowMaker, "_ordered", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(jobs(3))
    assert run.engines[0].closed


def test_a_fault_of_ours_costs_no_other_line_its_answer(run, monkeypatch):
    real = window.WindowMaker._pending

    def pending(maker, record, *rest):
        return 1 / 0 if record == 1 else real(maker, record, *rest)

    monkeypatch.setattr(window.WindowMaker, "_pending", pending)
    results = run(jobs(3))
    assert [entry["response"] is not None for entry in results] == [True, False, True]
    assert results[1]["error"] == {
        "code": "internal_error",
        "message": "line 2: internal error, ZeroDivisionError: division by zero",
    }


def test_a_job_is_not_continued_on_another_engine(run):
    interrupt(run, jobs(60))
    real = run.make_engine

    def make_engine(options):
        engine = real(options)
        engine.info = replace(engine.info, dtype="bfloat16")
        return engine

    run.make_engine = make_engine
    with pytest.raises(JobError, match=r"dtype float32 then and bfloat16 now.*--fresh"):
        run(jobs(60))


def test_an_empty_input_is_answered_with_nothing(run):
    assert run([]) == []
    assert run.engines == []
    assert run.leftovers() == []


def test_only_bad_lines(run):
    results = run(["x"] * 20)
    assert [error_of(entry)["code"] for entry in results] == ["invalid_json"] * 20


def test_input_that_changes_while_it_is_read_is_noticed(run):
    real = run.make_engine

    def make_engine(options):
        with (run.folder / "in.jsonl").open("a") as file:
            file.write(json.dumps(line("late", prompt="x")) + "\n")
        return real(options)

    run.make_engine = make_engine
    with pytest.raises(JobError, match="changed while it was read"):
        run(jobs(5))


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
    with pytest.raises(JobError, match=r"No space left on device; every answer is kept in .*out.jsonl.journal"):
        run(jobs(3))
    assert run.leftovers() == ["out.jsonl.journal"]
    monkeypatch.undo()
    assert len(run(jobs(3))) == 3
    assert len(run.engines) == 1


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
    assert [entry["custom_id"] for entry in results] == ["row-1", "row-2", "row-3", None, "row-5", "row-6"]
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
    assert run.report["structured_output"] == {"answers": 1, "complete": 1, "cut_by_length": 0, "tool_calls": 2}


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
