from types import SimpleNamespace as Fake

from deepinfer_offline.engine.vllm import translate
from deepinfer_offline.sampling.params import SamplingParams


def logprob(value, rank, text):
    return Fake(logprob=value, rank=rank, decoded_token=text)


def answer(index=0, ids=(5, 6), reason="stop", logprobs=None):
    return Fake(
        index=index, text="ab", token_ids=ids, finish_reason=reason, stop_reason=None, logprobs=logprobs,
        cumulative_logprob=-1.5,
    )  # fmt: skip


def finished(outputs, cached=3, prompt_logprobs=None):
    return Fake(request_id="r", outputs=outputs, num_cached_tokens=cached, prompt_logprobs=prompt_logprobs)


def test_an_open_ended_request_gets_the_room_that_is_left():
    assert translate.sampling_arguments(SamplingParams(max_tokens=None), 40)["max_tokens"] == 40
    assert translate.sampling_arguments(SamplingParams(max_tokens=100), 40)["max_tokens"] == 40
    assert translate.sampling_arguments(SamplingParams(max_tokens=4), 40)["max_tokens"] == 4


def test_exactly_the_one_structured_field_is_passed_on():
    params = SamplingParams(structured_outputs={"choice": ["yes", "no"]})
    assert translate.sampling_arguments(params, 9)["structured_outputs"] == {"choice": ["yes", "no"]}


def test_equal_greedy_answers_are_computed_once_and_given_n_times():
    params = SamplingParams(n=3, temperature=0)
    assert translate.sampling_arguments(params, 9)["n"] == 1
    result = translate.request_output(finished([answer()]), "r", [1, 2], params)
    assert [c.index for c in result.outputs] == [0, 1, 2]
    assert {tuple(c.token_ids) for c in result.outputs} == {(5, 6)}


def test_sampled_answers_come_in_index_order():
    result = translate.request_output(finished([answer(1), answer(0)]), "r", [1, 2], SamplingParams(n=2))
    assert [c.index for c in result.outputs] == [0, 1]
    assert result.num_cached_tokens == 3


def test_the_drawn_token_is_chosen_and_the_top_is_ranked():
    entries = [
        {9: logprob(-0.1, 1, "x"), 5: logprob(-2.0, 2, "a")},
        {6: logprob(-0.2, 1, "b"), 8: logprob(-3.0, 2, "y"), 7: logprob(-4.0, 3, "z")},
    ]
    result = translate.completion(answer(logprobs=entries), SamplingParams(logprobs=1))
    assert [p.chosen.token_id for p in result.logprobs] == [5, 6]
    assert [[t.token_id for t in p.top] for p in result.logprobs] == [[9], [6]]


def test_the_first_prompt_token_has_no_logprob():
    entries = [None, {2: logprob(-0.5, 1, "c")}]
    result = translate.request_output(
        finished([answer()], prompt_logprobs=entries), "r", [1, 2], SamplingParams(prompt_logprobs=0)
    )
    assert result.prompt_logprobs[0] is None
    assert result.prompt_logprobs[1].chosen.logprob == -0.5


def test_an_unknown_finish_reason_is_an_error():
    assert translate.completion(answer(reason="repetition"), SamplingParams()).finish_reason == "error"
