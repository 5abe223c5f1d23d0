"""Prices of steps ahead in an engine: by the graphs that its steps are padded to, or where there are none by drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deepinfer_offline.engine.native.ahead_drafts import AheadDrafts
from deepinfer_offline.engine.native.ahead_step import AheadSteps, EnqueuedAhead
from toy_drafts import WIDTH, make_drafting_engine
from toy_engine import ask, run


def ahead_of() -> AheadDrafts:
    speculation: Any = make_drafting_engine(running=2)._parts.speculation
    ahead = speculation._ahead
    assert isinstance(ahead, AheadDrafts)
    return ahead


def test_an_engine_prices_drafts_by_the_graphs_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AheadSteps, "graphs", (2, 4, 8))
    ahead = ahead_of()
    for drafts in (0, *4 * [2], *4 * [5]):
        ahead.costs.observe(2, drafts, {0: 0.010, 2: 0.011, 5: 0.013}[drafts])
    prices = ahead.seconds(2)
    assert prices[:7] == pytest.approx([0.010, 0.011, 0.011, 0.013, 0.013, 0.013, 0.013])
    assert len(prices) == 2 * WIDTH + 1
    assert (prices[7:] > 0.03).all(), "behind the largest graph"


def test_steps_ahead_are_not_captured_so_every_draft_has_its_price() -> None:
    """On a CPU, where kernels are built for each size, a draft is taken to cost as much as a row among 16 more."""
    ahead = ahead_of()
    ahead.costs.observe(2, 0, 0.018)
    assert ahead.seconds(2) == pytest.approx(0.018 + 0.001 * np.arange(2 * WIDTH + 1))


@pytest.mark.parametrize("first", [False, True])
def test_a_step_that_graphs_were_captured_for_is_no_price(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[Any] = []
    result = EnqueuedAhead.result
    monkeypatch.setattr(EnqueuedAhead, "result", lambda self: replace(result(self), first=first))
    monkeypatch.setattr(AheadDrafts, "learn", lambda self, *seen: learned.append(seen))
    engine = make_drafting_engine(running=2)
    speculation: Any = engine._parts.speculation
    speculation.force(2)
    run(engine, [ask("word", max_tokens=20)])
    assert bool(learned) != first
