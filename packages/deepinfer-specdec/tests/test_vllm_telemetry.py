"""What real steps tell: their time with the gap before it, and the fate of their drafts, without anyone waiting."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer_specdec.adapters.vllm import telemetry  # noqa: E402
from deepinfer_specdec.adapters.vllm.report import Report  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A step clock on a host whose time is what the test says; `clock.at(seconds)` sets it."""
    now = [0.0]
    monkeypatch.setattr(telemetry.time, "perf_counter", lambda: now[0])
    timed = telemetry.StepClock(CPU)
    timed.at = lambda seconds: now.__setitem__(0, seconds)
    return timed


def run(clock, start, end, requests=2, tokens=6, drafted=True):
    clock.at(start)
    clock.start()
    clock.at(end)
    clock.stop(requests, tokens, drafted)


def test_a_step_takes_its_time_and_the_gap_before_it(clock):
    run(clock, 1.000, 1.010)
    run(clock, 1.012, 1.022, tokens=9, drafted=False)
    (first, second) = clock.take()
    assert first == (2, 6, pytest.approx(10.0), True)
    assert second == (2, 9, pytest.approx(12.0), False)
    assert clock.take() == []


def test_a_pause_or_a_step_of_another_kind_is_not_charged(clock):
    run(clock, 1.000, 1.010)
    run(clock, 3.000, 3.010)  # nothing to do for two seconds
    clock.skip()  # a prefill step ran here
    run(clock, 3.014, 3.024)
    assert [took for _, _, took, _ in clock.take()] == pytest.approx([10.0, 10.0, 10.0])


def test_a_stop_without_a_start_measures_nothing(clock):
    clock.stop(1, 1)
    assert clock.take() == []


def test_outcomes_arrive_in_order_and_a_full_ring_drops_the_newest():
    ring = telemetry.Outcomes(4, 2, CPU)
    for i in range(6):
        rows = torch.full((i % 3 + 1, 2), float(i))
        ring.put(rows, torch.full((len(rows),), 2), torch.full((len(rows),), 1))
    seen = ring.take()
    assert [float(rows[0, 0]) for rows in seen] == [0.0, 1.0, 2.0, 3.0]
    assert seen[1].tolist() == [[1.0, 1.0, 2.0, 1.0]] * 2
    ring.put(torch.zeros(1, 2), torch.ones(1), torch.zeros(1))
    assert ring.take()[0].tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_the_report_counts_tokens_and_says_so(caplog):
    caplog.set_level("INFO", logger="vllm.deepinfer_specdec")
    report = Report(log_every=1e-9)
    report.planned(scheduled=4, budget=3, stock_budget=4)
    report.verified(np.array([[0.9, 0.9, 2, 1], [0.5, 0.5, 1, 1]], np.float32))  # 3 verified, 2 accepted, 2 bonus
    report.log([1.5, 2.0], priced=7)
    assert (
        "2.00 tokens a verification step; 3 of 4 drafts verified in 1 steps (vLLM's own budgets: 4), 67 %"
        in caplog.text
    )
    assert "temperatures 1.50 2.00; 7 steps priced" in caplog.text
    told = report.as_dict()
    assert (told["budget"], told["vllm_budget"], told["emitted_tokens"]) == (3, 4, 4)
