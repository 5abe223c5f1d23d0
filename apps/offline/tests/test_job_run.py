"""A job from lines to results: order, shape, and one answer for every line, however wrong it is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from deepinfer_offline.engine.base import EngineStats
from deepinfer_offline.job.report import Facts, make_report
from job_kit import CHAT, chat, error_of, fake_engine, jobs, line


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


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(run, monkeypatch):
    """Its ids could take more memory than there is, and with it every other answer."""
    real = fake_engine.FakeTokenizer.encode
    encoded = []

    def encode(self, text, *, add_special_tokens=True):
        encoded.append(len(text))
        return real(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(fake_engine.FakeTokenizer, "encode", encode)
    long = "x" * 5000
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": long}]
    results = run(
        [
            line("prompt", prompt=long),
            chat("chat", long),
            line("on", CHAT, messages=turns, continue_final_message=True),
            line("good", prompt="x" * 4000),
        ]
    )
    assert encoded == [4000]
    assert [entry["response"]["status_code"] for entry in results] == [400, 400, 400, 200]
    said = [error_of(entry) for entry in results[:3]]
    assert [error["param"] for error in said] == ["prompt", "messages", "messages"]
    assert {error["code"] for error in said} == {"context_length_exceeded"}
    assert said[0]["message"].startswith(
        "line 1: the prompt has at least 5000 tokens (5000 characters), and the context"
    )


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
    ("cut", "name"),
    [
        ('{"custom_id": "a", "method": "POST", "bo', "a"),
        (r'{"custom_id": "a\"b", "met', 'a"b'),
        ('{"custom_id": "a"', None),
        ('{"method": "POST", "custom_id": "a", "bo', None),
        ('{"custom_id": "a", "body": {"custom_id": "b", ', None),
        (r'{"custom_id": "\ud800", "bo', None),
        ('["custom_id", "a", ', None),
    ],
)
def test_a_line_that_was_cut_off_is_answered_under_the_name_it_begins_with(run, cut, name):
    """A writer that died in the middle of a line and wrote it again: the whole line is no repetition."""
    torso, whole = run([cut, line(name or "a", prompt="x")])
    assert torso["custom_id"] == name
    assert error_of(torso)["code"] == "invalid_json"
    assert whole["response"]["status_code"] == 200


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


def test_what_grammars_say_is_reported_with_structured_output_and_not_among_seconds() -> None:
    notes = {"not enforced: format 'email' at /mail": 3}
    stats = EngineStats(prefill_seconds=1.0, decode_seconds=2.0, extra={"grammar_notes": notes, "kv_store": {"a": 1}})
    report = make_report(Facts("in", "out", stats=stats))
    assert report["structured_output"]["notes"] == notes
    assert report["engine_seconds"] == {"prefill": 1.0, "decode": 2.0}
    assert report["kv_store"] == {"a": 1}
    assert make_report(Facts("in", "out", stats=EngineStats()))["structured_output"]["notes"] == {}


def test_what_the_engine_has_to_say_is_told(run):
    def make_engine(options):
        engine = type(run).make_engine(run, options)
        engine.info = replace(engine.info, notes=("slower code serves it (no compiler)",))
        return engine

    run.make_engine = make_engine
    run(jobs(2))
    assert run.notes.notes == ["slower code serves it (no compiler)"]
    assert run.report["engine"]["notes"] == ("slower code serves it (no compiler)",)
