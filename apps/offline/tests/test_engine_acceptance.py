"""Acceptance of drafts, all rows at once, against one row after another."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer_offline.engine.native.acceptance import accept_drafts  # noqa: E402
from deepinfer_offline.engine.native.batch import SampleRows  # noqa: E402
from deepinfer_offline.engine.native.tokens import TokenBuffer  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SLOTS, CAPACITY = 8, 24


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_keep_drafts_up_to_the_first_that_differs(data: st.DataObject) -> None:
    """Rows that draw nothing, that draw once, and that verify, in any order of the draws; three token values, so that
    equal ones after a difference are common."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    drafts = np.array(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=SLOTS)), np.int32)
    samples = np.array([data.draw(st.booleans()) or bool(count) for count in drafts])
    slots = rng.permutation(SLOTS)[: len(drafts)]
    starts = rng.integers(1, CAPACITY - 6, len(drafts))
    tokens = TokenBuffer(SLOTS, CAPACITY, "cpu")
    tokens.data[:] = torch.from_numpy(rng.integers(0, 3, (SLOTS, CAPACITY)).astype(np.int32))
    before = tokens.data.clone()
    order = [row for row in rng.permutation(len(drafts)).tolist() if samples[row]]
    draws = [(row, starts[row] + 1 + place) for row in order for place in range(drafts[row] + 1)]
    rows = np.array([row for row, _ in draws], np.int64)
    places = np.array([place for _, place in draws], np.int64)
    found = SampleRows(rows, slots[rows].astype(np.int64), places, np.arange(len(draws)))
    drawn = rng.integers(0, 3, len(draws))
    plan = SimpleNamespace(drafts=drafts, num_rows=len(drafts))
    accepted = accept_drafts(plan, found, torch.from_numpy(drawn), tokens)  # type: ignore[arg-type]
    by_place = dict(zip(draws, drawn.tolist(), strict=True))
    for row, slot in enumerate(slots.tolist()):
        emitted = []
        if samples[row]:
            for place in range(starts[row] + 1, starts[row] + 2 + drafts[row]):
                emitted.append(by_place[row, place])
                if emitted[-1] != before[slot, place]:
                    break
            last = starts[row] + len(emitted)
            before[slot, last] = emitted[-1]
        width = 1 + drafts.max()
        assert accepted.counts[row] == len(emitted)
        assert accepted.token_ids[row].tolist() == emitted + [0] * (width - len(emitted))
    assert torch.equal(tokens.data, before), "only each row's last token is written"
