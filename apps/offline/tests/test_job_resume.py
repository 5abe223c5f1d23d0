"""What a job does when it is interrupted, repeated, refused, or when its engine or disk fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.job import window
from deepinfer_offline.job.errors import JobError, JobStopped
from job_kit import Runner, error_of, jobs, line, without_created


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


OTHERS = {
    "prompt": r"line 3 differs in the input: line 3 asks for something else now",
    "first prompt": r"line 1 differs in the input: line 1 asks for something else now",
    "id": r"line 3 differs in the input: it answers custom_id 'id-2' and line 3 of the input has 'changed'",
    "more": r"it has 5 lines, the input has more",
    "fewer": r"has more lines than the input",
    "dtype": r"line 1 differs in an option: --dtype was auto and is float32",
    "two": r"line 1 differs in an option: --dtype was auto and is float32, --seed was 0 and is 7",
    "argument": r"line 1 differs in an option: --engine-arg was not given and is a=b",
    "model": r"line 1 differs in the model: it was made by 'fake-model' and this run's is '/models/other'",
    "seed": r"line 1 differs in .*--seed",
    "foreign": r"line 1 differs in its form: it is not a line that deepinfer writes",
}


@pytest.mark.parametrize("body", [None, [], "x", {}])
def test_an_output_whose_bodies_are_another_tools_is_told_in_a_sentence(run, body):
    written = {"id": "batch_req_0", "custom_id": "id-0", "response": {"status_code": 200, "body": body}, "error": None}
    run.output.write_text(json.dumps(written) + "\n")
    with pytest.raises(JobError, match=r"out\.jsonl exists and is not .* line 1 differs in the text of line 1"):
        run(jobs(1))


@pytest.mark.parametrize("change", OTHERS)
def test_the_output_of_another_job_is_not_overwritten_and_the_difference_is_named(run, change):
    """A seed that was given before cannot be guessed: then all that remains is named."""
    lines = jobs(5)
    run(lines, engine=EngineOptions(model="fake-model", seed=10**9 if change == "seed" else 0))
    engine = EngineOptions(model="fake-model")
    if change == "prompt":
        lines[2]["body"]["prompt"] = "changed"
    elif change == "first prompt":
        lines[0]["body"]["prompt"] = "changed"
    elif change == "id":
        lines[2]["custom_id"] = "changed"
    elif change == "more":
        lines.append(line("new", prompt="x"))
    elif change == "fewer":
        lines.pop()
    elif change == "foreign":
        run.output.write_text("my diary\n")
    else:
        fields = {
            "dtype": {"dtype": "float32"},
            "two": {"dtype": "float32", "seed": 7},
            "argument": {"engine_args": (("a", "b"),)},
            "model": {"model": "/models/other"},
        }
        engine = replace(engine, **fields.get(change, {}))
    content = run.output.read_bytes()
    with pytest.raises(JobError, match=f"out.jsonl exists and .*{OTHERS[change]}.*--fresh"):
        run(lines, engine=engine)
    assert run.output.read_bytes() == content
    assert run.leftovers() == []
    run(lines, fresh=True, engine=engine)


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

    def check_engine(options):
        raise EngineStartError("the model has gone")

    run.check_engine = check_engine
    with pytest.raises(EngineStartError):
        run(jobs(5), output=run.folder / "other")
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


def test_corrected_lines_are_all_that_runs_again(run):
    lines = [*jobs(40), line("bad", prompt="x", max_tokens=0), "garbage", line("id-3", prompt="a name twice")]
    before = run(lines)
    lines[-3:] = [line("bad", prompt="x", max_tokens=1), line("was garbage", prompt="y"), line("id-3b", prompt="z")]
    with pytest.raises(JobError, match=r"line 41 asks for something else now; --retry-errors keeps .*--fresh"):
        run(lines)
    after = run(lines, retry_errors=True)
    assert after[:40] == before[:40]
    assert [entry["response"]["status_code"] for entry in after] == [200] * 43
    assert [entry["custom_id"] for entry in after[40:]] == ["bad", "was garbage", "id-3b"]
    assert len(run.engines[-1].order) == 3
    assert run.report["counts"]["resumed"] == 40
    assert run.leftovers() == []


def test_lines_that_were_added_or_changed_run_and_the_answers_that_are_dropped_are_counted(run):
    lines = jobs(10)
    before = run(lines)
    lines[4] = line("new", prompt="another prompt")
    lines += [line("more", prompt="more")]
    with pytest.raises(JobError, match=r"line 5 differs .*--retry-errors"):
        run(lines)
    after = run(lines, retry_errors=True)
    assert len(run.engines[-1].order) == 2
    assert [entry for n, entry in enumerate(after) if n not in (4, 10)] == [*before[:4], *before[5:]]
    assert "1 answers in" in run.notes.notes[0]
    assert run(lines) == after
    assert run(lines[:10], retry_errors=True) == after[:10]


def test_a_name_that_a_corrected_line_takes_is_not_answered_twice(run):
    lines = ["garbage", *jobs(2)]
    run(lines)
    lines[0] = line("id-1", prompt="corrected")
    after = run(lines, retry_errors=True)
    assert [(entry["custom_id"], entry["response"]["status_code"]) for entry in after] == [
        ("id-1", 200),
        ("id-0", 200),
        ("id-1", 400),
    ]


def test_a_job_of_failed_lines_alone_can_be_corrected(run):
    run(["garbage", "x"])
    assert [entry["response"]["status_code"] for entry in run(jobs(3), retry_errors=True)] == [200] * 3


@pytest.mark.parametrize("change", ["options", "input", "foreign"])
def test_retrying_does_not_replace_the_output_of_another_job(run, change):
    lines = [*jobs(3), "garbage"]
    run(lines, engine=EngineOptions(seed=0))
    if change == "foreign":
        run.output.write_text("my diary\n")
    content = run.output.read_bytes()
    wrong = [line(f"other {n}", prompt="x") for n in range(4)] if change == "input" else lines
    with pytest.raises(JobError, match=r"is not this job's result; line 1 differs in"):
        run(wrong, retry_errors=True, engine=EngineOptions(seed=7 if change == "options" else 0))
    assert run.output.read_bytes() == content
    assert run.leftovers() == []


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
