"""Several engines as one: the bookkeeping with a stand-in for Ray that calls at once, and the real Ray where it is."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path

import pytest
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.fleet import RUN, Fleet
from deepinfer_offline.job.options import JobOptions
from deepinfer_offline.job.progress import SilentReporter
from deepinfer_offline.job.run import Job

spec = importlib.util.spec_from_file_location("fake_engine", Path(__file__).parent / "data" / "fake_engine.py")
fake_engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_engine)


class Method:
    def __init__(self, function):
        self.function = function

    def remote(self, *args):
        return Call(self.function, args)


class Call:
    """Runs when its result is asked for."""

    def __init__(self, function, args):
        self.run = lambda: function(*args)


class StandIn:
    """The part of Ray's interface that the fleet uses."""

    exceptions = types.SimpleNamespace(RayError=RuntimeError)

    def __init__(self, **resources):
        self.resources = resources or {"CPU": 8.0}
        self.asked = None
        self.workers = []
        self.killed = []

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return self.resources

    def remote(self, **needs):
        self.asked = needs

        def wrap(cls):
            def make(*args):
                self.workers.append(cls(*args))
                worker = self.workers[-1]
                return types.SimpleNamespace(info=Method(worker.info), work=Method(worker.work), worker=worker)

            return types.SimpleNamespace(remote=make)

        return wrap

    def wait(self, calls, num_returns, timeout):
        return calls[-1:], calls[:-1]

    def get(self, call):
        return call.run()

    def kill(self, actor):
        self.killed.append(actor)


def run(tmp_path, make, count, lines=200):
    asked = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "too special" if n == 5 else f"prompt {n}", "temperature": n % 2},
        }
        for n in range(lines)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    output = tmp_path / f"out-{count}.jsonl"
    Job(JobOptions(str(tmp_path / "in.jsonl"), output, ray=count), make, SilentReporter()).run()
    results = [json.loads(line) for line in output.read_text().splitlines()]
    return [(entry["custom_id"], entry["response"]["body"].get("choices")) for entry in results]


def test_several_engines_answer_what_one_does(tmp_path):
    alone = run(tmp_path, fake_engine.create_engine, 0)
    ray = StandIn()

    def fleet(options):
        return Fleet(options, 3, fake_engine.create_engine, fake_engine.FakeTokenizer(), ray)

    assert run(tmp_path, fleet, 3) == alone
    loads = [len(worker._engine.order) for worker in ray.workers]
    assert sum(loads) == 199, "all but the refused one"
    assert min(loads) >= 2 * RUN
    assert len(ray.killed) == 3
    assert ray.asked == {"num_cpus": 2}


def test_counters_add_up(tmp_path):
    ray = StandIn()
    made = []

    def fleet(options):
        made.append(Fleet(options, 2, fake_engine.create_engine, fake_engine.FakeTokenizer(), ray))
        return made[0]

    run(tmp_path, fleet, 2)
    assert made[0].stats().finished == 199
    assert made[0].info.kv_tokens == 2 << 20


def test_neighbours_stay_together():
    ray = StandIn()
    fleet = Fleet(EngineOptions(), 2, fake_engine.create_engine, None, ray)
    request = fake_engine.Request
    for n in range(4 * RUN):
        fleet.add_request(request(str(n), [1], None))
    queues = [[int(r.request_id) // RUN for r in member.queue] for member in fleet._members]
    assert queues == [[0] * RUN + [2] * RUN, [1] * RUN + [3] * RUN]


def test_a_cluster_that_is_too_small_says_so():
    with pytest.raises(JobError, match=r"--ray 3 with --tensor-parallel 2 needs 6 GPUs; the Ray cluster has 4"):
        Fleet(EngineOptions(tensor_parallel_size=2), 3, fake_engine.create_engine, None, StandIn(GPU=4.0, CPU=8.0))
    with pytest.raises(JobError, match=r"--ray 9 needs 9 CPUs"):
        Fleet(EngineOptions(), 9, fake_engine.create_engine, None, StandIn())


def test_an_engine_that_fails_is_named(tmp_path):
    ray = StandIn()

    def fleet(options):
        made = Fleet(options, 2, fake_engine.create_engine, fake_engine.FakeTokenizer(), ray)
        ray.workers[1]._engine.step = lambda: (_ for _ in ()).throw(RuntimeError("out of memory"))
        return made

    with pytest.raises(JobError, match="engine 2 of --ray failed: out of memory"):
        run(tmp_path, fleet, 2)


@pytest.mark.slow
def test_on_ray_itself(tmp_path):
    ray = pytest.importorskip("ray")
    alone = run(tmp_path, fake_engine.create_engine, 0)
    make = fake_engine.create_engine
    try:
        results = run(tmp_path, lambda options: Fleet(options, 2, make, fake_engine.FakeTokenizer(), ray), 2)
    finally:
        ray.shutdown()
    assert results == alone
