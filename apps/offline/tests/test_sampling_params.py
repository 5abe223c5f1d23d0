"""Parameters: vLLM's defaults, and refusals that name the parameter, the value and what is allowed."""

from __future__ import annotations

import pytest
from deepinfer_offline.engine.base import RequestError
from deepinfer_offline.sampling import SamplingParams, StructuredOutputs


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.ignore_eos) == (16, 0, None, False)
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (True, False)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n", 0, "from 1 to 16384"),
        ("n", True, "integer"),
        ("n", 1.5, "integer"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("temperature", "hot", "number"),
        ("top_p", 0, "greater than 0 and at most 1"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -2, "at least -1"),
        ("min_p", 1.5, "at most 1"),
        ("presence_penalty", 2.5, "at most 2"),
        ("frequency_penalty", -3, "at least -2"),
        ("repetition_penalty", 0, "greater than 0"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "at most max_tokens, 16"),
        ("logprobs", -2, "at least -1"),
        ("prompt_logprobs", 0.5, "integer"),
        ("seed", "x", "integer"),
        ("stop", ["a", ""], "non-empty string"),
        ("stop", [3], "non-empty string"),
        ("stop", 5, "non-empty string"),
        ("stop", 0, "non-empty string"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", [-1], "at least 0"),
        ("logit_bias", {"a": 1}, "keys are token ids"),
        ("logit_bias", {"3": 101}, "at most 100"),
        ("logit_bias", [1], "an object"),
        ("structured_outputs", {"json": {}, "regex": "a"}, "exactly one of"),
        ("structured_outputs", {"yaml": 1}, "one of json"),
    ],
)
def test_refusals_name_parameter_value_and_range(name: str, value: object, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)
    assert allowed in str(caught.value)
    assert caught.value.code == "invalid_value"


def test_stop_takes_a_string_or_strings() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()


def test_bias_keys_may_be_text_as_in_json() -> None:
    assert SamplingParams(logit_bias={"7": -100, "8": 2}).logit_bias == {7: -100.0, 8: 2.0}
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_very_small_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_structured_outputs_needs_one_form() -> None:
    assert StructuredOutputs(choice=["a", "b"]).choice == ["a", "b"]
    for wrong in ({}, {"choice": []}, {"json_object": False}):
        with pytest.raises(RequestError):
            StructuredOutputs(**wrong)
