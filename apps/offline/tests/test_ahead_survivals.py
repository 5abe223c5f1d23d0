"""What budgets ahead of the host are made from: how likely each draft of the blocks is to be kept, with all before it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from deepinfer_specdec import TemperatureScaling
from toy_drafts import WIDTH, check_all, make_drafting_engine
from toy_engine import ask

TEMPERATURES, OFFSETS = np.linspace(0.5, 2.0, WIDTH), np.linspace(-0.4, 0.3, WIDTH)


def test_calibrated_survivals_of_every_block_are_recorded() -> None:
    """Each block that a step drafted for a row that goes on, by its own confidences: 1e-6 is float32."""
    engine = make_drafting_engine(running=4, pages=200)
    speculation: Any = engine._parts.speculation
    speculation.force()
    speculation._following.drafter.calibration.scaling = TemperatureScaling(TEMPERATURES, OFFSETS)
    ahead, drafted, recorded = speculation._ahead, {}, {}
    landed, record = ahead.landed, ahead._planner.record

    def watch_landed(result: Any, *rest: Any) -> None:
        if result.drafted is not None:
            rows = result.drafted.plan_rows
            going_on = engine._parts.scheduler.state.seq_ids[result.plan.slots[rows]] == result.plan.seq_ids[rows]
            blocks = zip(result.plan.slots[rows][going_on].tolist(), result.drafted.confidence[going_on], strict=True)
            drafted[result.plan.step] = dict(blocks)
        landed(result, *rest)

    def watch_record(step: int, slots: np.ndarray, survivals: np.ndarray) -> None:
        recorded[step] = dict(zip(slots.tolist(), survivals.copy(), strict=True))
        record(step, slots, survivals)

    ahead.landed, ahead._planner.record = watch_landed, watch_record
    rng = random.Random(0)
    check_all(engine, [ask(f"r{i}", "word"[i % 4 :], max_tokens=rng.randrange(10, 40)) for i in range(12)])
    assert recorded.keys() == drafted.keys()
    assert sum(map(len, drafted.values())) > 50
    for step, blocks in drafted.items():
        assert recorded[step].keys() == blocks.keys()
        for slot, raw in blocks.items():
            survivals, survival = [], 1.0
            for logit, temperature, offset in zip(raw.tolist(), TEMPERATURES, OFFSETS, strict=True):
                survival /= 1.0 + np.exp(-(logit / temperature + offset))
                survivals.append(survival)
            np.testing.assert_allclose(recorded[step][slot], survivals, atol=1e-6)
