"""What is said of a tool whose parameters cannot be enforced names its place in `tools`."""

from __future__ import annotations

import json

import pytest
from deepinfer_offline.job.form import answer_form
from deepinfer_offline.job.task import Task
from deepinfer_offline.job.toolcalls import at_tool, tool_form
from deepinfer_offline.sampling.params import SamplingParams
from deepinfer_structured import Spec, StructuredError, Vocabulary, compile_spec

GOOD = {"type": "function", "function": {"name": "good", "parameters": {"type": "object"}}}
BAD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(a)\\1"}}}
TOOLS = [GOOD, {"type": "function", "function": {"name": "bad", "parameters": BAD}}]


@pytest.mark.parametrize("choice", ["required", "function:bad"])
def test_a_tool_that_is_refused_is_named_with_the_place_in_it(choice):
    form = tool_form(Task("a", "chat", SamplingParams(), tools=TOOLS, tool_choice=choice))
    assert form is not None
    assert form.origin == "tools"
    with pytest.raises(StructuredError) as caught:
        compile_spec(Spec.json_schema(json.dumps(form.json)), Vocabulary.bytewise())
    message = at_tool(str(caught.value), choice, ("good", "bad"))
    assert message.startswith("tools[1].function.parameters at /properties/x: keyword 'pattern'")


def test_a_form_knows_the_parameter_that_asked_for_it():
    of_format = answer_form({"response_format": {"type": "json_object"}})
    of_vllm = answer_form({"structured_outputs": {"json": {"type": "string"}}})
    assert of_format is not None
    assert of_vllm is not None
    assert (of_format.origin, of_vllm.origin) == ("response_format", "structured_outputs")
