"""Compilation: kinds of specification, refusals, limits, the worker process."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import time
from types import SimpleNamespace

import pytest
from deepinfer_structured import (
    InvalidSpec,
    LimitExceeded,
    Limits,
    Options,
    Spec,
    StructuredError,
    UnsatisfiableSchema,
    UnsupportedSchema,
    compile_spec,
    trial,
)
from deepinfer_structured.engines import xgrammar
from deepinfer_structured.lowering import lower_spec
from deepinfer_structured.schema import solver
from deepinfer_structured.worker import Worker


def test_choice_takes_one_of_the_texts(accepts):
    spec = Spec.choice(["a", 'b\n"c', "é"])
    assert all(accepts(spec, t) for t in ["a", 'b\n"c', "é"])
    assert not accepts(spec, "ab")


def test_lark_and_ebnf(accepts):
    assert accepts(Spec.grammar('root ::= "a" b*\nb ::= "b" | [0-9]'), "ab1")
    assert not accepts(Spec.grammar('root ::= "a" b*\nb ::= "b" | [0-9]'), "b")
    assert accepts(Spec.grammar('start: "x" /[a-z]+/'), "xab")


def test_structural_tags_bind_tagged_parts_only(accepts):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tag = {"begin": "<function=foo>", "schema": schema, "end": "</function>"}
    spec = Spec.structural_tag({"structures": [tag], "triggers": ["<function="]})
    assert accepts(spec, 'hello <function=foo>{"a": 1}</function> bye')
    assert accepts(spec, "nothing to call")
    assert not accepts(spec, '<function=foo>{"a": "x"}</function>')
    assert not accepts(spec, "<function=bar>")


def test_nested_structural_tags(accepts):
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tags = {"type": "triggered_tags", "triggers": ["<t"], "tags": [{"begin": "<t>", "content": content, "end": "</t>"}]}
    spec = Spec.structural_tag({"format": {**tags, "at_least_one": True}})
    assert accepts(spec, "a<t>5</t>b")
    assert not accepts(spec, "a")


def test_response_formats():
    assert Spec.from_response_format(None) is None
    assert Spec.from_response_format({"type": "text"}) is None
    assert Spec.from_response_format({"type": "json_object"}) == Spec.json_object()
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "null"}}}
    assert Spec.from_response_format(named) == Spec.json_schema({"type": "null"})
    with pytest.raises(InvalidSpec, match="got 'xml'"):
        Spec.from_response_format({"type": "xml"})
    with pytest.raises(InvalidSpec, match="exactly one"):
        Spec.from_structured_outputs({"json": {}, "regex": "a"})
    assert Spec.from_structured_outputs({"choice": ["a"]}) == Spec.choice(["a"])


def test_refusal_names_place_keyword_and_way_out(byte_vocabulary):
    schema = {"properties": {"a": {"items": {"pattern": "(a)\\1"}}}}
    with pytest.raises(UnsupportedSchema) as caught:
        compile_spec(Spec.json_schema(schema), byte_vocabulary)
    assert (caught.value.pointer, caught.value.keyword) == ("/properties/a/items", "pattern")
    assert "back reference" in caught.value.reason
    assert caught.value.way_out
    grammar = compile_spec(Spec.json_schema(schema), byte_vocabulary, Options(on_unsupported="warn"))
    assert any("back reference" in note for note in grammar.notes)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", InvalidSpec, "not JSON"),
        ("[1]", InvalidSpec, "object or a boolean"),
        ('{"type": "strng"}', InvalidSpec, "unknown type"),
        ('{"required": "a"}', InvalidSpec, "list of names"),
        ('{"minItems": -1}', InvalidSpec, "non-negative"),
        ('{"pattern": "("}', InvalidSpec, "pattern"),
        ('{"$ref": "#/nowhere"}', UnsupportedSchema, "points nowhere"),
        ('{"$ref": "http://x.org/a"}', UnsupportedSchema, "outside the document"),
        ('{"$ref": "#"}', UnsupportedSchema, "refers to itself"),
        ("false", UnsatisfiableSchema, "no JSON value"),
        ('{"items":' * 300 + "{}" + "}" * 300, LimitExceeded, "deeper"),
        ("[" * 100_000, InvalidSpec, "not JSON"),
        ('{"minimum": 1e999999}', LimitExceeded, "beyond"),
        (f'{{"minimum": {"9" * 5000}}}', LimitExceeded, "5000 characters"),
        ('{"type": "strin"}', InvalidSpec, 'write "string"'),
        ('{"minLength": 1e300}', LimitExceeded, "minLength"),
        ('{"const": "\\ud800"}', UnsupportedSchema, "half a character"),
        ('{"properties": {"\\ud800": {}}}', UnsupportedSchema, "half a character"),
    ],
)
def test_bad_schemas_are_told_apart(byte_vocabulary, text, error, message):
    with pytest.raises(error, match=message):
        compile_spec(Spec.json_schema(text), byte_vocabulary)


def test_keywords_of_another_draft_are_noted(byte_vocabulary):
    schema = {"dependencies": {"a": ["b"]}}
    old = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    assert any("'dependencies'" in note for note in compile_spec(Spec.json_schema(schema), byte_vocabulary).notes)
    grammar = compile_spec(Spec.json_schema(old), byte_vocabulary)
    assert not grammar.notes
    assert grammar.matcher().accept(list(b'{"a":1}')) == 6


def test_drafts_read_references_their_own_way(accepts):
    schema = {"$ref": "#/definitions/a", "maximum": 3, "definitions": {"a": {"type": "integer"}}}
    assert not accepts(schema, "5")
    assert accepts({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, "5")
    four = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}
    assert not accepts(four, "3")
    assert accepts(four, "2")


def test_whitespace_is_bounded(accepts):
    assert accepts({"type": "object"}, '{ \n "a" : 1 }', max_whitespace=3)
    assert not accepts({"type": "object"}, '{    "a":1}', max_whitespace=3)
    assert not accepts({"type": "object"}, '{ "a":1}', max_whitespace=0)
    assert accepts({"type": "object"}, '{"a":1}', max_whitespace=0)


def test_escapes_and_surrogates(accepts):
    assert accepts({"type": "string", "maxLength": 1}, '"\\ud83d\\ude00"')
    assert not accepts({"type": "string"}, '"\\ud83d"')
    assert not accepts({"type": "string"}, '"a\tb"')
    assert accepts({"type": "string", "pattern": "^é$"}, '"\\u00e9"')
    assert accepts({"const": "é"}, '"\\u00e9"')


def test_properties_keep_the_order_of_the_schema(accepts):
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "additionalProperties": False}
    assert accepts(schema, '{"b":1,"a":2}')
    assert not accepts(schema, '{"a":1,"b":2}')
    assert accepts(schema, '{"a":1,"b":2}', property_order="any")
    assert not accepts(schema, '{"a":1,"a":2}', property_order="any")


def test_unique_items_are_kept_distinct(accepts):
    schema = {"type": "array", "items": {"type": ["string", "number", "object"]}, "uniqueItems": True}
    assert accepts(schema, '["a", "ab", {"a": 1}, {"a": 2}, 1, 12]')
    for text in ['["a", "a"]', "[1, 1.0]", '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', '["x", "y", "x"]']:
        assert not accepts(schema, text)


def test_worker_survives_a_hang_and_a_crash():
    worker = Worker()
    try:
        with pytest.raises(LimitExceeded, match=r"more than 0\.5 s"):
            worker.call("time", "sleep", (60,), 0.5)
        with pytest.raises(LimitExceeded, match="ended the worker"):
            worker.call("os", "abort", (), 20.0)
        assert worker.call("operator", "add", (1, 2), 20.0) == 3
        assert worker.restarts == 2
    finally:
        worker.close()


def test_worker_memory_is_bounded():
    worker = Worker(memory_mib=1024)
    try:
        with pytest.raises(StructuredError, match="memory"):
            worker.call("builtins", "bytearray", (4 << 30,), 20.0)
    finally:
        worker.close()


def test_large_specifications_are_tried_in_the_worker(byte_vocabulary):
    schema = {"type": "object", "properties": {f"name{i}": {"type": "string", "pattern": f"^x{i}"} for i in range(400)}}
    grammar = compile_spec(Spec.json_schema(schema), byte_vocabulary)
    assert grammar.matcher().accept(list(b'{"name3": "x3"}')) == 15
    with pytest.raises(LimitExceeded):
        compile_spec(Spec.json_schema(schema), byte_vocabulary, Options(limits=Limits(max_bytes=2000)))


def test_mutated_schemas_and_patterns_are_survived(byte_vocabulary):
    source = '{"type":"object","properties":{"a":{"oneOf":[{"pattern":"^a(b|c)*$"},{"multipleOf":3}]}},"not":{"required":["b"]}}'
    random_, start = random.Random(7), time.process_time()
    for _ in range(150):
        text = list(source)
        for _ in range(random_.randint(1, 4)):
            place = random_.randrange(len(text))
            text[place] = random_.choice('{}[]",:^$()*+?a1\\|') if random_.random() < 0.7 else ""
        with contextlib.suppress(StructuredError):
            compile_spec(Spec.json_schema("".join(text)), byte_vocabulary).matcher().mask()
    assert time.process_time() - start < 60


def test_a_large_modulus_is_refused_and_not_tried(byte_vocabulary):
    start = time.process_time()
    with pytest.raises(UnsupportedSchema, match="multipleOf 123456789"):
        compile_spec(Spec.json_schema('{"type": "integer", "multipleOf": 0.123456789}'), byte_vocabulary)
    compile_spec(Spec.json_schema('{"type": "integer", "multipleOf": 9973}'), byte_vocabulary)
    assert time.process_time() - start < 5


def test_grammars_are_kept_on_disk(byte_vocabulary, tmp_path):
    from deepinfer_structured.store import GrammarStore

    spec, options = (
        Spec.json_schema({"type": "array", "uniqueItems": True}),
        Options(cache_dir=str(tmp_path / "grammars")),
    )
    first = compile_spec(spec, byte_vocabulary, options)
    stored = GrammarStore(tmp_path / "grammars").get(spec, options)
    assert stored is not None
    assert (stored.unique, stored.notes) == (first.unique, first.notes)
    assert GrammarStore(tmp_path / "grammars").get(spec, Options(max_whitespace=1)) is None
    for file in (tmp_path / "grammars").iterdir():
        file.write_text("{")
    assert GrammarStore(tmp_path / "grammars").get(spec, options) is None


def test_xgrammar_gets_only_what_it_enforces():
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    xgrammar.gate(plain)
    for keyword, value in [("minProperties", 1), ("allOf", []), ("required", ["b"]), ("additionalProperties", True)]:
        with pytest.raises(UnsupportedSchema, match="llguidance"):
            xgrammar.gate({**plain, keyword: value})


def test_without_llguidance_plain_schemas_still_work(byte_vocabulary, monkeypatch):
    pytest.importorskip("xgrammar")
    from deepinfer_structured.engines import llguidance

    monkeypatch.setattr(llguidance, "available", False)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = compile_spec(Spec.json_schema(schema), byte_vocabulary)
    matcher = grammar.matcher()
    assert grammar.engine == "xgrammar"
    assert any("llguidance is not installed" in note for note in grammar.notes)
    assert matcher.accept(list(b'{"a": 1}')) == 8
    assert matcher.is_accepting
    with pytest.raises(UnsupportedSchema, match="minimum"):
        compile_spec(Spec.json_schema({"type": "integer", "minimum": 1}), byte_vocabulary)


def test_a_complement_that_is_narrowed_is_named(byte_vocabulary):
    closed = {"prefixItems": [True], "unevaluatedItems": False}
    with pytest.raises(UnsupportedSchema, match=r"/not: keyword 'unevaluatedItems'"):
        compile_spec(Spec.json_schema({"not": closed}), byte_vocabulary)
    grammar = compile_spec(Spec.json_schema({"oneOf": [{"type": "array"}, closed]}), byte_vocabulary)
    assert any("unevaluatedItems" in note for note in grammar.notes)


MANY = {"oneOf": [{"properties": {f"k{i}": {"type": "integer", "minimum": i}}} for i in range(14)]}
PILE = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/many"} for i in range(3)}, "$defs": {"many": MANY}}
SLOW = {"type": "object", "required": ["a"], "properties": {"a": {
    "type": "string", "minLength": 100,
    "allOf": [{"pattern": "^([a-z][0-9])+$"}, {"pattern": "((c1d3g3).{4,8}){6,6}"}, {"pattern": "(t|8){10,10}$"},
              {"anyOf": [{"not": {"pattern": "^([a-z][0-9])+$"}}, {"not": {"pattern": "(t|8){10,10}$"}}]}],
}}}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "error", "pointers", "keywords"),
    [
        ({"type": "object", "required": ["a"], "properties": {"a": {"minimum": 3, "maximum": 2, "type": "number"}}},
         UnsatisfiableSchema,
         ("/properties/a",), ("minimum", "maximum", "type")),
        ({"properties": {"a": {"items": {"type": "no"}}}}, InvalidSpec, None, None),
        ({"items": {"pattern": r"^(a)\1$"}}, UnsupportedSchema, ("/items",), ("pattern",)),
    ],
)  # fmt: skip
def test_a_refusal_names_keyword_place_and_way_out(byte_vocabulary, schema, error, pointers, keywords):
    with pytest.raises(error) as caught:
        compile_spec(Spec.json_schema(schema), byte_vocabulary)
    if pointers is None:
        assert "/properties/a/items" in str(caught.value)
        return
    assert caught.value.pointer in pointers
    assert caught.value.keyword in keywords
    assert caught.value.way_out
    assert f"schema at {caught.value.pointer}: keyword '{caught.value.keyword}'" in str(caught.value)


def test_what_the_library_cannot_build_is_blamed_on_the_largest_part(byte_vocabulary):
    with pytest.raises(LimitExceeded, match="too costly to match") as caught:
        compile_spec(Spec.json_schema(SLOW), byte_vocabulary)
    assert caught.value.pointer.startswith("/properties/a")
    assert caught.value.keyword in ("pattern", "not", "allOf", "minLength")


@pytest.mark.parametrize(("ticks", "pointer", "keyword"), [(3, "", "properties"), (30, "/$defs/many", "oneOf")])
def test_an_analysis_out_of_time_names_what_it_worked_on(monkeypatch, ticks, pointer, keyword):
    clock = itertools.count()  # a second whenever it is read: where the time ends depends on no machine
    monkeypatch.setattr(solver, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    with pytest.raises(LimitExceeded, match=f"more than {ticks} s to analyse") as caught:
        lower_spec(Spec.json_schema(PILE), Options(limits=Limits(seconds=ticks)))
    assert (caught.value.pointer, caught.value.keyword, bool(caught.value.way_out)) == (pointer, keyword, True)
    assert f"schema at {pointer or '/'}: keyword '{keyword}'" in str(caught.value)


def test_an_analysis_out_of_time_is_repeated_with_few_alternatives(monkeypatch):
    """The whole takes 153 looks at the clock, with four alternatives 17: the second gets a quarter of the time."""
    some = [{"anyOf": [{"required": [f"{letter}{i}"]} for i in range(16)]} for letter in "abcd"]
    spec = Spec.json_schema({"type": "object", "allOf": some})
    clock = itertools.count()
    monkeypatch.setattr(solver, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    found = trial.lower_on_trial(spec, Options(limits=Limits(seconds=100)))
    assert any("only 4 of 16" in note for note in found.notes)
    with pytest.raises(LimitExceeded, match="more than 40 s") as caught:
        trial.lower_on_trial(spec, Options(limits=Limits(seconds=40)))
    assert caught.value.keyword
    whole = trial.lower_on_trial(spec, Options(limits=Limits(seconds=1_000)))
    assert not any("only 4 of" in note for note in whole.notes)
    assert len(whole.text) > 10 * len(found.text)


def test_errors_with_a_place_survive_the_way_from_the_worker():
    for error in (
        LimitExceeded("too much", "/a", "oneOf", "less"),
        UnsatisfiableSchema("nothing", "/b", "type", "more"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))
        assert (copy.pointer, copy.keyword, copy.way_out) == (error.pointer, error.keyword, error.way_out)
