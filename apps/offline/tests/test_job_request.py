from __future__ import annotations

import json

import pytest
from deepinfer_offline.job.errors import LineError
from deepinfer_offline.job.fields import PARAMETERS
from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.request import parse_request, read_object
from deepinfer_offline.job.task import seeded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def parse(raw):
    return parse_request(read_object(Line(1, raw if isinstance(raw, bytes) else raw.encode())))


def make(url=CHAT, drop=(), **changes):
    value = {"custom_id": "a", "method": "POST", "url": url}
    value["body"] = {"messages": HELLO} if url == CHAT else {"prompt": "Hello"}
    value.update(changes)
    return json.dumps({key: entry for key, entry in value.items() if key not in drop})


def chat(**body):
    return make(body={"messages": HELLO, **body})


def text(**body):
    return make(TEXT, body={"prompt": "Hello", **body})


def message(**changes):
    return chat(messages=[{"role": "user", "content": "Hello", **changes}])


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}

BAD = {
    # what the line is: (line, code, param, words of the message)
    "no json": ("garbage", "invalid_json", None, ["not valid JSON", "column 1"]),
    "a tab in a string": ('{"custom_id": "a\tb"}', "invalid_json", None, ["Invalid control character at column 17"]),
    "a bad escape": (r'{"custom_id": "a\x"}', "invalid_json", None, [r"Invalid \escape at column 17"]),
    "an endless number": (
        '{"custom_id": ' + "1" * 5000 + "}",
        "invalid_json",
        None,
        ["an integer of over 4300 digits"],
    ),
    "cut json": ('{"custom_id": "a", ', "invalid_json", None, ["not valid JSON", "column"]),
    "two values": ('{"custom_id": "a"} {}', "invalid_json", None, ["Extra data"]),
    "not an object": ("[1, 2]", "invalid_type", None, ["must be a JSON object", "[1, 2]"]),
    "a string": ('"hi"', "invalid_type", None, ["must be a JSON object", "'hi'"]),
    "null": ("null", "invalid_type", None, ["must be a JSON object", "null"]),
    "not utf-8": (b'{"custom_id": "\xff"}', "invalid_encoding", None, ["0xff", "column 16"]),
    "duplicate key": ('{"custom_id": "a", "custom_id": "b"}', "duplicate_key", "custom_id", ["'custom_id'", "twice"]),
    "duplicate parameter": (
        '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"p","top_p":1,"top_p":0.5}}',
        "duplicate_key",
        "top_p",
        ["'top_p'", "twice"],
    ),
    "NaN": (chat().replace('"Hello"', "NaN"), "invalid_json", None, ["NaN"]),
    "infinity": (text(temperature=float("inf")), "invalid_json", None, ["Infinity"]),
    "half a surrogate": (r'{"custom_id": "\ud83d"}', "invalid_json", None, ["surrogate"]),
    "too deep": ("[" * 100_000 + "]" * 100_000, "invalid_json", None, ["deep"]),
    "too many digits": (text(seed=0).replace('"seed": 0', '"seed": ' + "9" * 5000), "invalid_json", None, ["digits"]),
    "no id": (make(drop=["custom_id"]), "missing_custom_id", "custom_id", ["custom_id is missing"]),
    "empty id": (make(custom_id=""), "invalid_custom_id", "custom_id", ["custom_id is empty"]),
    "blank id": (make(custom_id="  "), "invalid_custom_id", "custom_id", ["custom_id is empty"]),
    "number as id": (make(custom_id=7), "invalid_custom_id", "custom_id", ["custom_id must be a string", "7"]),
    "null as id": (make(custom_id=None), "invalid_custom_id", "custom_id", ["custom_id must be a string", "null"]),
    "long id": (make(custom_id="x" * 600), "invalid_custom_id", "custom_id", ["600", "512"]),
    "no method": (make(drop=["method"]), "missing_method", "method", ["method is missing", "'POST'"]),
    "GET": (make(method="GET"), "invalid_value", "method", ["method must be 'POST'", "'GET'"]),
    "no url": (make(drop=["url"]), "missing_url", "url", ["url is missing", CHAT]),
    "unknown url": (make(url="/v1/embeddings", body={}), "invalid_url", "url", ["/v1/embeddings", CHAT, TEXT]),
    "a list as url": (make(url=[]), "invalid_url", "url", ["[]"]),
    "no body": (make(drop=["body"]), "missing_body", "body", ["body is missing"]),
    "a string as body": (make(body="hi"), "invalid_value", "body", ["body must be an object", "'hi'"]),
    "stray key": (make(prompt="hi"), "unknown_parameter", "prompt", ["'prompt'", "inside body"]),
    "misspelt key": (make(custum_id="b"), "unknown_parameter", "custum_id", ["did you mean 'custom_id'"]),
    "no messages": (make(body={}), "missing_messages", "messages", ["messages is missing"]),
    "null messages": (chat(messages=None), "missing_messages", "messages", ["messages is missing"]),
    "empty messages": (chat(messages=[]), "empty_value", "messages", ["messages is empty"]),
    "a string as messages": (chat(messages="hi"), "invalid_type", "messages", ["messages must be a list", "'hi'"]),
    "a string as message": (chat(messages=["hi"]), "invalid_type", "messages[0]", ["messages[0]", "'hi'"]),
    "bad role": (message(role="robot"), "invalid_role", "messages[0].role", ["'robot'", "assistant"]),
    "no role": (chat(messages=[{"content": "x"}]), "invalid_role", "messages[0].role", ["messages[0].role", "null"]),
    "a list as role": (message(role=["user"]), "invalid_role", "messages[0].role", ['["user"]']),
    "no content": (chat(messages=[{"role": "user"}]), "missing_content", "messages[0].content", ["is missing"]),
    "number as content": (message(content=5), "invalid_type", "messages[0].content", ["5"]),
    "image": (
        message(content=[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}]),
        "unsupported_content",
        "messages[0].content[1].type",
        ["'image_url'"],
    ),
    "part without text": (message(content=[{"type": "text"}]), "invalid_type", "messages[0].content[0].text", ["null"]),
    "stray message key": (
        message(contents="x"),
        "unknown_parameter",
        "messages[0].contents",
        ["did you mean 'content'"],
    ),
    "no prompt": (make(TEXT, body={}), "missing_prompt", "prompt", ["prompt is missing"]),
    "empty prompt": (text(prompt=""), "empty_prompt", "prompt", ["prompt is empty"]),
    "empty token list": (text(prompt=[]), "empty_prompt", "prompt", ["prompt is empty"]),
    "list with empty prompt": (text(prompt=[""]), "empty_prompt", "prompt", ["prompt is empty"]),
    "two prompts": (text(prompt=["a", "b"]), "unsupported_value", "prompt", ["2 entries", "a line of its own"]),
    "mixed prompt": (text(prompt=[1, "b"]), "invalid_type", "prompt[1]", ["prompt[1]", "'b'"]),
    "negative token": (text(prompt=[1, -1]), "invalid_value", "prompt[1]", ["-1"]),
    "object as prompt": (text(prompt={"a": 1}), "invalid_type", "prompt", ["prompt must be"]),
    "unknown parameter": (chat(frobnicate=1), "unknown_parameter", "frobnicate", ["unknown parameter 'frobnicate'"]),
    "vLLM's bad_words": (
        chat(bad_words=["no"]),
        "unknown_parameter",
        "bad_words",
        ["'bad_words'", "not supported", "logit_bias"],
    ),
    "vLLM's former name": (text(guided_json={}), "unknown_parameter", "guided_json", ["structured_outputs.json"]),
    "misspelt parameter": (chat(temprature=1), "unknown_parameter", "temprature", ["did you mean 'temperature'"]),
    "null unknown parameter": (chat(frobnicate=None), "unknown_parameter", "frobnicate", ["'frobnicate'"]),
    "parameter of the other": (text(messages=HELLO), "unknown_parameter", "messages", ["belongs to", CHAT]),
    "prompt in a chat": (chat(prompt="p"), "unknown_parameter", "prompt", ["belongs to", TEXT]),
    "max_tokens 0": (chat(max_tokens=0), "invalid_value", "max_tokens", ["at least 1", "got 0"]),
    "max_tokens 1.5": (chat(max_tokens=1.5), "invalid_type", "max_tokens", ["integer", "1.5"]),
    "max_tokens in quotes": (chat(max_tokens="5"), "invalid_type", "max_tokens", ["integer", "'5'"]),
    "max_tokens true": (chat(max_tokens=True), "invalid_type", "max_tokens", ["integer", "true"]),
    "two max_tokens": (
        chat(max_tokens=5, max_completion_tokens=6),
        "invalid_value",
        "max_completion_tokens",
        ["5", "6", "one of them"],
    ),
    "n 0": (chat(n=0), "invalid_value", "n", ["n must be", "got 0"]),
    "n 1000": (chat(n=1000), "invalid_value", "n", ["128", "1000"]),
    "temperature 2.1": (chat(temperature=2.1), "invalid_value", "temperature", ["0 to 2", "2.1"]),
    "temperature -1": (text(temperature=-1), "invalid_value", "temperature", ["0 to 2", "-1"]),
    "temperature huge": (text(temperature=10**400), "invalid_value", "temperature", ["characters"]),
    "temperature in quotes": (text(temperature="hot"), "invalid_type", "temperature", ["a number", "'hot'"]),
    "top_p 0": (text(top_p=0), "invalid_value", "top_p", ["above 0", "0"]),
    "top_k -2": (text(top_k=-2), "invalid_value", "top_k", ["-2"]),
    "min_p 2": (text(min_p=2), "invalid_value", "min_p", ["2"]),
    "penalty 3": (text(presence_penalty=3), "invalid_value", "presence_penalty", ["-2 to 2", "3"]),
    "repetition 0": (text(repetition_penalty=0), "invalid_value", "repetition_penalty", ["above 0"]),
    "seed in quotes": (text(seed="7"), "invalid_type", "seed", ["'7'"]),
    "seed too large": (text(seed=1 << 64), "invalid_value", "seed", [str(1 << 64)]),
    "min over max": (text(min_tokens=9, max_tokens=3), "invalid_value", "min_tokens", ["9", "3"]),
    "empty stop": (text(stop=["a", ""]), "invalid_value", "stop", ["empty string"]),
    "number as stop": (text(stop=5), "invalid_type", "stop", ["stop must be", "5"]),
    "many stops": (text(stop=["x"] * 17), "invalid_value", "stop", ["17", "16"]),
    "stop id": (text(stop_token_ids=["x"]), "invalid_type", "stop_token_ids[0]", ["'x'"]),
    "bias key": (text(logit_bias={"the": 1}), "invalid_value", "logit_bias", ["token ids", "'the'"]),
    "bias size": (text(logit_bias={"5": 101}), "invalid_value", "logit_bias.5", ["-100 to 100", "101"]),
    "bias list": (text(logit_bias=[1]), "invalid_type", "logit_bias", ["an object", "[1]"]),
    "logprobs of completions in a chat": (chat(logprobs=5), "invalid_type", "logprobs", ["true or false", "5"]),
    "logprobs of a chat in completions": (text(logprobs=True), "invalid_type", "logprobs", ["integer", "true"]),
    "logprobs 21": (text(logprobs=21), "invalid_value", "logprobs", ["20", "21"]),
    "top_logprobs alone": (chat(top_logprobs=3), "invalid_value", "top_logprobs", ["logprobs is not true"]),
    "top_logprobs 21": (chat(logprobs=True, top_logprobs=21), "invalid_value", "top_logprobs", ["20", "21"]),
    "stream": (chat(stream=True), "unsupported_value", "stream", ["stream is true", "remove it"]),
    "best_of": (text(best_of=2), "unsupported_value", "best_of", ["2"]),
    "suffix": (text(suffix="end"), "unsupported_value", "suffix", ["'end'"]),
    "audio": (chat(modalities=["text", "audio"]), "unsupported_value", "modalities", ["audio"]),
    "form without type": (chat(response_format={}), "invalid_value", "response_format.type", ["null"]),
    "unknown form": (chat(response_format={"type": "xml"}), "invalid_value", "response_format.type", ["'xml'"]),
    "form as string": (chat(response_format="json"), "invalid_type", "response_format", ["'json'"]),
    "schema missing": (
        chat(response_format={"type": "json_schema"}),
        "invalid_type",
        "response_format.json_schema",
        ["null"],
    ),
    "schema without schema": (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
        "invalid_type",
        "response_format.json_schema.schema",
        ["JSON schema"],
    ),
    "schema without name": (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
        "invalid_type",
        "response_format.json_schema.name",
        ["a string"],
    ),
    "two forms": (
        chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "invalid_value",
        "structured_outputs",
        ["both"],
    ),
    "structured nothing": (chat(structured_outputs={}), "invalid_value", "structured_outputs", ["exactly one"]),
    "structured two": (
        chat(structured_outputs={"regex": "a", "choice": ["b"]}),
        "invalid_value",
        "structured_outputs",
        ["exactly one"],
    ),
    "structured unknown": (chat(structured_outputs={"xml": "a"}), "unknown_parameter", "structured_outputs", ["'xml'"]),
    "structured type": (chat(structured_outputs={"regex": 5}), "invalid_type", "structured_outputs.regex", ["5"]),
    "empty tools": (chat(tools=[]), "empty_value", "tools", ["tools is empty"]),
    "tool type": (chat(tools=[{"type": "browser"}]), "invalid_value", "tools[0].type", ["'browser'"]),
    "tool name": (
        chat(tools=[{"type": "function", "function": {"name": "a b"}}]),
        "invalid_value",
        "tools[0].function.name",
        ["'a b'"],
    ),
    "tool twice": (chat(tools=[TOOL, TOOL]), "invalid_value", "tools[1].function.name", ["twice"]),
    "choice without tools": (chat(tool_choice="required"), "invalid_value", "tool_choice", ["tools is missing"]),
    "choice unknown": (chat(tools=[TOOL], tool_choice="maybe"), "invalid_value", "tool_choice", ["'maybe'"]),
    "choice of another": (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
        "invalid_value",
        "tool_choice.function.name",
        ["'other'", "get_weather"],
    ),
    "choice and form": (
        chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}),
        "invalid_value",
        "tool_choice",
        ["exclude"],
    ),
    "template variable": (
        chat(chat_template_kwargs={"messages": []}),
        "invalid_value",
        "chat_template_kwargs.messages",
        ["'messages'"],
    ),
    "continue a user": (chat(continue_final_message=True), "invalid_value", "continue_final_message", ["'user'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_refused_by_name(case):
    raw, code, param, words = BAD[case]
    with pytest.raises(LineError) as caught:
        parse(raw)
    assert (caught.value.code, caught.value.param) == (code, param), caught.value.message
    for word in words:
        assert word in caught.value.message
    assert len(caught.value.message) < 400


def test_a_chat_line():
    messages = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a\u2028b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    task = parse(
        chat(messages=messages, max_completion_tokens=7, n=2, stop="x", logprobs=True, top_logprobs=3, top_p=None)
    )
    assert task.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\u2028b\nc"},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    params = task.params
    assert (params.max_tokens, params.n, params.stop, params.logprobs, params.top_p) == (7, 2, ("x",), 3, 1.0)
    assert parse(chat()).params.max_tokens is None, "a chat runs to the end of the context"


def test_a_completion_line():
    task = parse(text(prompt=["a b"], logprobs=0, echo=True, logit_bias={"5": 1}, stream=False, best_of=1, user="me"))
    assert (task.text, task.token_ids, task.echo) == ("a b", None, True)
    assert (task.params.logprobs, task.params.prompt_logprobs, task.params.logit_bias) == (0, 0, {5: 1.0})
    assert task.params.max_tokens == 16, "OpenAI's default"
    assert parse(text(prompt=[1, 2])).token_ids == parse(text(prompt=[[1, 2]])).token_ids == [1, 2]


def test_forms_of_answers():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    named = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert parse(chat(response_format=named)).params.structured_outputs.json == schema
    assert parse(chat(response_format={"type": "json_object"})).params.structured_outputs.json_object is True
    assert parse(chat(response_format={"type": "text"})).params.structured_outputs is None
    assert parse(chat(structured_outputs={"choice": ["a", "b"]})).params.structured_outputs.choice == ["a", "b"]


def test_tools():
    assert parse(chat(tools=[TOOL])).tool_choice == "auto"
    assert parse(chat(tools=[TOOL], tool_choice="none")).tools is None
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert parse(chat(tools=[TOOL], tool_choice=named)).tool_choice == "function:get_weather"


def test_sampled_lines_get_seeds_of_their_own():
    def seed_of(custom_id, job_seed, **body):
        return seeded(parse(make(custom_id=custom_id, body={"messages": HELLO, **body})), job_seed).params.seed

    assert seed_of("a", 0) == seed_of("a", 0)
    assert len({seed_of("a", 0), seed_of("b", 0), seed_of("a", 1), seed_of("a", -1)}) == 4
    assert seed_of("a", 0, seed=5) == 5
    assert seed_of("a", 0, temperature=0) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def judge(raw):
    """A Task or a LineError; anything else is a bug."""
    try:
        return parse(raw)
    except LineError as error:
        judged = error
    assert judged.message
    assert 400 <= judged.status < 500
    return judged


@given(st.binary(max_size=200))
def test_any_bytes_are_judged(raw):
    judge(raw)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([CHAT, TEXT]), st.dictionaries(st.sampled_from(sorted(PARAMETERS)), json_values, max_size=6))
def test_any_value_of_any_parameter_is_judged(url, body):
    judge(json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}))


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "x"]), json_values))
def test_any_envelope_is_judged(value):
    judge(json.dumps(value))


@settings(max_examples=200)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "name", "tool_calls"]),
            st.sampled_from(["user", "assistant"]) | json_values,
        )
        | json_values,
        max_size=3,
    )
)
def test_any_messages_are_judged(messages):
    judge(chat(messages=messages))


VALUES = [None, True, 0, 1, -1, 0.5, 10**30, "", "x", [], [None], [[]], {}, {"type": None}, {"a": []}]


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_every_parameter_meets_every_type(name):
    for url, required in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "p"})):
        for value in VALUES:
            judge(make(url, body={**required, name: value}))
