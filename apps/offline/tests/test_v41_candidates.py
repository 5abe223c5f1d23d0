"""Candidates kept by block, where the reference keeps them by entry."""

from __future__ import annotations

import torch
from deepinfer_offline.models.deepsig_v41.device import _kept_blocks, _leave_blocks
from deepinfer_offline.ops import deepsig as ops
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(0, 1 << 30))
def test_later_scores_are_left_out_as_by_entry(entries: int, size: int, blocks: int, seed: int) -> None:
    """Of entries that a row does not see there is no score in any layer, so whole blocks say the same as their entries."""
    draw = torch.Generator().manual_seed(seed)
    visible = torch.randint(1, entries + 1, (5,), generator=draw)
    unseen = torch.arange(entries) >= visible[:, None]
    first, later = (torch.randint(-3, 4, (5, entries), generator=draw).float() for _ in range(2))
    for scores in (first, later):
        scores.masked_fill_(unseen, -torch.inf)
    mask = ops.candidate_mask(first, visible, blocks=blocks, block_size=size)
    kept = _kept_blocks(mask, size)
    assert kept.shape == (5, -(-entries // size))
    expected = later.masked_fill(~mask, -torch.inf)
    _leave_blocks(later, kept, size)
    assert torch.equal(later, expected)
