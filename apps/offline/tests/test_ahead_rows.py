"""Sharing a budget of drafts out on the device, and the bounds that the host plans with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.native.ahead_rows import share_drafts
from deepinfer_offline.engine.native.batch import _counts_ahead
from deepinfer_specdec import Draft, admit
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.sampled_from([-8.0, -1.0, 0.0, 0.5, 3.0, 30.0]), min_size=4, max_size=4)),
    min_size=1,
    max_size=7,
)


PLAIN = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])


@settings(max_examples=300, deadline=None)
@given(ROWS, st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=8, max_size=8), st.floats(0, 1))
def test_drafts_are_shared_out_as_the_library_admits_them(rows: Any, numbers: list[float], share: float) -> None:
    """Few confidences, so that ties are common: they must fall alike, or a tie could fall by a token's value."""
    most = np.array([count for count, _ in rows])
    logits = np.array([values for _, values in rows], np.float32)
    budget = int(share * most.sum())
    scaling = torch.tensor(numbers).view(2, 4)
    got = share_drafts(torch.from_numpy(logits), scaling, torch.from_numpy(most), budget)
    # The same float32 operations: other roundings would break ties that are none.
    sure = torch.sigmoid(torch.from_numpy(logits) / scaling[0] + scaling[1]).cumprod(1).numpy()
    assert got.tolist() == admit(np.where(np.arange(4) < most[:, None], sure, 0), most, budget).tolist()
    assert int(got.sum()) == budget


def test_a_row_never_gets_a_draft_behind_one_that_it_does_not() -> None:
    """By calibrated survival, not by confidence: a sure third draft behind an unsure second one ranks below it."""
    logits = torch.tensor([[3.0, -2.0, 9.0], [1.0, 1.0, 1.0]])
    most = torch.tensor([3, 3])
    shares = [share_drafts(logits, PLAIN, most, budget).tolist() for budget in range(7)]
    assert shares == [[0, 0], [1, 0], [1, 1], [1, 2], [1, 3], [2, 3], [3, 3]]
    assert share_drafts(logits, PLAIN * torch.tensor([[1.0, 1e-3, 1.0], [0, 0, 0]]), most, 3).tolist() == [1, 2]
    raised = torch.tensor([[1.0, 1.0, 1.0], [0.0, 20.0, 0.0]])
    assert share_drafts(logits, raised, most, 3).tolist() == [3, 0], "offsets count"


def test_the_rank_does_not_look_at_later_columns() -> None:
    draft = Draft.from_rows([[1, 2, 3]], [[0.9, 0.8, 0.7]])
    assert draft.survivals()[0].tolist() == pytest.approx([0.9, 0.72, 0.504])
    logits = torch.logit(torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.1, 0.1]]))
    changed = logits.clone()
    changed[0, 2] = -9.0
    most = torch.tensor([3, 1])
    for budget in (1, 2, 3):
        one, two = share_drafts(logits, PLAIN, most, budget), share_drafts(changed, PLAIN, most, budget)
        assert min(int(one[0]), 2) == min(int(two[0]), 2)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.floats(0, 1), st.randoms())
def test_no_sharing_makes_a_longer_row_than_the_host_expects(most: list[int], share: float, rng: Any) -> None:
    drafts = np.array(most, np.int32)
    budget = int(share * drafts.sum())
    plan = SimpleNamespace(drafts=drafts, counts=drafts + 1)
    counts = _counts_ahead(plan, budget)  # type: ignore[arg-type]
    assert counts.sum() == len(most) + budget
    assert (counts <= drafts + 1).all()
    assert counts.min() >= 1
    logits = torch.tensor([[rng.uniform(-5, 5) for _ in range(6)] for _ in most])
    got = share_drafts(
        logits, torch.stack((torch.ones(6), torch.zeros(6))), torch.from_numpy(drafts.astype(np.int64)), budget
    )
    assert int(got.max()) + 1 <= counts.max()
