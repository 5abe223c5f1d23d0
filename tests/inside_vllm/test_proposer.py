"""deepinfer-specdec inside vLLM: suffix and n-gram drafts change the number of steps, never a token."""

import random

import pytest
from vllm import SamplingParams

pytestmark = pytest.mark.vllm

PROPOSERS = "deepinfer_specdec.adapters.vllm.proposer."


def answers(llm, temperature=0.0):
    rng = random.Random(3)
    phrase = [rng.randrange(3, 512) for _ in range(24)]
    prompts = [phrase * 3 + [rng.randrange(3, 512)] for _ in range(6)]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=48, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def accepted(llm):
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return counters["vllm:spec_decode_num_accepted_tokens"], counters["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("name", ["SuffixProposer", "NgramProposer"])
def test_greedy_answers_are_the_same_and_drafts_are_accepted(start_llm, name):
    plain = answers(start_llm())
    speculative = {"method": "custom_class", "model": PROPOSERS + name, "num_speculative_tokens": 4}
    llm = start_llm(speculative_config=speculative)
    assert answers(llm) == plain
    kept, drafted = accepted(llm)
    assert drafted > 0
    assert kept > 0  # a dummy-weight model falls into loops, which both drafters see
