"""How often a draft is kept by each rule: the formula, the draws beside a text, and what the verifications themselves do."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer_specdec.errors import SpecDecodeError  # noqa: E402
from deepinfer_specdec.train.agreement import RULES, Rule  # noqa: E402
from deepinfer_specdec.verification import randomness  # noqa: E402
from deepinfer_specdec.verification.batched import inverse_cdf, uniform, verify_batched  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

DRAWS, VOCAB = 40_000, 7


def distributions(seed: int, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [1, VOCAB] of a target and of a draft that resembles it."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(1, VOCAB, generator=generator) * spread
    return target, target + torch.randn(1, VOCAB, generator=generator)


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_drafts_beside_a_text_are_the_drafts_distribution_and_kept_as_often_as_the_rule_says(
    method: str, temperature: float
) -> None:
    """The text is drawn from the target, so drafts given it must have the draft's own distribution. 40,000 draws: 5 sigma of a
    share are 0.0125."""
    rule = Rule(method, temperature)
    for seed in range(3):
        target, draft = (rule.probabilities(logits) for logits in distributions(seed))
        generator = torch.Generator().manual_seed(seed)
        said = torch.multinomial(target[0], DRAWS, replacement=True, generator=generator)
        drawn = rule.draw(target.expand(DRAWS, -1), draft.expand(DRAWS, -1), said, generator)
        share = torch.bincount(drawn, minlength=VOCAB) / DRAWS
        assert (share - draft[0]).abs().max() < 0.0125
        assert abs(float((drawn == said).float().mean()) - float(rule.kept(target, draft))) < 0.0125


def test_the_coupled_rule_is_the_coupled_verification() -> None:
    """Drafts drawn with the position's own number, verified by the package's own verification."""
    logits, other = distributions(5)
    rule = Rule("coupled", 0.8)
    target, draft = rule.probabilities(logits), rule.probabilities(other)
    seeds, anchors = torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64)
    both = target.expand(DRAWS, 2, VOCAB).double()
    free = verify_batched(torch.zeros(DRAWS, 1, dtype=torch.int64), torch.zeros_like(seeds), both, seeds, anchors)
    guesses = inverse_cdf(draft.expand(DRAWS, VOCAB), uniform(seeds, anchors + 1, randomness.TARGET))
    kept = verify_batched(guesses[:, None], torch.ones_like(seeds), both, seeds, anchors, method="coupled").accepted
    assert abs(float(kept.double().mean()) - float(rule.kept(target, draft))) < 0.0125
    assert ((free.token_ids[:, 0] == guesses) == kept.bool()).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 3.0))
def test_coupling_never_keeps_more_than_rejection_sampling(seed: int, temperature: float) -> None:
    """1 - TV is the most that any way to draw the two together can reach; equal distributions are always kept."""
    target, draft = distributions(seed, 1.0)
    coupled, standard = (Rule(name, temperature).acceptance(target, draft) for name in ("coupled", "standard"))
    assert 0.0 <= float(coupled) <= float(standard) + 1e-6 <= 1.0 + 1e-6
    assert float(Rule("coupled", temperature).acceptance(target, target)) == pytest.approx(1.0, abs=1e-5)
    same = np.argmax(target.numpy()) == np.argmax(draft.numpy())
    assert [float(Rule(name, 0.0).acceptance(target, draft)) for name in RULES] == [float(same)] * 2


def test_rules_are_checked() -> None:
    with pytest.raises(SpecDecodeError, match="verification 'block'; allowed: coupled, standard"):
        Rule("block")
    with pytest.raises(SpecDecodeError, match="temperature nan; allowed"):
        Rule("coupled", float("nan"))
