"""What the engine does for an accelerator, as far as a CPU can show it: buckets, copies, who runs a call and when."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.native import runner
from deepinfer_offline.engine.native.graphs import row_buckets
from deepinfer_offline.engine.native.memory import available_bytes
from deepinfer_offline.engine.native.prompt_graphs import PromptBuckets, token_buckets
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.engine.native.worker import DeviceWorker
from deepinfer_offline.models.deepsig_v41.aside import Aside
from deepinfer_offline.ops.transfers import Download, StepClock, upload, upload_into
from hypothesis import given
from hypothesis import strategies as st
from toy_drafts import WIDTH, check_all, count_steps, make_drafting_engine, random_job


@given(st.integers(1, 4096))
def test_buckets_hold_every_batch_and_waste_little(most: int) -> None:
    sizes = row_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1, max(1, most // 50)):
        size = next(size for size in sizes if size >= rows)
        assert size <= 2 * rows, f"{rows} rows run as {size}"
        assert rows < 24 or size < 1.5 * rows + 1, f"{rows} rows run as {size}"


@given(st.integers(1, 200_000))
def test_token_buckets_hold_every_step_and_waste_little(most: int) -> None:
    sizes = token_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for before, size in pairwise(sizes):
        assert size <= before * 9 / 8


@given(st.integers(1, 1100), st.data())
def test_a_step_with_prompts_fits_its_bucket(running: int, data: st.DataObject) -> None:
    step_tokens = data.draw(st.integers(max(running, 64), 20_000))
    prompts = data.draw(st.integers(1, running))
    decodes = data.draw(st.integers(0, running - prompts))
    tokens = data.draw(st.integers(min(decodes + 2 * prompts, step_tokens), step_tokens))
    rows = decodes + prompts
    starts = np.array([*range(decodes + 1), *[tokens] * prompts], np.int32)
    host: Any = SimpleNamespace(query_starts=starts, num_rows=rows, num_decodes=decodes)
    bucket = PromptBuckets(running, step_tokens).find(host)
    if bucket is None:
        assert decodes + 16 > step_tokens / 2 or prompts > step_tokens / 128, "a step that fits is not captured"
        return
    assert tokens <= bucket.tokens <= step_tokens
    assert decodes <= bucket.decodes <= running
    assert prompts <= bucket.prompts <= running
    # Hidden states of as many tokens as there are rows would be taken for all tokens; long rows must stay long beside short ones.
    assert bucket.tokens > bucket.rows
    assert bucket.tokens - bucket.decodes > 8


@given(st.lists(st.sampled_from(["int32", "int64", "float32", "float64", "bool", "uint8"]), min_size=1, max_size=6))
def test_uploaded_arrays_are_the_arrays(dtypes: list[str]) -> None:
    arrays = [(np.arange(3 * n).reshape(n, 3) % 2).astype(dtype) for n, dtype in enumerate(dtypes)]
    for array, tensor in zip(arrays, upload(arrays, "cpu"), strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert np.array_equal(tensor.numpy(), array)


def test_a_strided_array_is_uploaded_in_its_own_order() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    (tensor,) = upload([table[:, ::2]], "cpu")
    assert tensor.tolist() == [[0, 2], [4, 6], [8, 10]]


def test_arrays_are_brought_in_one_piece_and_only_where_there_is_room() -> None:
    target = torch.full((7,), -1, dtype=torch.int32)
    upload_into(target, [np.array([3], np.int64), np.arange(4, dtype=np.int32).reshape(2, 2)[:, ::-1]])
    assert target.tolist() == [3, 1, 0, 3, 2, -1, -1]
    with pytest.raises(ValueError, match="8 elements do not fit a tensor of 7"):
        upload_into(target, [np.zeros(8, np.int32)])
    assert target.tolist() == [3, 1, 0, 3, 2, -1, -1]


def test_downloads_and_clocks_on_a_cpu_are_immediate() -> None:
    clock = StepClock("cpu")
    assert [t.tolist() for t in Download([torch.tensor([3, 4])]).wait()] == [[3, 4]]
    assert Download([]).wait() == []
    clock.stop()
    assert 0 <= clock.seconds() < 10


class Stream:
    """Stands for a CUDA stream: events are numbered as they are recorded, and the device has come to `reached`."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0

    def event(self, enable_timing: bool = False) -> Any:
        found = SimpleNamespace(at=0, timed=enable_timing)
        found.record = lambda: setattr(found, "at", self.record())
        found.query = lambda: self.reached >= found.at
        found.synchronize = lambda: setattr(self, "reached", max(self.reached, found.at))
        found.elapsed_time = lambda end: (end.at - found.at) * 1e3
        return found

    def record(self) -> int:
        self.recorded += 1
        return self.recorded


def test_a_step_behind_a_running_one_begins_where_that_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr("torch.cuda.Event", stream.event)
    first = StepClock("cuda:0")
    first.stop()
    second = StepClock("cuda:0", first)
    second.stop()
    assert stream.recorded == 3
    assert (first.seconds(), second.seconds()) == (1, 1)
    assert stream.reached == 3, "seconds were read of a step that had not ended"
    third = StepClock("cuda:0", second)  # the device has waited for it meanwhile
    third.stop()
    assert stream.recorded == 5
    assert third.seconds() == 1


def test_clocks_follow_each_other_whoever_runs_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that draft ahead and steps that a grammar keeps from it, in one stream."""
    clocks: list[StepClock] = []
    before: list[StepClock | None] = []

    class Clock(StepClock):
        def __init__(self, device: str, after: StepClock | None = None) -> None:
            super().__init__(device, after)
            clocks.append(self)
            before.append(after)

    monkeypatch.setattr(runner, "StepClock", Clock)
    engine = make_drafting_engine()
    speculation: Any = engine._parts.speculation
    speculation.force(WIDTH)
    steps = count_steps(engine)
    check_all(engine, random_job(random.Random(1), grammars=1.0))
    assert min(steps["ahead"], steps["plain"] + steps["host"]) > 2
    assert len(clocks) == steps["ahead"] + steps["plain"] + steps["host"]
    assert before == [None, *clocks[:-1]]
    assert all(clock.seconds() > 0 for clock in clocks), "a clock was not stopped"


def test_the_scratch_place_belongs_to_no_sequence() -> None:
    buffer = TokenBuffer(2, 4, "cpu")
    buffer.scatter(torch.tensor([buffer.scratch]), torch.tensor([9]))
    assert buffer.data.tolist() == [[0] * 4] * 2
    assert buffer.gather(torch.tensor([buffer.scratch])).tolist() == [9]
    buffer.write(1, 3, [5])
    assert buffer.flat.tolist() == [0] * 7 + [5, 9]


def test_calls_that_only_enqueue_run_in_the_callers_thread() -> None:
    worker = DeviceWorker()
    assert worker.submit(threading.get_ident).result() == threading.get_ident()
    assert worker.submit(threading.get_ident, waits=True).result() != threading.get_ident()
    assert worker.submit(torch.is_inference_mode_enabled).result()
    worker.close()
    worker.close()


def test_calls_keep_their_order_behind_one_that_waits() -> None:
    worker, gate, seen = DeviceWorker(), threading.Event(), []

    def wait() -> None:
        assert gate.wait(10)
        seen.append("waited")

    first = worker.submit(wait, waits=True)
    later = [worker.submit(lambda n=n: seen.append(n)) for n in range(3)]
    assert seen == [], "a later call overtook one that waits"
    gate.set()
    for future in (first, *later):
        future.result(10)
    assert seen == ["waited", 0, 1, 2]
    assert worker.submit(threading.get_ident).result() == threading.get_ident(), "it caught up"
    worker.close()


def test_what_a_call_raises_comes_with_its_result() -> None:
    worker = DeviceWorker()
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result()
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0, waits=True).result()
    worker.close()


def test_an_interrupt_in_the_callers_thread_is_raised_there_and_once() -> None:
    """Kept in the result it would be raised again by every call that takes the step."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    worker = DeviceWorker()
    with pytest.raises(KeyboardInterrupt):
        worker.submit(interrupted)
    assert worker.submit(threading.get_ident).result() == threading.get_ident()
    worker.close()


class Streams:
    """Stands for `torch.cuda`: which stream waited for which, and where calls ran."""

    def __init__(self) -> None:
        self.main, self.log, self.made = self.Stream(self, "main"), [], 0
        self.now = self.main

    class Stream:
        def __init__(self, owner: Streams, name: str) -> None:
            self.owner, self.name = owner, name

        def wait_stream(self, other: Streams.Stream) -> None:
            self.owner.log.append(f"{self.name} waits for {other.name}")

    def __call__(self, _device: object) -> Streams.Stream:
        self.made += 1
        return self.Stream(self, f"side{self.made}")

    @contextlib.contextmanager
    def enter(self, stream: Streams.Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def work(self, name: str) -> None:
        self.log.append(f"{name} on {self.now.name}")


def test_a_branch_waits_for_what_was_before_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr("torch.cuda.Stream", streams)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _device: streams.now)
    monkeypatch.setattr("torch.cuda.stream", streams.enter)
    aside = Aside(torch.device("cuda"))
    for rows in (64, 1000):
        with aside.fork(rows):
            streams.work(f"branch {rows}")
        streams.work(f"trunk {rows}")
        aside.join()
        aside.join()
    assert streams.log == [
        "side1 waits for main", "branch 64 on side1", "trunk 64 on main", "main waits for side1",
        "branch 1000 on main", "trunk 1000 on main",
    ]  # fmt: skip
    with aside.fork(1):
        pass  # the step fails before it joins
    with aside.fork(1):
        streams.work("next")
    assert streams.log[-4:] == ["side1 waits for main", "main waits for side1", "side1 waits for main", "next on side1"]
    assert not Aside(torch.device("cpu")).enabled


def test_memory_that_torch_keeps_of_an_engine_before_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"gone": 70, "alive": 20}
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: held.pop("gone"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (100 - sum(held.values()), 100))
    assert available_bytes("cuda:0") == 80
