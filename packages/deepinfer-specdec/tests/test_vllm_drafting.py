"""Which slots hold a draft, and how the options reach the switch."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_specdec.adapters.vllm.drafting import Drafting
from deepinfer_specdec.adapters.vllm.options import VerificationOptions
from deepinfer_specdec.errors import SpecDecodeError


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def drafting(**options: object) -> Drafting:
    return Drafting(8, VerificationOptions(**options))  # type: ignore[arg-type]


def stop(made: Drafting) -> None:
    """Bring drafts that lose half of the time until it stops."""
    while made.wanted:
        made.judge(0.5, 10.0)
        made.passed(slots(0, 1), slots(0, 1), 10.0, 10.0)


def test_a_slot_holds_a_draft_while_the_last_step_that_sampled_for_it_drafted() -> None:
    made = drafting()
    assert not made.held(slots(0, 1, 2)).any()
    assert made.passed(slots(2, 1, 0), slots(1, 0), 10.0, 1.0).tolist() == [1, 0]  # 2 is in the midst of its prompt
    assert made.held(slots(0, 1, 2)).tolist() == [True, True, False]
    made.now = False
    assert made.passed(slots(1), slots(1), 10.0, 1.0).tolist() == []
    assert made.held(slots(0, 1, 2)).tolist() == [
        True,
        False,
        False,
    ]  # 0 did not run: its draft still follows its last token
    made.now = True
    made.passed(slots(0, 1, 2), slots(1, 2), 10.0, 1.0)
    assert made.held(slots(0, 1, 2)).tolist() == [False, True, True]


def test_a_new_request_has_no_draft_whoever_had_the_slot() -> None:
    made = drafting()
    made.passed(slots(0, 1), slots(0, 1), 10.0, 1.0)
    made.begin(1)
    assert made.held(slots(0, 1)).tolist() == [True, False]
    assert made.met(slots(0, 1)).tolist() == [0]


def test_new_requests_bring_a_look_as_soon_as_they_have_sampled() -> None:
    made = drafting()
    stop(made)
    made.now = False
    for _ in range(400):  # until it is in credit again, and has looked
        made.passed(slots(0, 1), slots(0, 1), 10.0, 2.0)
        made.now = made.wanted
    for _ in range(100):  # and is in the midst of a pause
        if made.now:
            made.passed(slots(0, 1), slots(0, 1), 10.0, 2.0)
            made.now = made.wanted
    assert not made.now
    made.begin(2)
    made.begin(3)
    made.passed(slots(0, 1, 2, 3), slots(0, 1), 10.0, 1.0)  # prompts that are not through
    assert not made.wanted
    made.passed(slots(0, 1, 2, 3), slots(0, 1, 2, 3), 10.0, 1.0)
    assert made.wanted


def test_drafts_that_others_wanted_are_not_paid_for() -> None:
    """Another data-parallel rank has every step draft: then looks are free, and nothing is owed for them later."""
    stop(made := drafting())
    for _ in range(1000):
        made.now = True
        made.judge(0.7, 10.0)
        made.passed(slots(0, 1), slots(0, 1), 10.0, 2.0)
    assert made.changes == 1
    made.judge(1.5, 10.0)
    made.passed(slots(0, 1), slots(0, 1), 10.0, 2.0)
    assert made.wanted
    assert made.changes == 2


def test_drafting_that_loses_stops_unless_the_user_wants_it_always() -> None:
    stop(made := drafting())
    assert made.changes == 1
    always = drafting(pause_drafting=False)
    for _ in range(100):
        always.judge(0.5, 10.0)
        always.passed(slots(0), slots(0), 10.0, 10.0)
        assert always.wanted
    assert always.steps == always.drafted == 100


def test_the_edge_is_what_drafts_must_gain_at_least() -> None:
    near, made = drafting(), drafting(edge=0.2)
    for _ in range(20):
        near.judge(1.1, 10.0)
        made.judge(1.1, 10.0)
    near.passed(slots(0), slots(0), 10.0, 1.0)
    made.passed(slots(0), slots(0), 10.0, 1.0)
    assert near.wanted
    assert not made.wanted


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_a_share_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(SpecDecodeError, match="look_share"):
        VerificationOptions(look_share=share)
