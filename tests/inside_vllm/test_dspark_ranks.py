"""Two tensor-parallel ranks inside vLLM: prices and temperatures are learned on the first one, and both draft in the same steps.

Two worker processes of vLLM's on a CPU, their collectives over gloo (see `dspark_engine`). Ranks that disagreed would wait for
each other for ever.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

WIDTH, TURNS_AT = 4, 14
DEAR, CHEAP, FLAT = [(1, 50.0), (8, 50.0)], [(1, 0.1), (8, 0.1)], [(1, 10.0), (256, 12.0)]  # milliseconds
A_WHILE = 400  # seconds; it takes a tenth


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the process saw."""
    folder = tmp_path_factory.mktemp("dspark-ranks")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFER", "PYTEST"))}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # the functions that look into the workers
    command = [sys.executable, __file__, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=A_WHILE)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_draft_in_the_same_steps(told):
    """Until then and after a turn of the prices, with corrections by the first rank's clock and refits every few steps."""
    first, second = told["ranks"]
    assert first["ran"] == second["ran"]
    assert not all(first["ran"][:TURNS_AT])
    assert sum(first["ran"]) >= 3
    assert first["published"] > 2


def test_ranks_price_and_scale_alike(told):
    first, second = told["ranks"]
    assert first["prices"] == second["prices"]
    assert first["temperatures"] == second["temperatures"]


def test_no_answer_changes(told):
    assert told["answers"] == told["plain"]


# What follows runs in the process of its own, and in those of the workers.


def watch(worker):
    """Notes from now on in which steps the drafter's block runs."""
    runner, ran = worker.model_runner, []
    manager, worker.ran, worker.published = runner.adaptive_verification, ran, 0
    generate, record, publish = runner.speculator._generate_draft, manager.record_confidences, manager._publish
    now = [False]

    def note(*args, **kwargs):
        now[0] = True
        return generate(*args, **kwargs)

    def step(*args):
        ran.append(now[0])
        now[0] = False
        return record(*args)

    def count():
        worker.published += 1
        return publish()

    runner.speculator._generate_draft, manager.record_confidences, manager._publish = note, step, count


def price(worker, draft, verify):
    """Every rank's manager takes the first one's curves."""
    worker.model_runner.adaptive_verification.set_cost_curves(draft, verify)


def state(worker):
    manager = worker.model_runner.adaptive_verification
    temperatures = manager._temperatures
    return {
        "ran": worker.ran, "published": worker.published,
        "prices": [manager._prices.verify.seconds(n).tolist() for n in (1, 8, 40)],
        "temperatures": None if temperatures is None else temperatures.tolist(),
    }  # fmt: skip


def serve(llm, at=None):
    """Answers; calls `at[step]()` before a step."""
    from vllm import SamplingParams

    engine, answers, step = llm.llm_engine, {}, 0
    for i in range(10):
        params = SamplingParams(temperature=0, max_tokens=16 + 3 * i, ignore_eos=True, detokenize=False)
        engine.add_request(str(i), {"prompt_token_ids": [5 + i, 60, 7, 8 + 9 * i] * 3}, params)
    while engine.has_unfinished_requests():
        if at and step in at:
            at[step]()
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
        step += 1
    return answers


def main(folder):
    from dspark_engine import start  # pyrefly: ignore[missing-import]
    from dspark_models import write_models  # pyrefly: ignore[missing-import]

    write_models(folder, WIDTH)
    llm = start(folder, WIDTH, adapted=False)
    plain = serve(llm)
    llm.llm_engine.engine_core.shutdown()
    llm = start(folder, WIDTH, engine={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
                publish_every=5, refit_every=24, look_share=0.9)  # fmt: skip
    llm.collective_rpc(price, args=(DEAR, FLAT))
    llm.collective_rpc(watch)
    answers = serve(llm, {TURNS_AT: lambda: llm.collective_rpc(price, args=(CHEAP, FLAT))})
    found = {"plain": plain, "answers": answers, "ranks": llm.collective_rpc(state)}
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(found))


if __name__ in ("__main__", "__mp_main__"):
    from dspark_engine import prepare_vllm  # pyrefly: ignore[missing-import]  (beside this file, which is the program here)

    LIBRARY = prepare_vllm()
if __name__ == "__main__":
    main(Path(sys.argv[1]))
