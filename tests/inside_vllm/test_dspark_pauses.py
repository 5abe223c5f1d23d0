"""Steps without drafts inside vLLM: they are left out while drafts do not pay, the drafter's context is kept meanwhile, no row
is verified that has no draft, and nothing of it changes an answer. Stock vLLM's model runner on a CPU (see `dspark_engine.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.vllm

WIDTH, ROWS = 4, 8
# Milliseconds. Drafts that cost five steps cannot pay, as there are four of them; verifying them is next to nothing, so what a
# look has drafted is verified. Where every token costs a hundred steps nothing is ever verified.
DEAR, CHEAP = [(1, 50.0), (ROWS, 50.0)], [(1, 0.1), (ROWS, 0.1)]
FLAT, STEEP = [(1, 10.0), (256, 12.0)], [(1, 10.0), (2, 1000.0), (256, 252e3)]
SHARE = 0.9  # of the time for looks: one in about seven steps
ABORTED, ABORTED_AT, TURNS_AT = 3, 15, 40
PHASES = ("hopeless", "revived", "synchronous")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the process saw, by phase."""
    folder = tmp_path_factory.mktemp("dspark-pauses")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFER", "PYTEST"))}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("phase", ["always", *PHASES])
def test_no_answer_changes(told, phase):
    """Chunked prompts, prefix hits, preemption, an abort, a grammar and log-probabilities among them."""
    plain, answers = told["plain"]["answers"], told[phase]["answers"]
    assert sorted(plain) == sorted(answers)
    for name, tokens in plain.items():
        if int(name) == ABORTED:
            assert answers[name] == tokens[: len(answers[name])]
        else:
            assert answers[name] == tokens
    assert np.allclose(told[phase]["logprobs"], told["plain"]["logprobs"], atol=1e-4)
    assert told[phase]["preempted"] > 0


def test_the_block_does_not_run_in_paused_steps(told):
    """Counted where the drafter's forward pass begins; drafts that do not pay are made to look, and when requests come."""
    seen = told["hopeless"]
    assert seen["ran"] == seen["now"]
    assert seen["report"]["steps_run"] == len(seen["ran"])
    assert seen["report"]["steps_drafted"] == sum(seen["ran"]) < 0.35 * len(seen["ran"])
    assert seen["ran"][0]  # it begins with drafts
    assert sum(seen["ran"][-20:-1]) >= 2  # and looks on
    assert seen["report"]["drafting_pauses"] == 1
    assert seen["report"]["verified_tokens"] > 0  # what a look drafted is there for the taking


@pytest.mark.parametrize("phase", PHASES)
def test_drafts_after_a_pause_are_those_of_a_drafter_that_never_paused(told, phase):
    """The same tokens and confidences wherever it drafted: its context has every token, those of steps without drafts as well."""
    reference = told["always"]["blocks"]
    after_a_pause = [
        key for key in told[phase]["after_a_pause"] if key in reference
    ]  # it verified some beside a prompt
    assert len(after_a_pause) > 20
    for key in after_a_pause:
        tokens, confidences = told[phase]["blocks"][key]
        wanted, sure = reference[key]
        assert tokens == wanted
        assert confidences == pytest.approx(sure, abs=1e-4)


@pytest.mark.parametrize("phase", ["always", *PHASES])
def test_what_is_verified_was_drafted_in_the_last_step_of_its_row(told, phase):
    assert told[phase]["verified_without_a_draft"] == 0
    assert told[phase]["lowest_token"] >= 0  # vLLM puts -1 where a draft would be
    assert told[phase]["padded"] > 0  # requests that begin with places for drafts that nobody made


@pytest.mark.parametrize("phase", ["revived", "synchronous"])
def test_it_goes_on_when_drafts_pay_again(told, phase):
    """From the step at which verification becomes cheap, within a look and the two steps that its drafts take to come in."""
    seen = told[phase]
    before, after = seen["ran"][:TURNS_AT], seen["ran"][TURNS_AT:-1]  # vLLM itself drafts for no request's last token
    assert sum(before) < 0.35 * len(before)
    assert all(after[10:])
    assert seen["verified_after"] > 50
    assert seen["report"]["accepted_length"] > 1.2
    assert seen["report"]["drafting_pauses"] == 1


def test_a_synchronous_scheduler_schedules_no_drafts_after_a_step_without_them(told):
    seen = told["synchronous"]
    after = list(zip(seen["scheduled"][1:], seen["ran"], strict=False))
    assert all(count == 0 for count, ran in after if not ran)
    assert all(count > 0 for count, ran in after if ran)


def test_without_the_option_every_step_drafts(told):
    report = told["always"]["report"]
    assert all(told["always"]["ran"][:-1])
    assert report["steps_run"] - 1 <= report["steps_drafted"]
    assert report["drafting_pauses"] == 0


@pytest.mark.parametrize("phase", PHASES)
def test_every_draft_is_judged_once_and_nothing_else_is(told, phase):
    """In the step after it: a step without drafts has nothing to say, though vLLM's buffer of confidences is still full."""
    ran, judged = told[phase]["ran"], told[phase]["judged"]
    assert judged[0] is False
    assert judged[1:] == ran[:-1]


def asked(speculator, wanted, agreed=True, **options):
    """What a step asks of vLLM's runner, its forward pass left out, and what the adapter takes for true after it.

    `agreed`: whether the other data-parallel ranks want no drafts either.
    """
    import vllm.v1.worker.cpu_worker  # noqa: F401  (before the model runner is imported)
    from deepinfer_specdec.adapters.vllm import compat
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu import model_runner

    runner, skips = object.__new__(model_runner.GPUModelRunner), []
    drafting = SimpleNamespace(wanted=wanted, now=True)
    runner.speculator, runner.execute_model_state = object.__new__(speculator), None
    runner.adaptive_verification = SimpleNamespace(drafting=drafting)

    def execute_model(output, *args, **kwargs):
        skips.append(output.skip_drafts)
        fields = dict.fromkeys(model_runner.ExecuteModelState._fields)
        fields["num_spec_tokens_to_schedule"] = 0 if output.skip_drafts and agreed else WIDTH
        runner.execute_model_state = model_runner.ExecuteModelState(**fields)
        return "ran"

    runner.execute_model = execute_model
    compat.let_steps_skip_drafts(runner)
    output = SchedulerOutput.make_empty()
    assert runner.execute_model(output, None, **options) == "ran"
    assert output.skip_drafts is False  # the scheduler's own object
    return skips == [True], drafting.now


def test_a_step_asks_for_no_drafts_when_none_are_wanted_and_believes_what_the_ranks_agree_on():
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    assert asked(DSparkSpeculator, wanted=True) == (False, True)
    assert asked(DSparkSpeculator, wanted=False) == (True, False)
    assert asked(DSparkSpeculator, wanted=False, agreed=False) == (
        True,
        True,
    )  # another data-parallel rank wants drafts


def test_dummy_steps_and_drafters_of_other_kinds_are_left_alone():
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

    assert asked(DSparkSpeculator, wanted=False, dummy_run=True) == (False, True)
    assert asked(EagleSpeculator, wanted=False) == (False, True)


# What follows runs in the process of its own.


def requests():
    """Prompts of one and more chunks, some that begin alike and one token longer than a block; answers of all lengths."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    shared = [5, 60, 7, 8] * 4
    out = []
    for i in range(16):
        prompt = [*shared, 9 + i // 2] if i % 3 == 0 else [5 + i, 60, 7, 8 + 9 * i] * (3 + 5 * (i % 5 == 1))
        extra = {"logprobs": 2} if i % 4 == 0 else {}
        if i % 7 == 5:
            extra = {"structured_outputs": StructuredOutputsParams(regex="[a-d]{12,18}")}
        params = SamplingParams(temperature=0, max_tokens=20 + 5 * (i % 6), ignore_eos="structured_outputs" not in extra,
                                detokenize=False, **extra)  # fmt: skip
        out.append((prompt, params))
    return out


def serve(llm, at=None):
    """Answers and log-probabilities; calls `at[step]()` before steps."""
    engine, answers, logprobs = llm.llm_engine, {}, []
    for i, (prompt, params) in enumerate(requests()):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    step = 0
    while engine.has_unfinished_requests():
        for event in (at or {}).get(step, ()):
            event()
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished and output.outputs[0].logprobs:
                answer = zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
                logprobs.append((int(output.request_id), [entry[token].logprob for entry, token in answer]))
        step += 1
    return {"answers": answers, "logprobs": [value for _, values in sorted(logprobs) for value in values]}


class Watch:
    """Sees what the runner does in each step."""

    def __init__(self, llm):
        from dspark_engine import core_of, runner_of  # pyrefly: ignore[missing-import]

        self.runner, self.scheduler = runner_of(llm), core_of(llm).scheduler
        self.manager = self.runner.adaptive_verification
        self.seen = {"ran": [], "now": [], "blocks": {}, "after_a_pause": [], "verified_without_a_draft": 0, "padded": 0,
                     "lowest_token": 0, "preempted": 0, "scheduled": [], "verified_after": 0, "judged": []}  # fmt: skip
        self.ran = False
        self.judged = False
        self.last = {}  # drafts that the last step of each slot made
        self.paused = set()  # slots that a step left without a draft since their last one
        self.wrap(self.runner.speculator, "_generate_draft", self.generate)
        self.wrap(self.manager, "record_confidences", self.record)
        self.wrap(self.manager.drafting, "judge", self.judge)
        self.wrap(self.manager, "reallocate_drafts", self.reallocate)
        self.wrap(self.manager, "add_request", self.add)
        self.wrap(self.runner, "prepare_inputs", self.prepare)
        self.wrap(self.scheduler, "_preempt_request", self.preempt)

    def wrap(self, owner, name, ours):
        stock = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: ours(stock, *args, **kwargs))

    def generate(self, stock, *args, **kwargs):
        self.ran = True
        return stock(*args, **kwargs)

    def judge(self, stock, *args):
        self.judged = True
        return stock(*args)

    def add(self, stock, slot):
        self.paused.discard(slot)
        return stock(slot)

    def preempt(self, stock, *args, **kwargs):
        self.seen["preempted"] += 1
        return stock(*args, **kwargs)

    def prepare(self, stock, output, *args, **kwargs):
        new = {request.req_id for request in output.scheduled_new_reqs}
        counts = {name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()}
        self.seen["scheduled"].append(sum(count for name, count in counts.items() if name not in new))
        self.seen["padded"] += len(new & set(counts))
        batch = stock(output, *args, **kwargs)
        self.seen["lowest_token"] = min(self.seen["lowest_token"], int(batch.input_ids[: batch.num_tokens].min()))
        return batch

    def reallocate(self, stock, req_ids, idx_mapping):
        result = stock(req_ids, idx_mapping)
        admitted = self.manager._batch_draft_capacity[: len(req_ids)].tolist()
        kept = self.runner.req_states.draft_tokens
        for slot, count in zip(idx_mapping.tolist(), admitted, strict=True):
            drafted = self.last.get(slot) == kept[slot].tolist()
            self.seen["verified_without_a_draft"] += count > 0 and not drafted
            self.seen["verified_after"] += count
        return result

    def record(self, stock, confidences, batch):
        states, slots = self.runner.req_states, batch.idx_mapping_np
        ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        for row, slot in enumerate(slots.tolist()):
            self.last.pop(slot, None)
            if self.ran and ends[row]:
                self.last[slot] = states.draft_tokens[slot].tolist()
                known = states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist()
                key = " ".join(map(str, known))
                self.seen["blocks"][key] = (self.last[slot], confidences[row].tolist())
                if slot in self.paused:
                    self.seen["after_a_pause"].append(key)
                self.paused.discard(slot)
            elif not self.ran:
                self.paused.add(slot)
        self.seen["ran"].append(self.ran)
        self.seen["now"].append(self.manager.drafting.now)
        self.ran = self.judged = False
        result = stock(confidences, batch)
        self.seen["judged"].append(self.judged)
        return result


def run(folder, draft=DEAR, verify=FLAT, turns=False, engine=None, **options):
    from dspark_engine import start  # pyrefly: ignore[missing-import]

    llm = start(folder, WIDTH, engine=ENGINE | (engine or {}), publish_every=10**6, online=False, **options)
    watch = Watch(llm)
    watch.manager.set_cost_curves(draft, verify)

    def turn():
        watch.manager.set_cost_curves(CHEAP, verify)
        watch.seen["verified_after"] = 0

    at = {ABORTED_AT: [lambda: llm.llm_engine.abort_request([str(ABORTED)])]} | ({TURNS_AT: [turn]} if turns else {})
    found = serve(llm, at) | watch.seen | {"report": llm.collective_rpc("speculation_report")[0]}
    llm.llm_engine.engine_core.shutdown()
    return found


# Prompts in chunks, and too few blocks for all rows.
ENGINE = {
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 64,
    "max_model_len": 160,
    "kv_cache_memory_bytes": 500_000,
}


def main(folder):
    from dspark_engine import prepare_vllm, start  # pyrefly: ignore[missing-import]
    from dspark_models import write_models, write_tokenizer  # pyrefly: ignore[missing-import]

    write_models(folder, WIDTH, draft_scale=0.2)
    write_tokenizer(folder / "target")
    library = prepare_vllm()
    llm = start(folder, WIDTH, adapted=False, engine=ENGINE)
    found: dict[str, dict] = {"plain": serve(llm)}
    llm.llm_engine.engine_core.shutdown()
    found["always"] = run(folder, verify=STEEP, pause_drafting=False)
    found["hopeless"] = run(folder, look_share=SHARE)
    found["revived"] = run(folder, turns=True, look_share=SHARE)
    found["synchronous"] = run(folder, turns=True, engine={"async_scheduling": False}, look_share=SHARE)
    del library
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
