"""Numpy verification, its random numbers and filters, and the torch twin that must emit the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_specdec.draft import Draft
from deepinfer_specdec.errors import DraftShapeError, SamplingRangeError, UnknownNameError
from deepinfer_specdec.verification import randomness
from deepinfer_specdec.verification.chance import inverse_cdf
from deepinfer_specdec.verification.distribution import GREEDY, SamplingFilter, distribution, unpack_mask
from deepinfer_specdec.verification.reference import METHODS, verify
from hypothesis import given, settings
from hypothesis import strategies as st


def random_case(seed: int, rows: int = 12, width: int = 4, vocab: int = 9):
    """(draft with full distributions, target, seeds, anchors); drafts are really drawn from their distributions."""
    rng = np.random.default_rng(seed)
    q = rng.dirichlet(np.full(vocab, 0.5), (rows, width))
    p = rng.dirichlet(np.full(vocab, 0.5), (rows, width + 1))
    ids = np.array([[rng.choice(vocab, p=q[r, k]) for k in range(width)] for r in range(rows)], dtype=np.int32)
    counts = rng.integers(0, width + 1, rows).astype(np.int32)
    draft = Draft(ids, counts, np.ones((rows, width), np.float32), q)
    return draft, p, rng.integers(-(2**62), 2**62, rows), rng.integers(0, 1000, rows)


def test_first_splitmix_output_is_the_published_one() -> None:
    """SplitMix64 seeded with 0 starts with 0xE220A8397B1DCDAF: the first mixing stage here is that generator's."""
    from deepinfer_specdec.verification.randomness import GOLDEN, _mix

    assert int(_mix(np.asarray([GOLDEN], dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF


def test_uniform_is_uniform_and_streams_are_unrelated() -> None:
    """20,000 numbers: mean within 4.5 standard errors of 1/2, 20 equal bins within a chi-square of 50 (p = 1e-4)."""
    numbers = [randomness.uniform(7, np.arange(20_000), stream) for stream in range(4)]
    for u in numbers:
        assert abs(u.mean() - 0.5) < 4.5 / np.sqrt(12 * 20_000)
        counts = np.histogram(u, 20, (0.0, 1.0))[0]
        assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 50.0
    for i in range(4):
        for j in range(i):
            assert abs(np.corrcoef(numbers[i], numbers[j])[0, 1]) < 0.04


@pytest.mark.parametrize("method", METHODS)
def test_trimming_a_draft_changes_no_decision_before_the_cut(method: str) -> None:
    """Positions keep their random numbers. Block verification decides jointly, so only standard and coupled are prefix-stable."""
    if method == "block":
        pytest.skip("block verification weighs the whole block, by design")
    for seed in range(30):
        draft, p, seeds, anchors = random_case(seed)
        whole = verify(draft, p, seeds, anchors, method)
        for length in range(4):
            cut = draft.trimmed(np.full(draft.rows, length, np.int32))
            part = verify(cut, p, seeds, anchors, method)
            for row in range(draft.rows):
                known = min(int(cut.counts[row]), int(part.accepted[row]), int(whole.accepted[row]))
                assert part.emitted(row)[:known] == whole.emitted(row)[:known]
                assert part.accepted[row] == min(int(whole.accepted[row]), int(cut.counts[row]))


def test_coupled_verification_emits_what_plain_decoding_draws() -> None:
    """Whatever is drafted: emitted tokens are those of a draft of length 0 at each position."""
    draft, p, seeds, anchors = random_case(3)
    plain = Draft(np.zeros((1, 0), np.int32), np.zeros(1, np.int32), np.zeros((1, 0), np.float32))
    out = verify(draft, p, seeds, anchors, "coupled")
    for row in range(draft.rows):
        for place, token in enumerate(out.emitted(row)):
            alone = verify(
                plain, p[row : row + 1, place : place + 1], seeds[row : row + 1], anchors[row : row + 1] + place
            )
            assert alone.emitted(0) == [token]


def test_greedy_keeps_drafts_while_they_are_the_argmax() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, 4, 11))
    best = logits.argmax(-1)[0]
    target = distribution(logits, GREEDY)
    wrong = (int(best[1]) + 1) % 11
    draft = Draft(np.array([[best[0], wrong, best[2]]], np.int32), np.array([3], np.int32), np.ones((1, 3), np.float32))
    for method in METHODS:
        assert verify(draft, target, [5], [9], method).emitted(0) == [best[0], best[1]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda w: sum(w) > 1e-6), st.floats(0, 1, exclude_max=True)
)
def test_inverse_cdf_never_draws_an_impossible_token(weights: list[float], u: float) -> None:
    assert weights[inverse_cdf(np.array(weights), u)] > 0.0


def brute_force(logits: np.ndarray, rule: SamplingFilter) -> np.ndarray:
    """The filters one token at a time, on sorted lists, without numpy's partition or cumsum."""
    weights = {i: float(np.exp((x - logits.max()) / rule.temperature)) for i, x in enumerate(logits)}
    weights = {i: w for i, w in weights.items() if w >= rule.min_p}
    ranked = sorted(weights, key=lambda i: -weights[i])
    if rule.top_k > 0:
        least = weights[ranked[min(rule.top_k, len(ranked)) - 1]]
        ranked = [i for i in ranked if weights[i] >= least]
    total, mass, kept = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass >= rule.top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    out = np.zeros(len(logits))
    for i in kept:
        out[i] = weights[i] / sum(weights[j] for j in kept)
    return out


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([0.2, 0.6, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3]),
)
def test_filters_equal_a_plain_restatement(seed: int, temperature: float, k: int, p: float, min_p: float) -> None:
    logits = np.random.default_rng(seed).normal(size=12) * 3.0
    rule = SamplingFilter(temperature, k, p, min_p)
    np.testing.assert_allclose(distribution(logits, rule), brute_force(logits, rule), atol=1e-12)


def test_masked_tokens_get_nothing_and_an_empty_mask_is_refused() -> None:
    mask = np.zeros((1, 2), np.int32)
    mask[0, 0], mask[0, 1] = -(2**31), 1  # tokens 31 and 32
    allowed = unpack_mask(mask, 40)
    assert np.flatnonzero(allowed[0]).tolist() == [31, 32]
    assert np.flatnonzero(distribution(np.zeros((1, 40)), SamplingFilter(), allowed)[0]).tolist() == [31, 32]
    with pytest.raises(DraftShapeError, match="no allowed token"):
        distribution(np.zeros((1, 4)), GREEDY, np.zeros((1, 4), bool))


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}, {"top_k": -2}])
def test_ranges_are_checked(bad: dict) -> None:
    with pytest.raises(SamplingRangeError, match="allowed"):
        SamplingFilter(**bad)


def test_unknown_methods_name_the_known_ones() -> None:
    draft, p, seeds, anchors = random_case(0)
    with pytest.raises(UnknownNameError, match="block, coupled, standard"):
        verify(draft, p, seeds, anchors, "nope")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("one_hot", [False, True])
def test_torch_emits_what_numpy_emits(method: str, one_hot: bool) -> None:
    torch = pytest.importorskip("torch")
    from deepinfer_specdec.verification.batched import verify_batched

    for seed in range(25):
        draft, p, seeds, anchors = random_case(seed, rows=16)
        if one_hot:
            draft = Draft(draft.token_ids, draft.counts, draft.confidences)
        expected = verify(draft, p, seeds, anchors, method)
        got = verify_batched(
            torch.tensor(draft.token_ids).long(),
            torch.tensor(draft.counts).long(),
            torch.tensor(p),
            torch.tensor(seeds),
            torch.tensor(anchors),
            None if draft.distributions is None else torch.tensor(draft.distributions),
            method,
        )
        assert got.accepted.tolist() == expected.accepted.tolist()
        assert got.token_ids.tolist() == expected.token_ids.tolist()


def test_torch_filters_equal_numpys() -> None:
    """float64 sums in another order: 1e-12."""
    torch = pytest.importorskip("torch")
    from deepinfer_specdec.verification.batched_distribution import FilterTensors, distribution_batched

    rng = np.random.default_rng(1)
    rules = [
        GREEDY,
        SamplingFilter(0.7),
        SamplingFilter(1.0, 5),
        SamplingFilter(1.3, 0, 0.8),
        SamplingFilter(1.0, 4, 0.7, 0.1),
    ]
    logits, mask = rng.normal(size=(len(rules), 30)) * 3, rng.random((len(rules), 30)) < 0.7
    got = distribution_batched(torch.tensor(logits), FilterTensors.of(rules), torch.tensor(mask))
    for row, rule in enumerate(rules):
        np.testing.assert_allclose(got[row].numpy(), distribution(logits[row], rule, mask[row]), atol=1e-12)
