"""The switch of each load, and what statistics count."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_specdec import (
    SpeculationStatistics,
)
from deepinfer_specdec.scheduling.switch import LoadSwitches, SpeculationSwitch
from hypothesis import given, settings
from hypothesis import strategies as st


def test_switch_needs_evidence_and_backs_off_longer_every_time() -> None:
    switch = SpeculationSwitch()
    for _ in range(50):
        assert not switch.expect(1.02, 1.0)
    waits = []
    for _ in range(3):
        steps = 0
        while switch.rest() or not switch.expect(1.5, 1.0):
            steps += 1
        waits.append(steps)
        while switch.measure(0.9, 1.0):
            pass
    assert waits[0] < waits[1] < waits[2]
    while switch.rest() or not switch.expect(1.5, 1.0):
        pass
    assert all(switch.measure(1.3, 1.0) for _ in range(200))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.floats(1.0, 5.0), st.floats(0.3, 0.97))
def test_what_was_won_long_ago_pays_for_no_losses(good: int, gain: float, loss: float) -> None:
    """However long it paid: once it loses, it goes on for as many steps as the reserve and the patience hold, no more."""
    switch = SpeculationSwitch()
    while not switch.expect(1.5, 1.0):
        pass
    for _ in range(good):
        assert switch.measure(gain, 1.0)
    steps = 0
    while switch.measure(loss, 1.0):
        steps += 1
    most = (switch.options.reserve + switch.options.patience) / (1.0 - loss) + switch.options.settle
    assert steps <= most


def test_waiting_for_drafts_ends_and_is_no_failure() -> None:
    """A text that stops repeating: off after one step of waiting, whatever was won before; on with the first good forecast."""
    switch = SpeculationSwitch()
    while not switch.expect(1.5, 1.0):
        pass
    for _ in range(50):
        switch.measure(2.0, 1.0)
    steps = 1
    while switch.wait(0.0625):
        steps += 1
    assert steps == 16
    assert not switch.rest()
    assert switch.expect(1.07, 1.0), "neither a pause nor less trust"
    steps = 1
    while switch.wait(0.0625):
        steps += 1
    assert steps == 8, "a forecast that nothing came of is worth half as long"


def test_forecasts_that_failed_are_trusted_less_but_never_for_good() -> None:
    switch = SpeculationSwitch()
    for _ in range(20):
        for _ in range(200):
            if not switch.rest() and switch.expect(1.45, 1.0):
                break
        assert switch.on, "a gain this large is tried again"
        while switch.measure(0.8, 1.0):
            pass
    switch = SpeculationSwitch()
    while not switch.expect(1.2, 1.0):
        pass
    while switch.measure(0.9, 1.0):
        pass
    steps = 1
    while switch.rest() or not switch.expect(1.2, 1.0):
        steps += 1
    assert steps == switch.options.pause
    while switch.measure(0.9, 1.0):
        pass
    assert switch.on is False
    for _ in range(2 * switch.options.pause):
        switch.rest()
    assert not switch.expect(1.2, 1.0), "a modest one waits for trust to come back, not for the pause alone"
    assert not switch.promising


def test_a_trial_ends_by_the_clock() -> None:
    switch = SpeculationSwitch()
    switch.try_on()
    assert switch.on
    steps = 0
    while switch.measure(0.8, 1.0):
        steps += 1
    assert steps <= 3
    assert switch.rest(), "and a failed one waits as any other does"


def test_loads_have_their_own_switches() -> None:
    switches = LoadSwitches()
    while not switches.meet(64).expect(1.5, 1.0):
        pass
    assert switches.meet(30).on, "a load that was never met goes on as the last one did"
    while switches.current.measure(0.5, 1.0):
        pass
    assert not switches.meet(17).on
    assert switches.meet(60).on, "and the one that paid goes on paying"
    assert switches.changes == 2
    alone, many = LoadSwitches(), LoadSwitches()
    assert alone.meet(1).expect(1.5, 1.0), "one sequence's forecast is enough"
    assert [many.meet(16).expect(1.5, 1.0) for _ in range(3)] == [False, False, True], "those of many must agree"


def test_statistics_count_the_bonus_of_rows_that_verified_something() -> None:
    """Rows that verify nothing are plain decoding: they would pull the accepted length towards 1."""
    stats = SpeculationStatistics()
    stats.record(np.array([3, 2, 0, 4]), np.array([3, 1, 0, 0]), np.array([2, 1, 0, 0]))
    assert stats.accepted_length == pytest.approx((3 + 2) / 2)
    assert stats.acceptance_rate == pytest.approx(3 / 4)
    said = stats.as_dict()
    assert (said["verification_steps"], said["emitted_tokens"], said["plain_rows"], said["drafted_tokens"]) == (
        2,
        5,
        2,
        9,
    )
    assert said["accepted_share_by_position"] == [1.0, 1.0, 0.0]


def test_statistics_have_no_accepted_length_where_nothing_was_verified() -> None:
    stats = SpeculationStatistics()
    assert stats.accepted_length is None
    stats.record(np.array([3, 0]), np.array([0, 0]), np.array([0, 0]))
    assert stats.accepted_length is None
    assert stats.acceptance_rate is None
    assert stats.as_dict()["accepted_length"] is None
    assert stats.as_dict()["plain_rows"] == 2
