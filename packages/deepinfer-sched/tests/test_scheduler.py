"""Scheduling decisions, one at a time. Correctness under random jobs is test_scheduler_machine's."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from deepinfer_sched import SchedConfig, SchedConfigError, SchedError, Scheduler, Sequence, SequenceError, Status

deepinfer_cache = pytest.importorskip("deepinfer_cache")
PAGE = 4


def make(pages=64, running=4, budget=16, longest=64, eviction="lru", strategy="bounded", window=0, **options):
    groups = [deepinfer_cache.CacheGroup("kv", "prefix", PAGE)]
    if window:
        groups.append(deepinfer_cache.CacheGroup("swa", "window", 2, window=window))
    cache = deepinfer_cache.CacheManager(
        deepinfer_cache.CacheConfig(
            tuple(groups), pages, running, longest, max_tokens_per_step=budget, eviction=eviction, strategy=strategy
        )
    )
    return Scheduler(SchedConfig(running, budget, longest, cascade_min_tokens=PAGE, **options), cache)


def finish(scheduler, plan, token=9, stops=None):
    """Apply a plan whose rows all sample `token`."""
    return scheduler.apply(plan, np.full((plan.num_rows, 1), token), plan.samples.astype(int), stops)


def drain(scheduler):
    """Run to the end synchronously; the plans."""
    plans = []
    while scheduler.has_unfinished:
        plans.append(scheduler.plan())
        finish(scheduler, plans[-1])
    return plans


def prompt(length, first=0):
    return list(range(first, first + length))


def test_a_prompt_is_cut_to_the_token_budget():
    scheduler = make(budget=8)
    scheduler.add(Sequence(0, prompt(20), 3))
    plans = drain(scheduler)
    assert [plan.counts.tolist() for plan in plans] == [[8], [8], [4], [1], [1]]
    assert [plan.starts.tolist() for plan in plans] == [[0], [8], [16], [20], [21]]
    assert [plan.samples.tolist() for plan in plans] == [[False], [False], [True], [True], [True]]
    assert [plan.prefills.tolist() for plan in plans] == [[True], [True], [True], [False], [False]]


def test_decode_rows_come_first_and_prompts_take_what_is_left():
    scheduler = make(budget=8)
    scheduler.add(Sequence(0, prompt(4), 9))
    finish(scheduler, scheduler.plan())
    scheduler.add(Sequence(1, prompt(20, 100), 3))
    plan = scheduler.plan()
    assert plan.seq_ids.tolist() == [0, 1]
    assert plan.counts.tolist() == [1, 7]
    assert plan.num_decodes == 1
    assert plan.admitted == (1,)


def test_the_last_token_costs_no_wasted_row():
    scheduler = make()
    scheduler.add(Sequence(0, prompt(4), 2))
    first = scheduler.plan()
    second = scheduler.plan()  # one step ahead: its input is a placeholder
    assert (second.starts.tolist(), second.counts.tolist()) == ([4], [1])
    assert scheduler.plan() is None  # the second token is the last one, and it is in flight
    finish(scheduler, first)
    assert scheduler.plan() is None
    (seq,) = finish(scheduler, second)
    assert seq.output_tokens == [9, 9]
    assert not scheduler.has_unfinished


def test_a_late_stop_drops_the_row_in_flight_and_fences_its_blocks_and_slot():
    scheduler = make(running=1)
    scheduler.add(Sequence(0, prompt(4), 9))
    scheduler.add(Sequence(1, prompt(4, 100), 1))
    first, second = scheduler.plan(), scheduler.plan()
    (seq,) = finish(scheduler, first, stops=np.array([True]))
    assert seq.output_tokens == [9]
    assert scheduler.plan() is None  # the only slot still has a row in flight
    assert finish(scheduler, second, token=8) == []
    assert seq.output_tokens == [9]
    third = scheduler.plan()
    assert third.seq_ids.tolist() == [1]
    assert third.finished == (0,)


def test_sequences_with_the_same_prompt_compute_it_once_in_the_same_step():
    scheduler = make(budget=32)
    for number in range(3):
        scheduler.add(Sequence(number, prompt(18), 2))
    plan = scheduler.plan()
    assert plan.starts.tolist() == [0, 16, 16]
    assert plan.counts.tolist() == [18, 2, 2]
    assert plan.write_floors.tolist() == [0, 16, 16]
    finish(scheduler, plan)
    (cascade,) = scheduler.plan().cascades
    assert (cascade.rows.tolist(), cascade.blocks, cascade.tokens) == ([0, 1, 2], 4, 16)


def test_sharing_within_a_step_can_be_switched_off():
    scheduler = make(budget=32, share_in_step=False)
    for number in range(2):
        scheduler.add(Sequence(number, prompt(18), 2))
    first = scheduler.plan()
    assert first.seq_ids.tolist() == [0]  # the other one waits for the prefix instead of computing it again
    assert scheduler.plan().starts.tolist() == [18, 16]


def test_a_sequence_that_waits_for_a_prefix_does_not_hold_back_others():
    scheduler = make(budget=32, share_in_step=False)
    scheduler.add(Sequence(0, prompt(20), 1))
    scheduler.add(Sequence(1, prompt(20), 1))
    scheduler.add(Sequence(2, [7], 1))
    assert scheduler.plan().seq_ids.tolist() == [0, 2]
    assert scheduler.plan().seq_ids.tolist() == [1]


def test_salts_separate():
    scheduler = make(budget=64)
    scheduler.add(Sequence(0, prompt(16), 1, salt=b"a"))
    scheduler.add(Sequence(1, prompt(16), 1, salt=b"b"))
    assert scheduler.plan().starts.tolist() == [0, 0]


def test_memory_runs_out_and_the_last_comer_is_preempted_and_comes_back():
    scheduler = make(pages=6, running=2, reserve_pages=0)
    scheduler.add(Sequence(0, prompt(10), 9))
    scheduler.add(Sequence(1, prompt(10, 100), 9))
    plans = drain(scheduler)
    assert sum(len(plan.preempted) for plan in plans) == 1
    assert next(plan for plan in plans if plan.preempted).preempted == (1,)
    assert [plan.admitted for plan in plans if plan.admitted] == [(0, 1), (1,)]
    again = next(plan for plan in plans[1:] if plan.admitted)
    assert again.prefills.any()
    assert scheduler.cache.stats().used_pages == 0


def test_a_preempted_sequence_keeps_the_token_that_was_in_flight():
    scheduler = make()
    seq = Sequence(0, prompt(5), 4)
    scheduler.add(seq)
    finish(scheduler, scheduler.plan())
    second = scheduler.plan()
    scheduler.preempt(0)
    assert scheduler.plan() is None  # not before its token is known
    finish(scheduler, second, token=7)
    assert seq.output_tokens == [9, 7]
    again = scheduler.plan()
    assert again.preempted == (0,)
    assert int(again.starts[0] + again.counts[0]) == 7


def test_lower_numbers_run_first_and_are_preempted_last():
    scheduler = make(running=1)
    for number, priority in enumerate([5, 0, 5, 1]):
        scheduler.add(Sequence(number, [number + 1], 1, priority=priority))
    assert [plan.seq_ids.tolist() for plan in drain(scheduler)] == [[1], [3], [0], [2]]


def test_nobody_waits_for_ever():
    scheduler = make(running=1, max_wait_steps=6)
    scheduler.add(Sequence(0, [1], 1, priority=9))
    waited = 0
    for number in range(1, 50):
        scheduler.add(Sequence(number, [2], 1))  # always somebody with a better priority
        plan = scheduler.plan()
        finish(scheduler, plan)
        if 0 in plan.seq_ids:
            break
        waited += 1
    assert waited <= 8


def test_a_preempted_sequence_is_not_passed_by_those_who_waited_behind_it():
    scheduler = make(pages=64, running=1, max_wait_steps=3)
    for number in range(4):
        scheduler.add(Sequence(number, [number + 1], 12))
    for _ in range(8):
        finish(scheduler, scheduler.plan())
    scheduler.preempt(0)
    assert scheduler.plan().seq_ids.tolist() == [0]


def test_without_a_bound_priorities_are_absolute():
    scheduler = make(running=1, max_wait_steps=0)
    scheduler.add(Sequence(0, [1], 1, priority=9))
    for number in range(1, 50):
        scheduler.add(Sequence(number, [2], 1))
        plan = scheduler.plan()
        assert 0 not in plan.seq_ids
        finish(scheduler, plan)


def test_drafts_are_verified_and_rejected_ones_taken_back():
    scheduler = make()
    seq = Sequence(0, prompt(4), 9)
    scheduler.add(seq)
    finish(scheduler, scheduler.plan())
    scheduler.propose(0, 3)
    plan = scheduler.plan()
    assert (plan.counts.tolist(), plan.drafts.tolist(), plan.starts.tolist()) == ([4], [3], [4])
    assert scheduler.plan() is None  # nobody knows where the next row starts
    scheduler.apply(plan, np.array([[5, 6, 0, 0]]), np.array([2]))
    assert seq.output_tokens == [9, 5, 6]
    following = scheduler.plan()
    assert (following.starts.tolist(), following.counts.tolist()) == ([6], [1])


def test_drafts_never_go_past_the_last_token():
    scheduler = make()
    scheduler.add(Sequence(0, prompt(4), 3))
    finish(scheduler, scheduler.plan())
    scheduler.propose(0, 7)
    assert scheduler.plan().drafts.tolist() == [1]  # two tokens are left: one draft and the one after it


def test_drafts_of_many_rows_are_proposed_at_once():
    scheduler = make()
    for number in range(2):
        scheduler.add(Sequence(number, prompt(4, 100 * number), 9))
    finish(scheduler, scheduler.plan())
    slots = np.array([scheduler.sequence(number).slot for number in range(2)])
    scheduler.propose_rows(slots, np.array([3, 1]))
    plan = scheduler.plan()
    assert dict(zip(plan.seq_ids.tolist(), plan.drafts.tolist(), strict=True)) == {0: 3, 1: 1}
    free = np.flatnonzero(scheduler.state.seq_ids < 0)[:1]
    for where, drafts in ((free, [1]), (slots, [1, -1])):
        with pytest.raises(SchedError, match="allowed"):
            scheduler.propose_rows(where, np.array(drafts))


def test_drafts_leave_room_for_prompts():
    scheduler = make(budget=12, prompt_share=0.5)
    scheduler.add(Sequence(0, prompt(4), 20))
    finish(scheduler, scheduler.plan())
    scheduler.add(Sequence(1, prompt(20, 100), 2))
    scheduler.propose(0, 11)
    plan = scheduler.plan()
    assert plan.counts.tolist() == [7, 5]  # one token, then half of the other eleven for drafts


def test_constrained_rows_wait_for_their_token_when_asked_to():
    for ahead, rows in ((True, 1), (False, None)):
        scheduler = make(constrained_ahead=ahead)
        scheduler.add(Sequence(0, prompt(4), 5, constrained=True))
        assert scheduler.plan().constrained.tolist() == [True]
        second = scheduler.plan()
        assert (second.num_rows if second is not None else None) == rows


def test_prompts_with_logprobs_are_computed_completely():
    scheduler = make(budget=64)
    scheduler.add(Sequence(0, prompt(16), 1))
    scheduler.add(Sequence(1, prompt(16), 1, read_cache=False))
    assert scheduler.plan().starts.tolist() == [0, 0]


def test_windows_are_replayed_and_decode_rows_have_no_floor():
    scheduler = make(window=6, budget=64, longest=64)
    scheduler.add(Sequence(0, prompt(24), 1))
    finish(scheduler, scheduler.plan())
    scheduler.add(Sequence(1, [*prompt(24), 50, 51], 2))
    plan = scheduler.plan()
    assert (plan.starts.tolist(), plan.floors.tolist(), plan.write_floors.tolist()) == ([18], [18], [24])
    finish(scheduler, plan)
    assert scheduler.plan().floors.tolist() == [0]


def test_next_use_keeps_what_a_waiting_sequence_will_need():
    """Two prefixes fit, a third comes between: LRU drops the one that is needed next, next-use the one that is not."""
    hits = {}
    for eviction in ("lru", "next-use"):
        scheduler = make(pages=9, running=1, budget=32, eviction=eviction)
        seqs = [Sequence(number, [*prompt(16, base), 7], 1) for number, base in enumerate([0, 100, 200, 0])]
        for seq in seqs:
            scheduler.add(seq)
        drain(scheduler)
        hits[eviction] = seqs[3].cached_tokens
    assert hits == {"lru": 0, "next-use": 16}


def test_abort_at_any_time():
    scheduler = make()
    for number in range(3):
        scheduler.add(Sequence(number, prompt(4, 10 * number), 9))
    scheduler.abort(2)  # waiting
    first = scheduler.plan()
    scheduler.abort(0)  # in flight
    scheduler.abort(0)
    scheduler.abort(77)
    finish(scheduler, first)
    assert scheduler.num_running == 1
    drain(scheduler)
    assert scheduler.cache.stats().used_pages == 0


def test_results_must_come_in_order():
    scheduler = make()
    scheduler.add(Sequence(0, prompt(4), 5))
    scheduler.plan()
    second = scheduler.plan()
    with pytest.raises(SchedError, match="oldest step in flight is 1"):
        finish(scheduler, second)


@pytest.mark.parametrize(
    ("seq", "says"),
    [
        (Sequence(1, [], 1), "at least 1"),
        (Sequence(1, [1], 0), "at least 1"),
        (Sequence(1, prompt(64), 1), "leaves no room"),
        (Sequence(1, prompt(30), 20), "do not fit the cache of 40 tokens"),
        (Sequence(0, [1], 1), "already known"),
    ],
)
def test_sequences_that_can_never_run_are_refused(seq, says):
    scheduler = make(pages=10)
    scheduler.add(Sequence(0, [1], 1))
    with pytest.raises(SequenceError, match=says):
        scheduler.add(seq)
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(
    "wrong",
    [{"max_running": 0}, {"max_tokens_per_step": 3}, {"lookahead": -1}, {"prompt_share": 1.5}, {"max_in_flight": 0}],
)
def test_impossible_limits_are_named(wrong):
    with pytest.raises(SchedConfigError, match=next(iter(wrong))):
        SchedConfig(**{"max_running": 4, **wrong})


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_planned_job_reaches_its_bound_with_memory_for_three_groups(ahead):
    """12 groups of 8 requests, 40 shared and 8 own tokens, as the engine would run them."""
    from deepinfer_sched import plan_job

    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 1000, 40).tolist() for _ in range(12)]
    requests = [shared[i % 12] + rng.integers(0, 1000, 8).tolist() for i in range(96)]
    plan = plan_job(requests, block_size=PAGE)
    rates = {}
    for name, order in (("planned", plan.order.tolist()), ("input", range(96))):
        scheduler = make(pages=3 * (40 + 8 * 12) // PAGE, running=16, budget=64, max_in_flight=ahead)
        seqs = [Sequence(i, list(requests[i]), 4) for i in order]
        for seq in seqs:
            scheduler.add(seq)
        flights = deque()
        while scheduler.has_unfinished:
            step = scheduler.plan()
            if step is not None:
                flights.append(step)
            if step is None or len(flights) == ahead:
                finish(scheduler, flights.popleft())
        assert all(seq.status is Status.FINISHED for seq in seqs)
        rates[name] = sum(seq.cached_tokens for seq in seqs) / (96 * 48)
    assert rates["planned"] >= plan.bound - 0.01
    assert rates["input"] < plan.bound - 0.2
