"""Schemas that break grammar engines, with the right verdicts; each is right, or refused with a true reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deepinfer_structured import Options, Spec, StructuredError, compile_spec

CASES = [json.loads(line) for line in (Path(__file__).parent / "data/schema-cases-dev.jsonl").read_text().splitlines()]
# What is refused for good: nothing fits the schema, or the schema is malformed.
REFUSED = {
    "empty enum": "no JSON value fits",
    "min>max": "no JSON value fits",
    "minLength>maxLength": "no JSON value fits",
    "const+type": "no JSON value fits",
    "mutual req recursion": "no JSON value fits",
    "type unknown": "unknown type",
    "nested ref cyc": "refers to itself",
}
# Valid instances that are not generated: other spellings of a value, or a day that does not exist (the oracle that made
# the verdicts had no date-time checker).
NARROWED = {("format date-time", '"2024-02-31T00:00:00Z"'), ("format date-time", '"2024-13-31T00:00:00Z"')}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_case(case, byte_vocabulary):
    spec = Spec.json_schema(case["schema"])
    if case["name"] in REFUSED:
        with pytest.raises(StructuredError, match=REFUSED[case["name"]]):
            compile_spec(spec, byte_vocabulary)
        assert not any(c["valid_per_jsonschema"] is True for c in case["checks"])
        return
    grammar = compile_spec(spec, byte_vocabulary, Options())
    for check in case["checks"]:
        data, matcher = list(check["instance"].encode()), grammar.matcher()
        accepted = matcher.accept(data) == len(data) and matcher.is_accepting
        expected = check["valid_per_jsonschema"]
        if expected in (True, False) and (case["name"], check["instance"]) not in NARROWED:
            assert accepted == expected, check["instance"]
        elif (case["name"], check["instance"]) in NARROWED:
            assert not accepted
