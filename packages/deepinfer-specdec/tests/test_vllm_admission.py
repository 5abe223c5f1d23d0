"""Which drafts vLLM verifies: the surest ones, equal ones by place alone, as the package's numpy rule has it."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_specdec import admit
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from deepinfer_specdec.adapters.vllm.admission import assign_draft_budget  # noqa: E402


def admitted(confidences, slots, counts, budget):
    capacities = torch.tensor(counts, dtype=torch.int32)
    assign_draft_budget(torch.tensor(confidences, dtype=torch.float32), torch.tensor(slots), capacities, budget,
                        np.shape(confidences)[1])  # fmt: skip
    return capacities.tolist()


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_device_and_host_admit_the_same_drafts(rows, width, data):
    few = st.sampled_from([0.0, 0.25, 0.5, 1.0])  # powers of two: products are exact, and ties are many
    confidences = np.array(data.draw(st.lists(st.lists(few, min_size=width, max_size=width), min_size=8, max_size=8)))
    slots = data.draw(st.permutations(range(8)))[:rows]
    counts = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    budget = data.draw(st.integers(0, sum(counts)))
    survivals = np.cumprod(confidences[slots], axis=1)
    got = admitted(confidences, slots, counts, budget)
    assert got == admit(survivals, np.array(counts), budget).tolist()
    assert sum(got) == budget


def test_equal_survivals_go_by_column_then_row():
    ones = np.ones((3, 2))
    assert admitted(ones, [0, 1, 2], [2, 2, 2], 2) == [1, 1, 0]
    assert admitted(ones, [0, 1, 2], [2, 2, 2], 4) == [2, 1, 1]


def test_a_sure_request_takes_what_an_unsure_one_leaves():
    assert admitted([[0.9, 0.9, 0.9], [0.5, 0.9, 0.9]], [0, 1], [3, 3], 3) == [3, 0]
