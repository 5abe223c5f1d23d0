"""Every policy that ships leaves the output distribution alone, exactly; two that must not ship move it, by the same
code.

Tolerance 1e-12: sums of at most 1e5 products of probabilities in float64 err by far less; a biased policy errs by 1e-2.
"""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_specdec.draft import Draft
from deepinfer_specdec.scheduling.admission import admit
from deepinfer_specdec.scheduling.budget import (
    StepLoad,
    early_stop_budget,
    expected_budget,
    expected_tokens,
    live_budget,
    lookahead_budget,
)
from deepinfer_specdec.scheduling.choice import choose
from deepinfer_specdec.scheduling.cost import CostCurve
from deepinfer_specdec.simulation.exact import (
    ToyProblem,
    expected_accepted,
    output_distribution,
    policy_lengths,
    target_distribution,
    total_variation,
)

EXACT = 1e-12
# Jagged on 2..8 tokens (2 rows, up to 6 drafts); picked so that the policies' lengths differ between drafts and from
# each other.
CURVES = {
    "dips": CostCurve(range(1, 9), [0.94, 1.40, 0.90, 1.62, 1.40, 1.92, 1.21, 1.69]),
    "bump": CostCurve(range(1, 9), [0.91, 1.07, 1.59, 1.41, 1.27, 1.35, 2.12, 1.54]),
    "hill": CostCurve(range(1, 9), [0.96, 1.43, 1.24, 1.30, 1.59, 2.08, 2.18, 1.80]),
    "flat": CostCurve(range(1, 9), [0.81, 1.43, 1.46, 1.34, 1.76, 1.70, 1.88, 2.30]),
}
PROBLEMS = [(2, 2), (2, 3), (3, 2)]  # vocabulary, block


def problems(vocab: int, block: int, one_hot: bool = False) -> list[ToyProblem]:
    return [ToyProblem.random(seed, 2, vocab, block, one_hot) for seed in range(4 if vocab**block > 8 else 8)]


def top_k(budget: int):
    return lambda draft: admit(draft.survivals(), draft.counts, budget)


def early_stop(curve: CostCurve):
    return lambda draft: admit(
        draft.survivals(), draft.counts, early_stop_budget(draft.survivals(), StepLoad(2), curve)
    )


def lookahead(curve: CostCurve, forecast: np.ndarray):
    def policy(draft: Draft) -> np.ndarray:
        budget = lookahead_budget(draft.survivals(), forecast, StepLoad(2), curve)
        return admit(draft.survivals(), draft.counts, budget)

    return policy


def live_argmax(curve: CostCurve):
    return lambda draft: admit(draft.survivals(), draft.counts, live_budget(draft.survivals(), StepLoad(2), curve))


def in_one_sort(curve: CostCurve):
    """What the native engine's synchronous loop runs: rows weighed by a worth, only some sizes of a step allowed."""

    def policy(draft: Draft) -> np.ndarray:
        values = draft.survivals() * np.array([[1.3], [0.7]])
        return choose(
            values, draft.counts, curve.span(2, 2 * draft.width + 1), 0.02, lambda tokens: tokens != 5
        ).lengths

    return policy


def ranked_by_drawn_token(budget: int):
    """Unsound: ranks position k by the draft probability of the token that was drawn there."""

    def policy(draft: Draft) -> np.ndarray:
        assert draft.distributions is not None
        drawn = np.take_along_axis(draft.distributions, draft.token_ids[..., None].astype(int), axis=-1)[..., 0]
        return admit(np.cumprod(drawn, axis=1), draft.counts, budget)

    return policy


@pytest.mark.parametrize(("vocab", "block"), PROBLEMS)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_stale_budget_with_live_admission_is_exact(vocab: int, block: int, method: str) -> None:
    for problem in problems(vocab, block):
        for budget in range(2 * block + 1):
            assert total_variation(problem, top_k(budget), method) <= EXACT


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize(("vocab", "block"), PROBLEMS)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_policies_on_the_current_block_are_exact(curve: CostCurve, vocab: int, block: int, method: str) -> None:
    rng = np.random.default_rng(vocab * 10 + block)
    for problem in problems(vocab, block):
        forecast = expected_tokens(np.sort(rng.uniform(0.2, 1.0, 2 * block))[::-1])
        assert total_variation(problem, early_stop(curve), method) <= EXACT
        assert total_variation(problem, lookahead(curve, forecast), method) <= EXACT


def test_the_curves_make_the_policies_choose() -> None:
    """Guards the exactness tests: a policy that always gives the same lengths would be exact for an uninteresting
    reason.
    """
    forecast = expected_tokens(np.array([0.9, 0.7, 0.5, 0.3]))
    for policy in (early_stop, live_argmax, in_one_sort, lambda curve: lookahead(curve, forecast)):
        within = [
            len({tuple(x) for x in policy_lengths(p, policy(c))}) for c in CURVES.values() for p in problems(2, 2)
        ]
        assert sum(count > 1 for count in within) >= 3


def test_lookahead_crosses_a_jag_where_the_paper_stops() -> None:
    survivals = np.full((2, 2), 0.9, dtype=np.float32)
    load, curve = StepLoad(2), CURVES["bump"]
    assert early_stop_budget(survivals, load, curve) == 0
    assert lookahead_budget(survivals, expected_tokens(survivals), load, curve) == 4


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize(("vocab", "block"), PROBLEMS)
def test_live_argmax_is_exact_for_deterministic_drafts(curve: CostCurve, vocab: int, block: int) -> None:
    for problem in problems(vocab, block, one_hot=True):
        for policy in (live_argmax(curve), in_one_sort(curve)):
            assert total_variation(problem, policy, "coupled") <= EXACT
            assert total_variation(problem, policy, "standard") <= EXACT


def test_live_argmax_on_a_jagged_curve_is_biased_for_sampled_drafts() -> None:
    assert max(total_variation(problem, live_argmax(CURVES["dips"])) for problem in problems(2, 2)) > 1e-2


def test_ranking_by_the_drawn_token_is_biased() -> None:
    distances = [total_variation(p, ranked_by_drawn_token(k)) for p in problems(2, 2) for k in (1, 2, 3)]
    assert max(distances) > 1e-2


def test_the_papers_counterexample() -> None:
    """DSpark paper, appendix A: one request, p = (.7, .3), q = (.5, .5), steps of 1, 2, 3 tokens at 1, .5, .45 a
    second.

    Position 2 is worth verifying only after one of the two tokens; a search over all B then admits position 1 only with
    it.
    """
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    after = {(0,): (np.array([1.0, 0.0]), np.array([1.0, 0.0])), (1,): (np.array([1.0, 0.0]), np.array([0.0, 1.0]))}
    target = {(): p, (0,): after[(0,)][0], (1,): after[(1,)][0]}
    target |= {(a, b): np.array([0.5, 0.5]) for a in range(2) for b in range(2)}
    proposal = {(): q, (0,): after[(0,)][1], (1,): after[(1,)][1]}
    problem = ToyProblem([target], [proposal], vocab=2, block=2)
    curve = CostCurve([1, 2, 3], [1.0, 1 / 0.5, 1 / 0.45])

    def search(draft: Draft) -> np.ndarray:
        budget = live_budget(draft.survivals(), StepLoad(1), curve)
        return admit(draft.survivals(), draft.counts, budget)

    first_token = output_distribution(problem, search).reshape(2, -1).sum(axis=1)
    np.testing.assert_allclose(first_token, [0.85, 0.15], atol=1e-12)
    np.testing.assert_allclose(target_distribution(problem).reshape(2, -1).sum(axis=1), [0.7, 0.3], atol=1e-12)


@pytest.mark.parametrize(("vocab", "block"), PROBLEMS)
def test_block_verification_never_accepts_less_than_standard(vocab: int, block: int) -> None:
    """Sun et al. 2024, theorem 2. Expected accepted drafts by enumeration of both."""
    gains = []
    for problem in problems(vocab, block):
        standard, jointly = (expected_accepted(problem, method) for method in ("standard", "block"))
        assert jointly >= standard - EXACT
        gains.append(jointly - standard)
    assert max(gains) > 1e-3


def test_stale_budget_argmax_uses_only_the_forecast() -> None:
    forecast = expected_tokens(np.array([0.9, 0.8, 0.3, 0.1]))
    assert expected_budget(forecast, StepLoad(2), CURVES["bump"]) == 3  # 4.0 / 1.27 s beats 2 / 1.07 s and 4.1 / 1.35 s
    assert expected_budget(forecast, StepLoad(2), CostCurve([1, 8], [1.0, 8.0])) == 0
