"""The rejection sampler's kernels against a plain loop, and against the distribution they must keep."""

import pytest
import torch
from deepinfer_offline.engine.vllm.cpu import speculation
from hypothesis import given
from hypothesis import strategies as st


def loop(counts, accepted, tokens, bonus, wanted, width):
    """Emit position by position, as the definition says."""
    out, at = [[-1] * width for _ in counts], 0
    for r, n in enumerate(counts):
        if wanted[r]:
            for place in range(n):
                out[r][place] = tokens[at + place]
                if not accepted[at + place]:
                    break
            else:
                out[r][n] = bonus[r]
        at += n
    return out


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 2**20), st.booleans())
def test_greedy_verification_equals_the_loop(counts, seed, all_greedy):
    g = torch.Generator().manual_seed(seed)
    total, width = sum(counts), max(counts) + 1
    drafts, argmax = (torch.randint(0, 2, (total,), generator=g, dtype=torch.int32) for _ in range(2))
    bonus = torch.randint(5, 9, (len(counts), 1), generator=g)
    chosen = torch.ones(len(counts), dtype=torch.bool) if all_greedy else torch.rand(len(counts), generator=g) < 0.5
    out = torch.full((len(counts), width), -1, dtype=torch.int32)
    cu = torch.tensor(counts).cumsum(0).int()
    speculation.greedy(out, cu, drafts, argmax.long(), bonus, None if all_greedy else chosen, width - 1)
    expected = loop(counts, (drafts == argmax).tolist(), argmax.tolist(), bonus[:, 0].tolist(), chosen.tolist(), width)
    assert out.tolist() == expected


@pytest.mark.parametrize("one_hot", [True, False])
def test_sampled_verification_keeps_the_target_distribution(one_hot):
    """One draft, many requests: the first emitted token must follow the target whatever the draft's distribution is."""
    n, g = 200_000, torch.Generator().manual_seed(1)
    target = torch.tensor([0.5, 0.3, 0.2]).expand(n, 3).contiguous()
    guess = torch.tensor([0.2, 0.2, 0.6])
    drafts = torch.full((n,), 2) if one_hot else torch.multinomial(guess, n, replacement=True, generator=g)
    draft_probs = None if one_hot else guess.expand(n, 3).contiguous()
    cu = torch.arange(1, n + 1, dtype=torch.int32)
    inverse = torch.empty(n, 3).exponential_(generator=g).reciprocal()
    recovered = torch.empty(n, dtype=torch.int32)
    speculation.recover(recovered, cu, drafts.int(), draft_probs, target, inverse, 3, NO_DRAFT_PROBS=one_hot)
    out = torch.full((n, 2), -1, dtype=torch.int32)
    uniform = torch.rand(n, generator=g, dtype=torch.float64)
    speculation.random(
        out, cu, drafts.int(), draft_probs, target, torch.zeros(n, 1), recovered, uniform,
        torch.zeros(n, dtype=torch.bool), 1, 3, NO_DRAFT_PROBS=one_hot,
    )  # fmt: skip
    share = torch.bincount(out[:, 0].long(), minlength=3) / n
    # Six standard deviations of a share of 200,000 draws: 6 * sqrt(0.25 / n) = 0.0067.
    torch.testing.assert_close(share, target[0], atol=0.0067, rtol=0)


def test_a_padded_draft_is_rejected():
    out = torch.full((1, 2), -1, dtype=torch.int32)
    speculation.random(
        out, torch.tensor([1]), torch.tensor([speculation.REJECTED]), None, torch.tensor([[0.0, 1.0]]),
        torch.tensor([[7]]), torch.tensor([1]), torch.tensor([0.0], dtype=torch.float64), torch.tensor([False]), 1, 2,
        NO_DRAFT_PROBS=True,
    )  # fmt: skip
    assert out.tolist() == [[1, -1]]


def test_values_are_repeated_for_every_token():
    out = torch.zeros(5)
    speculation.expand(out, torch.tensor([0.0, 0.7]), torch.tensor([2, 5]), 0, 1)
    assert out.tolist() == pytest.approx([1, 1, 0.7, 0.7, 0.7])
