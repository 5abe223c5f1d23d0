from __future__ import annotations

import json

import numpy as np
from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.scan import first_equal, scan
from hypothesis import given
from hypothesis import strategies as st


def line(number, custom_id="x", **body):
    body = {"prompt": "hello", "temperature": 0, **body}
    value = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return Line(number, json.dumps(value).encode())


@given(st.lists(st.integers(0, 6), max_size=60))
def test_first_equal_finds_the_earliest_twin(values):
    hashes = b"".join(value.to_bytes(8, "little") + (value * 31).to_bytes(8, "little") for value in values)
    expected = [-1 if value == 0 or values.index(value) == i else values.index(value) for i, value in enumerate(values)]
    assert first_equal(hashes).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=40))
def test_both_halves_of_a_hash_count(values):
    hashes = b"".join(a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in values)
    expected = [-1 if v == (0, 0) or values.index(v) == i else values.index(v) for i, v in enumerate(values)]
    assert first_equal(hashes).tolist() == expected


def test_repeated_ids_and_answers_are_found_far_apart():
    lines = [line(n, f"id-{n}", prompt=f"prompt {n}") for n in range(1, 3000)]
    lines += [line(3000, "id-1", prompt="new"), line(3001, "other", prompt="prompt 1")]
    index = scan(lines)
    assert index.same_id[2999] == 0
    assert index.same_answer[3000] == 0
    assert (index.same_id >= 0).sum() == 1
    assert (index.same_answer >= 0).sum() == 1
    assert index.bad == 1


def test_a_line_that_repeats_an_id_is_never_the_original_of_another():
    index = scan(
        [line(1, "a", prompt="p"), line(2, "a", prompt="q"), line(3, "b", prompt="q"), line(4, "c", prompt="q")]
    )
    assert index.same_id.tolist() == [-1, 0, -1, -1]
    assert index.same_answer.tolist() == [-1, -1, -1, 2]


def test_seeds_and_cut_offs_do_not_matter_to_greedy_answers_but_all_else_does():
    base = {"custom_id": "a", "prompt": "p", "max_tokens": 5}
    same = [{"seed": 3}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"temperature": 1e-7}, {"user": "u"}, {"n": 1}]
    other = [
        {"prompt": "p "},
        {"max_tokens": 6},
        {"stop": "x"},
        {"logprobs": 1},
        {"n": 2},
        {"temperature": 0.5},
        {"presence_penalty": 0.1},
        {"echo": True},
        {"logit_bias": {"5": 1}},
        {"response_format": {"type": "json_object"}},
        {"model": "other"},
    ]
    lines = [line(1, **base)] + [
        line(n, **{**base, "custom_id": str(n), **change}) for n, change in enumerate(same + other, 2)
    ]
    same_answer = scan(lines).same_answer
    assert same_answer[1 : len(same) + 1].tolist() == [0] * len(same)
    assert (same_answer[len(same) + 1 :] == -1).all()


def test_equal_sampled_requests_are_all_wanted():
    index = scan([line(n, str(n), temperature=1, seed=5) for n in range(1, 4)])
    assert (index.same_answer == -1).all()


def test_the_digest_tells_where_lines_end():
    def digest(*raws):
        return scan([Line(n, raw) for n, raw in enumerate(raws, 1)]).digest

    assert digest(b"ab", b"c") != digest(b"a", b"bc")
    assert digest(b"ab", b"c") == digest(b"ab", b"c")


def test_line_numbers_are_the_files(tmp_path):
    assert scan([line(3, "a"), line(9, "b")]).numbers.tolist() == [3, 9]
    assert scan([]).numbers.dtype == np.int64
