"""How fast sequences are taken to be."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_offline.engine.native.paces import Paces


def test_a_pace_belongs_to_a_sequence() -> None:
    paces, slots = Paces(4), np.array([3, 1])
    assert paces.of(slots, np.array([7, 8])).tolist() == [1.0, 1.0]
    for _ in range(200):
        paces.learn(slots, np.array([7, 8]), np.array([3.0, 1.0]))
    # 0.95 ** 200 of the way is left.
    assert paces.of(slots, np.array([7, 8])) == pytest.approx([3.0, 1.0], abs=1e-4)
    assert paces.of(slots, np.array([9, 8])) == pytest.approx([1.0, 1.0]), "another sequence has the slot"
    paces.learn(slots[:1], np.array([9]), np.array([2.0]))
    assert paces.of(slots, np.array([9, 8])) == pytest.approx([1.05, 1.0])
