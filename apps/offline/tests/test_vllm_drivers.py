"""Driving several copies of a model: neighbours stay together, refusals come back, a dead engine is an error."""

import asyncio
from types import SimpleNamespace

import pytest
from deepinfer_offline.engine.vllm import drivers


class FakeEngine:
    """vLLM's asynchronous engine as far as the driver uses it: answers come in two parts, when they are let go."""

    def __init__(self, copies):
        self.vllm_config = SimpleNamespace(copies=copies)
        self.errored = False
        self.copy_of, self.aborted, self.closed = {}, [], False
        self.gate = asyncio.Event()

    async def generate(self, prompt, params, request_id, *, priority, data_parallel_rank):
        self.copy_of[request_id] = data_parallel_rank
        if params == "bad":
            raise ValueError("no such parameter")
        if params == "slow":
            await self.gate.wait()
        if params == "deadly":
            self.errored = True
            raise RuntimeError("the engine died")
        for finished in (False, True):
            yield SimpleNamespace(request_id=request_id, finished=finished, prompt=prompt)

    async def abort(self, request_id):
        self.aborted.append(request_id)

    def shutdown(self):
        self.closed = True


@pytest.fixture
def driver(monkeypatch):
    async def open_fake(arguments):
        return FakeEngine(arguments["data_parallel_size"])

    monkeypatch.setattr(drivers, "_open", open_fake)
    driver = drivers.ParallelDriver({"data_parallel_size": 2})
    yield driver
    driver.close()


def collect(driver, count):
    found = []
    while len(found) < count:
        found += driver.step()
    return found


def test_finished_outputs_come_back_once(driver):
    assert driver.config.copies == 2
    for name in "abc":
        driver.add(name, [1], "fine", 0)
    assert sorted(output.request_id for output in collect(driver, 3)) == ["a", "b", "c"]
    assert all(output.finished for output in collect(driver, 0))


def test_neighbours_go_to_one_copy_and_runs_to_the_one_with_least_to_do(driver):
    names = [f"r{i}" for i in range(3 * drivers.RUN)]
    for name in names:
        driver.add(name, [1], "slow", 0)
    driver._loop.call_soon_threadsafe(driver._engine.gate.set)
    collect(driver, len(names))
    copies = [driver._engine.copy_of[name] for name in names]
    assert copies == [0] * drivers.RUN + [1] * drivers.RUN + [0] * drivers.RUN
    assert driver._load == [0, 0]


def test_a_refusal_belongs_to_its_request(driver):
    driver.add("good", [1], "fine", 0)
    driver.add("bad", [1], "bad", 0)
    found = collect(driver, 2)
    refused = [each for each in found if isinstance(each, drivers.Refused)]
    assert [(each.request_id, str(each.error)) for each in refused] == [("bad", "no such parameter")]
    assert driver._load == [0, 0]


def test_a_dead_engine_is_an_error_of_the_job(driver):
    driver.add("last", [1], "deadly", 0)
    with pytest.raises(RuntimeError, match="the engine died"):
        collect(driver, 1)


def test_an_aborted_request_leaves_its_copy(driver):
    driver.add("a", [1], "slow", 0)
    driver.abort("a")
    assert driver._load == [0, 0]
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), driver._loop).result()
    assert driver._engine.aborted == ["a"]


def test_closing_stops_the_engine_and_what_still_runs(driver):
    driver.add("a", [1], "slow", 0)
    task = driver._tasks["a"]
    driver.close()
    assert driver._engine.closed
    assert task.cancelled()
    assert not driver._thread.is_alive()
    driver.close()  # twice is once
