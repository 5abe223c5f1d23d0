"""deepinfer-specdec in vLLM's adaptive verification: a DSpark draft in stock vLLM's model runner, on a CPU.

vLLM runs DSpark in its second model runner only, whose kernels are Triton. Triton's interpreter runs them on a CPU, but it
has to be chosen before vLLM is imported, so this file starts itself as a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.vllm

WIDTH, REQUESTS = 4, 6
DRAFTING = 0.1  # milliseconds: low, as the interpreter's own time is too uneven to be taken off a step's
DIP = [(8, 10.0), (16, 50.0), (24, 12.0), (32, 1e6)]  # (tokens, milliseconds): 24 tokens are cheaper than 16
SIZES = [1, 2, 4, 8, 16, 32]  # stands for the sizes of captured graphs, of which a CPU has none


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the process saw, by phase."""
    folder = tmp_path_factory.mktemp("dspark")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFER", "PYTEST"))}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    found["log"] = done.stdout
    return found


def test_drafts_are_accepted_and_never_change_a_token(told):
    assert told["learning"]["tokens"] == told["plain"]["tokens"]
    assert told["dip"]["tokens"] == told["plain"]["tokens"]
    report = told["learning"]["report"]
    assert 1.2 < report["accepted_length"] <= WIDTH + 1


def test_the_curve_is_the_machines_own_profile_bucket_by_bucket(told):
    profile, priced = told["learning"]["profile"], told["learning"]["priced"]
    medians = [profile[str(size)] for size in SIZES]
    assert priced[1:] == pytest.approx([medians[np.searchsorted(SIZES, n)] for n in range(1, SIZES[-1] + 1)])
    stock = told["learning"]["stock_table"]
    assert stock == pytest.approx(np.maximum.accumulate(priced))  # what vLLM makes of the same profile


def test_real_steps_correct_the_curve(told):
    """A real step also samples and pays the gap, in interpreted kernels many times the forward pass that is profiled."""
    learning = told["learning"]
    assert learning["report"]["priced_steps"] > 10
    buckets = [bucket for bucket, _ in learning["laps"]]
    visited = max(set(buckets), key=buckets.count)
    took = np.median([ms for bucket, ms in learning["laps"] if bucket == visited])
    assert learning["refreshed"][visited] == pytest.approx(took, rel=1e-4)
    assert learning["refreshed"][visited] > 2 * learning["priced"][visited]


def test_what_we_count_is_what_vllm_decided(told):
    for phase in ("learning", "dip"):
        report, counted = told[phase]["report"], told[phase]["counted"]
        assert report["verified_tokens"] == counted["verified"] == report["budget"] <= report["scheduled_drafts"]
        assert report["accepted_tokens"] == counted["accepted"]
        # vLLM runs a step ahead: what a request that has ended sampled there is dropped by the scheduler.
        assert 0 <= report["scheduled_drafts"] - counted["scheduled"] <= REQUESTS * WIDTH
        assert 0 <= report["accepted_tokens"] - counted["kept"] <= REQUESTS * WIDTH


def test_temperatures_are_learned_saved_and_used(told):
    learned, dip = told["learning"]["report"]["temperatures"], told["dip"]
    assert any(abs(t - 1.0) > 0.05 for t in learned)
    assert learned == pytest.approx(told["saved"], abs=1e-4)  # rounded in the report
    raw = np.array(dip["raw"], dtype=np.float64)
    logits = np.log(raw) - np.log1p(-raw)
    assert np.array(dip["ranked_by"]) == pytest.approx(1 / (1 + np.exp(-logits / told["saved"])), abs=1e-5)
    assert not np.allclose(raw, dip["ranked_by"], atol=1e-3)


def test_the_budget_is_ours_and_goes_where_the_machine_is_cheap(told):
    """Six requests and 18 drafts fill the cheap size of 24; vLLM's monotone table prices it like 16 and stays at 8."""
    report = told["dip"]["report"]
    assert report["budget"] > 3 * report["vllm_budget"] > 0
    assert report["budget"] <= 18 * report["steps"]


def test_budgets_are_made_from_survivals_two_steps_old(told):
    """Every forecast is that of the drafter's confidences, scaled and multiplied here; 1e-4 is float32, over up to 24 drafts."""
    forecasts = told["dip"]["forecasts"]
    assert forecasts["from_blocks"] > 30
    assert forecasts["worst"] < 1e-4


def test_a_rank_that_does_not_lead_takes_what_the_first_one_says(told):
    assert told["follower"] == {"tokens_of_5_cost": 3.0, "temperatures": [1.5, 1.25, 2.0, 1.0]}


def test_the_log_says_what_is_going_on(told):
    assert "Adaptive verification is planned by deepinfer-specdec." in told["log"]
    assert "DeepInfer prices" in told["log"]
    assert "tokens a verification step" in told["log"]
    assert re.search(r"drafts made in (\d+) of \1 steps \(0 pauses\)", told["log"])


def test_vllm_is_as_it_was_after_the_engine(told):
    assert told["manager_while_running"].startswith("deepinfer_specdec.")
    assert told["names_afterwards"] == [["vllm.v1.worker.gpu.spec_decode.adaptive_verification"] * 2] * 3


def test_a_vllm_that_lacks_a_name_is_refused_with_that_name(told):
    assert told["refusal"].startswith(
        "deepinfer-specdec finds no AdaptiveVerificationManager.gone(argument) in this vLLM 0.33"
    )


# What follows runs in the process of its own.


def profile(runner):
    """vLLM's own start-up profile, which its capture of graphs would run; by the host's clock."""
    import time

    from vllm.v1.worker.gpu.async_utils import StepTimingSample

    manager, samples = runner.adaptive_verification, []
    forward, spent = runner.execute_model, [0.0]

    def timed(*args, **kwargs):
        begin = time.perf_counter()
        forward(*args, **kwargs)
        spent[0] = (time.perf_counter() - begin) * 1e3

    runner.execute_model = timed
    for batch in manager.batches_to_profile(SIZES):
        if batch["num_tokens"] <= 4 * SIZES[-1]:  # a longer tail would only take time
            runner._dummy_run(**batch | {"context_len": 16})
            requests = min(batch["num_tokens"], runner.max_num_reqs)
            samples.append(StepTimingSample(spent[0], DRAFTING, batch["num_tokens"], requests, True))
    runner.execute_model = forward
    manager.set_initial_cost_curves(samples)
    return {
        size: float(np.median([s.forward_ms for s in samples if s.num_target_tokens == size]))
        for size in {s.num_target_tokens for s in samples}
    }


def answer(llm):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5 + i, 60, 7, 8 + 9 * i] * 3} for i in range(REQUESTS)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def count_drafts(llm):
    """What vLLM itself says from now on: its rejection sampler's verdicts, and what its scheduler makes of them."""
    from dspark_engine import core_of, runner_of  # pyrefly: ignore[missing-import]

    scheduler, speculator = core_of(llm).scheduler, runner_of(llm).speculator
    stats, observe = scheduler.make_spec_decoding_stats, speculator.observe_verification
    counted = {"scheduled": 0, "kept": 0, "verified": 0, "accepted": 0}

    def count(*args, **kwargs):
        counted["scheduled"] += kwargs["num_draft_tokens"]
        counted["kept"] += kwargs["num_accepted_tokens"]
        return stats(*args, **kwargs)

    def judge(idx_mapping, num_sampled, num_rejected):
        accepted = int((num_sampled - 1).clamp_min(0).sum())
        counted["accepted"] += accepted
        counted["verified"] += accepted + int(num_rejected.sum())
        return observe(idx_mapping, num_sampled, num_rejected)

    scheduler.make_spec_decoding_stats, speculator.observe_verification = count, judge
    return counted


def names():
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as module

    ranking = module._assign_draft_token_budget_compiled
    return [module.AdaptiveVerificationManager.__module__, getattr(ranking, "__wrapped__", ranking).__module__]


def refusal():
    """What the adapter says where a method it counts on is gone."""
    from deepinfer_specdec.adapters.vllm import compat

    compat.METHODS["gone"] = ("argument",)
    try:
        compat.require_seam()
    except ImportError as error:
        return str(error)
    finally:
        del compat.METHODS["gone"]


class Follower:
    """A tensor-parallel group as one of its other ranks sees it."""

    rank_in_group = 1

    def broadcast_object(self, own, src):
        assert src == 0
        return [(1, 2.0)], [(8, 3.0)], [1.5, 1.25, 2.0, 1.0]


def follow(manager):
    from deepinfer_specdec.adapters.vllm import verification

    group, verification.get_tp_group = verification.get_tp_group, Follower
    manager._publish()
    verification.get_tp_group = group
    prices = manager._prices.verify.seconds(5)
    return {"tokens_of_5_cost": float(prices), "temperatures": manager._temperatures.tolist()}


def watch_forecasts(manager):
    """Compares from now on what budgets are made from with what the drafter gave until two steps before."""
    temperatures, first, given = np.array(manager._calibrator.temperatures), manager._step, []
    seen = {"from_blocks": 0, "worst": 0.0}
    record, planner = manager.record_confidences, manager._planner
    budget = planner.budget

    def note(confidences, batch):
        raw = np.clip(confidences[: batch.num_reqs].double().numpy(), 1e-6, 1.0 - 1e-6)
        scaled = 1.0 / (1.0 + np.exp(-(np.log(raw) - np.log1p(-raw)) / temperatures))
        given.append(dict(zip(batch.idx_mapping_np.tolist(), scaled, strict=True)))
        return record(confidences, batch)

    def compare(step, slots, seconds, rows, counts):
        old = given[: max(0, step - first - 1)]
        blocks = [next((b[slot] for b in reversed(old) if slot in b), None) for slot in slots.tolist()]
        if len(slots) == REQUESTS:  # fewer rows are forecast by several blocks
            kept = []
            for block, count in zip(blocks, counts.tolist(), strict=True):
                sure = 1.0
                for place in range(count):
                    sure *= 1.0 if block is None else block[place]
                    kept.append(sure)
            own = np.cumsum([0.0, *sorted(kept, reverse=True)])
            seen["worst"] = max(seen["worst"], float(np.abs(planner.expected(step, slots, counts) - own).max()))
            seen["from_blocks"] += sum(block is not None for block in blocks)
        return budget(step, slots, seconds, rows, counts)

    manager.record_confidences, planner.budget = note, compare
    return seen


def main(folder):
    # Beside this file, which is the program here.
    from dspark_engine import prepare_vllm, runner_of, start  # pyrefly: ignore[missing-import]
    from dspark_models import write_models  # pyrefly: ignore[missing-import]

    write_models(folder, WIDTH)
    library = prepare_vllm()
    found = {"refusal": refusal()}
    afterwards = [names()]
    llm = start(folder, WIDTH, adapted=False)
    found["plain"] = {"tokens": answer(llm)}
    llm.llm_engine.engine_core.shutdown()

    file = folder / "sts.json"
    # Drafts that are made whatever they are worth, as the interpreter's steps are too uneven to foretell what pays.
    llm = start(folder, WIDTH, publish_every=8, refit_every=24, save_temperatures=str(file), log_every=0.01,
                pause_drafting=False)  # fmt: skip
    found["manager_while_running"] = names()[0]
    runner = runner_of(llm)
    manager = runner.adaptive_verification
    profiled = profile(runner)
    everywhere = np.arange(SIZES[-1] + 1)
    priced = manager._prices.verify.seconds(everywhere).tolist()
    laps, take = [], manager._clock.take

    def listen():
        taken = take()
        prices = manager._prices
        laps.extend((prices._point(n), ms - float(prices.draft.seconds(r))) for r, n, ms, _ in taken)
        return taken

    manager._clock.take = listen
    counted = count_drafts(llm)
    tokens = answer(llm)
    manager._calibrator.join()
    manager._publish()
    manager.report.log(manager._calibrator.temperatures, manager._prices.observed)
    found["learning"] = {
        "tokens": tokens, "counted": counted, "report": llm.collective_rpc("speculation_report")[0],
        "profile": profiled, "priced": priced, "laps": laps,
        "stock_table": [0.0, *manager.cost_tables[1][1 : SIZES[-1] + 1].tolist()],
        "refreshed": manager._prices.verify.seconds(everywhere).tolist(),
    }  # fmt: skip
    llm.llm_engine.engine_core.shutdown()
    afterwards.append(names())
    found["saved"] = json.loads(file.read_text())["temperatures"]

    llm = start(folder, WIDTH, temperatures=str(file), online=False, publish_every=1000)
    manager = runner_of(llm).adaptive_verification
    manager._cudagraph_limit = 32
    manager.set_cost_curves([(1, 1e-3), (8, 1e-3)], DIP)
    counted, forecasts = count_drafts(llm), watch_forecasts(manager)
    tokens = answer(llm)
    slots = slice(0, 8)
    used = (manager._raw[slots] > 0).all(1)
    found["dip"] = {
        "tokens": tokens, "counted": counted, "report": llm.collective_rpc("speculation_report")[0],
        "forecasts": forecasts,
        "raw": manager._raw[slots][used].tolist(), "ranked_by": manager._confidence_probs[slots][used].tolist(),
    }  # fmt: skip
    found["follower"] = follow(manager)
    llm.llm_engine.engine_core.shutdown()
    afterwards.append(names())
    found["names_afterwards"] = afterwards
    del library
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
