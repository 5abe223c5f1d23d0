"""The sampler against exact distributions and a plain one-row restatement of every rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from deepinfer_offline.sampling import Sampler, SamplingBatch, SamplingParams, SamplingTable
from deepinfer_offline.sampling.draw import filtered_weights, pick, sorted_limits
from deepinfer_offline.sampling.random import child_seed
from deepinfer_offline.sampling.select import select_limits
from hypothesis import given, settings
from hypothesis import strategies as st

DRAWS = 20_000


def table_of(params: list[SamplingParams], vocab: int, prompt_len: int = 4, stop_ids: tuple[int, ...] = ()):
    table = SamplingTable(len(params))
    for slot, item in enumerate(params):
        seed = child_seed(item.seed or 0, slot)
        table.write(slot, item, seed=seed, prompt_len=prompt_len, stop_ids=stop_ids, vocab_size=vocab)
    return table


def exact(logits: list[float], params: SamplingParams) -> np.ndarray:
    """The distribution after temperature, min_p, top_k, top_p, one token at a time. Assumes no equal logits."""
    weights = {t: math.exp((x - max(logits)) / params.temperature) for t, x in enumerate(logits)}
    weights = {t: w for t, w in weights.items() if w >= params.min_p}
    ordered = sorted(weights, key=lambda t: -weights[t])
    if params.top_k > 0:
        ordered = ordered[: params.top_k]
    total, running, kept = sum(weights[t] for t in ordered), 0.0, []
    for token in ordered:
        if params.top_p < 1 and running >= params.top_p * total:  # at 1 nothing is dropped, however little it weighs
            break
        kept.append(token)
        running += weights[token]
    result = np.zeros(len(logits))
    for token in kept:
        result[token] = weights[token] / running
    return result


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.5, top_k=6, top_p=0.8, min_p=0.05),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-6),
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}")
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, 40).tolist()
    wanted = exact(logits, params)
    table = table_of([params], 40)
    batch = SamplingBatch(np.zeros(DRAWS, np.int64), np.arange(DRAWS))
    drawn = Sampler(table)(torch.tensor(logits).expand(DRAWS, 40), batch).ids.numpy()
    counts = np.bincount(drawn, minlength=40)
    assert counts[wanted == 0].sum() == 0
    possible = wanted > 0
    expected = wanted[possible] * DRAWS
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    assert chi_square <= freedom + 6 * math.sqrt(2 * max(freedom, 1))  # 6 deviations; fixed seed, cannot flake


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30, unique=True),
    st.floats(0.1, 3),
    st.integers(0, 35),
    st.floats(0.05, 1),
    st.floats(0, 1),
)
def test_filters_equal_a_plain_restatement(logits, temperature, top_k, top_p, min_p) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    table = table_of([params], len(logits))
    weights = filtered_weights(torch.tensor([logits]), table, np.zeros(1, np.int64)).double()[0]
    mine = (weights / weights.sum()).numpy()
    wanted = exact(logits, params)
    # float32 weights and parameters: a token on the edge of a filter may fall either way
    if not np.array_equal(mine > 0, wanted > 0):
        edge = np.flatnonzero((mine > 0) != (wanted > 0))
        assert len(edge) <= 2
    else:
        assert np.allclose(mine, wanted, atol=2e-5)
    assert mine[np.argmax(logits)] > 0


def test_a_wide_top_p_looks_at_the_whole_vocabulary() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 0] = 20.0  # one row is done at once, the other needs 4,500 of 5,000 equal tokens
    table = table_of([SamplingParams(top_p=0.5), SamplingParams(top_p=0.9)], 5000)
    logits[1] = torch.linspace(0, 1e-3, 5000)
    weights = filtered_weights(logits, table, np.arange(2))
    assert (weights[0] > 0).sum() == 1
    assert abs(int((weights[1] > 0).sum()) - 4500) <= 3


def test_rows_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(CASES), 6000, generator=generator) * 3
    params = [*CASES[:-2], SamplingParams(temperature=0), SamplingParams(top_p=0.3, seed=11)]
    table = table_of(params, 6000)
    slots, positions = np.arange(len(params)), np.arange(10, 10 + len(params))
    together = Sampler(table)(logits, SamplingBatch(slots, positions)).ids
    order = np.random.default_rng(0).permutation(len(params))
    shuffled = Sampler(table)(logits[torch.from_numpy(order)], SamplingBatch(slots[order], positions[order])).ids
    assert torch.equal(shuffled, together[torch.from_numpy(order)])
    for row in range(len(params)):
        one = slice(row, row + 1)
        assert Sampler(table)(logits[one], SamplingBatch(slots[one], positions[one])).ids[0] == together[row]


def test_equal_seeds_draw_alike_and_children_differ() -> None:
    logits = torch.zeros(1, 500)
    table = SamplingTable(3)
    for slot, seed in enumerate((child_seed(7, 0), child_seed(7, 1), child_seed(7, 0))):
        table.write(slot, SamplingParams(), seed=seed, prompt_len=1, stop_ids=(), vocab_size=500)
    rows = [
        Sampler(table)(logits.expand(50, 500), SamplingBatch(np.full(50, slot), np.arange(50))).ids for slot in range(3)
    ]
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])


def penalised(logits: np.ndarray, prompt: list[int], answer: list[int], params: SamplingParams) -> np.ndarray:
    """Penalties as OpenAI and the CTRL paper define them, token by token."""
    result = logits.astype(np.float64)
    for token in set(prompt) | set(answer):
        high = result[token] > 0
        result[token] = result[token] / params.repetition_penalty if high else result[token] * params.repetition_penalty
    for token in set(answer):
        result[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    return result


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=6),
    st.lists(st.integers(0, 11), max_size=8),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.5, 2),
    st.integers(0, 2**32),
)
def test_penalties_equal_a_plain_restatement(prompt, answer, presence, frequency, repetition, seed) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 12).astype(np.float32)
    params = SamplingParams(
        temperature=0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    table = SamplingTable(2)
    table.write(1, params, seed=0, prompt_len=len(prompt), stop_ids=(), vocab_size=12)
    tokens = torch.full((2, 20), 5, dtype=torch.int32)  # what lies past the end must not count
    tokens[1, : len(prompt) + len(answer)] = torch.tensor(prompt + answer, dtype=torch.int32)
    batch = SamplingBatch(np.array([1]), np.array([len(prompt) + len(answer)]), tokens)
    adjusted = Sampler(table)._adjust(torch.tensor(logits)[None], batch)[0]
    assert np.allclose(adjusted.numpy(), penalised(logits, prompt, answer, params), atol=1e-5)


def test_masks_bias_and_held_back_stops() -> None:
    logits = torch.zeros(4, 70)
    logits[:, 69] = 5.0
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logit_bias={3: 9.0}),
        SamplingParams(temperature=0, min_tokens=2),
        SamplingParams(temperature=0, min_tokens=2),
    ]
    table = table_of(params, 70, prompt_len=4, stop_ids=(69,))
    mask = np.zeros((1, 3), np.int32)
    mask[0, 1] = 1 << 8  # token 40 alone
    batch = SamplingBatch(np.arange(4), np.array([4, 4, 5, 6]), None, np.array([0]), mask)
    assert Sampler(table)(logits.clone(), batch).ids.tolist() == [40, 3, 0, 69]
    said = logits.log_softmax(-1)
    table = table_of([*params[:2], *[SamplingParams(temperature=0, min_tokens=2, logprobs=0)] * 2], 70, 4, (69,))
    drawn = Sampler(table)(logits, batch)
    assert drawn.ids.tolist() == [40, 3, 0, 69]
    assert drawn.logprobs is not None
    assert drawn.logprobs.rows.tolist() == [2, 3]
    # of what the model said: token 0 was drawn where 69 was held back
    assert torch.allclose(drawn.logprobs.chosen, said[[2, 3], [0, 69]])
    assert drawn.logprobs.ranks.tolist() == [2, 1]


def test_the_top_bit_of_a_mask_word_works_and_short_masks_forbid_the_rest() -> None:
    logits = torch.arange(100.0)[None]
    table = table_of([SamplingParams(temperature=0)], 100)
    mask = np.array([[-(2**31), 0]], np.int32)  # bit 31 of word 0
    batch = SamplingBatch(np.zeros(1, np.int64), np.array([4]), None, np.array([0]), mask)
    assert Sampler(table)(logits, batch).ids.tolist() == [31]


def test_a_complete_grammar_wins_over_min_tokens() -> None:
    table = table_of([SamplingParams(temperature=0, min_tokens=9)], 64, stop_ids=(2,))
    mask = np.array([[4, 0]], np.int32)  # only the stop id
    batch = SamplingBatch(np.zeros(1, np.int64), np.array([4]), None, np.array([0]), mask)
    assert Sampler(table)(torch.zeros(1, 64), batch).ids.tolist() == [2]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=3, logit_bias={int(logits[1].argmin()): 100.0}),
        SamplingParams(temperature=0.7, logprobs=0),
    ]
    result = Sampler(table_of(params, 50))(logits.clone(), SamplingBatch(np.arange(3), np.full(3, 4)))
    got = result.logprobs
    assert got is not None
    assert got.rows.tolist() == [1, 2]
    wanted = torch.log_softmax(logits.double(), dim=-1)
    biased = int(logits[1].argmin())
    assert result.ids[1] == biased
    assert got.chosen[0].item() == pytest.approx(wanted[1, biased].item(), abs=1e-5)
    assert got.ranks.tolist()[0] == 50
    assert got.top_ids[0].tolist() == logits[1].topk(3).indices.tolist()
    assert np.allclose(got.top_values[0], wanted[1].topk(3).values, atol=1e-5)
    assert torch.isfinite(got.top_values).all()


def test_pick_never_takes_a_token_of_weight_zero() -> None:
    weights = torch.zeros(3, 1000)
    weights[0, 999], weights[1, 0], weights[2, 256] = 1e-30, 1.0, 3.0
    for number in (1e-18, 0.5, 1 - 2**-53):
        assert pick(weights, torch.full((3,), number, dtype=torch.float64)).tolist() == [999, 0, 256]


def test_temperature_near_zero_stays_finite() -> None:
    logits = torch.tensor([[50.0, 49.0, -80.0]])
    table = table_of([SamplingParams(temperature=2e-5)], 3)
    assert Sampler(table)(logits, SamplingBatch(np.zeros(1, np.int64), np.array([4]))).ids.tolist() == [0]


def test_counting_and_sorting_find_the_same_limits() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 5000, generator=generator) * torch.linspace(0.2, 6, 40)[:, None]
    logits[::3] = (logits[::3] * 4).round() / 4  # many ties
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    rng = np.random.default_rng(0)
    top_k = rng.choice([0, 1, 2, 50, 1000, 4999], 40)
    top_p = rng.choice([1.0, 1e-6, 0.3, 0.9, 0.99, 0.9999], 40)
    mine = select_limits(weights.numpy(), top_k, top_p)
    theirs = sorted_limits(weights, top_k, top_p)[:, 0].numpy()
    assert np.array_equal(mine, theirs)
    only_k = sorted_limits(weights, np.full(40, 7), np.ones(40))[:, 0].numpy()
    assert np.array_equal(only_k, weights.topk(7).values[:, -1].numpy())
    assert np.array_equal(select_limits(weights.numpy(), np.full(40, 7), np.ones(40)), only_k)
