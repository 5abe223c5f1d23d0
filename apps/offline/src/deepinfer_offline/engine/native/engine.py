"""The native engine's loop: plan and launch step n+1, then take the results of step n."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from deepinfer_sched import SequenceError

from deepinfer_offline.engine.base import EngineInfo, EngineStats, Request, RequestError, RequestOutput
from deepinfer_offline.engine.native.answer import Answer, End, Group, make_answers, stop_sets
from deepinfer_offline.engine.native.checks import check_request
from deepinfer_offline.engine.native.counters import count_step
from deepinfer_offline.engine.native.failure import Failure
from deepinfer_offline.engine.native.masks import MaskMaker, StepMasks
from deepinfer_offline.engine.native.outputs import FactsReader, completion, failed, finished, read_prompt
from deepinfer_offline.engine.native.parts import Parts
from deepinfer_offline.engine.native.plain_rows import PlainRows
from deepinfer_offline.engine.native.runner import NewSequence
from deepinfer_offline.engine.native.scoring import score_sequence
from deepinfer_offline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer_sched import StepPlan

    from deepinfer_offline.engine.native.results import StepResult
    from deepinfer_offline.engine.native.runner import Flight
    from deepinfer_offline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Airborne:
    """A launched step. Its draws of constrained rows wait for `masks`, which open when every earlier step is applied."""

    flight: Flight
    masks: StepMasks


_Ended = tuple[Answer, End | Exception]
"""An answer that the engine has forgotten, and why it ended."""


class NativeEngine:
    """Implements `deepinfer_offline.engine.base.Engine` on `deepinfer_sched`, `deepinfer_cache` and a model runner."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._groups: dict[str, Group] = {}
        self._answers: dict[int, Answer] = {}
        self._compiling: dict[str, Future[Any]] = {}
        self._airborne: deque[_Airborne] = deque()
        self._masks = MaskMaker(self._answers, parts.info.vocab_size)
        self._plain = PlainRows(parts.runner.model.options.max_running, parts.info.vocab_size)
        self._finished: list[RequestOutput] = []
        self._stats = EngineStats()
        self._next_seq = 0
        self._closed = False
        self._failure = Failure()
        # What exists by now lives as long as the engine: looking it over again takes a tenth of a second a time. Once more
        # before, or what is left of an engine before this one would be kept as long.
        gc.collect()
        gc.freeze()

    @property
    def info(self) -> EngineInfo:
        return self._parts.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._parts.tokenizer

    # --- requests --------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and then queues nothing, when it can never run."""
        parts = self._parts
        if request.request_id in self._groups:
            raise RequestError(f"request id {request.request_id!r} is in use", code="duplicate_id", param="request_id")
        self._check(request, has_tokenizer=parts.tokenizer is not None)
        eos = parts.tokenizer.eos_ids if parts.tokenizer is not None else frozenset()
        group = Group(request, *stop_sets(request, eos))
        wanted = request.params.structured_outputs
        if request.grammar is None and wanted is not None:
            self._compiling[request.request_id] = parts.grammars.submit(wanted)
            self._groups[request.request_id] = group
        else:
            self._start(group, request.grammar)
            self._groups[request.request_id] = group

    def abort(self, request_id: str) -> None:
        """Forget a request; it yields no output. Unknown ids are ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            self._drop(group)

    def has_unfinished(self) -> bool:
        """Whether a request has no output yet. A last step in flight whose rows have all ended does not count."""
        return bool(self._groups or self._finished)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [n, vocab]. Only while nothing else is unfinished.

        Raises:
            RequestError: ids that the model does not have, none, or more than the context holds.
            RuntimeError: requests are unfinished, or an earlier call failed.
        """
        if self.has_unfinished():
            raise RuntimeError("logits need an idle engine; finish or abort the requests first")
        self._failure.check()
        self._land_all()
        parts = self._parts
        self._check(Request("logits", token_ids, SamplingParams()), has_tokenizer=False)
        self._next_seq += 1
        with self._failure.watch():
            return score_sequence(parts.runner, parts.scheduler, parts.cache.block_table, self._next_seq - 1, token_ids)

    def _check(self, request: Request, *, has_tokenizer: bool) -> None:
        image = self._parts.runner.model.facts.image_token_id
        check_request(request, self._parts.info, has_tokenizer=has_tokenizer, image_token_id=image)

    # --- the loop --------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Launch what can be launched, then take the results of the oldest step; return what finished.

        Where answers ended, the next step is launched before they are made up: it may take what they held, and its device
        should not wait for texts. After an error every later call raises one.
        """
        self._failure.check()
        self._start_compiled()
        self._launch_planned()
        if self._airborne:
            ended = self._land()
            try:
                if ended and self._parts.ahead > 1:
                    self._launch_planned()
            finally:
                self._end_all(ended)
        elif self._compiling and not self._finished:
            wait(list(self._compiling.values()), return_when=FIRST_COMPLETED)
            self._start_compiled()
        done, self._finished = self._finished, []
        return done

    def _launch_planned(self) -> None:
        while (plan := self._plan()) is not None:
            with self._failure.watch():
                self._launch(plan)

    def _plan(self) -> StepPlan | None:
        """The next step; None when one in flight must land first, or there is nothing to run.

        Drafts follow tokens that are known: nothing may be in flight then, except steps that draft on the device themselves.
        """
        scheduler, speculation = self._parts.scheduler, self._parts.speculation
        if speculation is None or not speculation.synchronous:
            return scheduler.plan() if len(self._airborne) < self._parts.ahead else None
        drafts = None if self._verifies_on_host() else speculation.ahead()
        if drafts is not None:
            return scheduler.plan(drafts) if len(self._airborne) < self._parts.ahead else None
        if self._airborne:
            return None
        speculation.propose(self._answers)
        return scheduler.plan()

    def _verifies_on_host(self) -> bool:
        """Whether a step in flight verifies drafts that came from the host: only its result says where its rows go on."""
        plans = [airborne.flight.plan for airborne in self._airborne]
        return any(plan.ahead is None and plan.drafts.any() for plan in plans)

    def _launch(self, plan: StepPlan) -> None:
        runner = self._parts.runner
        if plan.admitted:
            runner.add_sequences([self._load(self._answers[seq_id]) for seq_id in plan.admitted])
        masks = self._masks.step(plan)
        if not self._airborne:
            masks.open()
        self._airborne.append(_Airborne(runner.launch(plan, masks if masks.needed else None), masks))

    def _load(self, answer: Answer) -> NewSequence:
        """What an admitted sequence puts into its slot, in the order of the steps: ids and parameters."""
        parts, group, seq = self._parts, answer.group, answer.seq
        params = group.request.params
        fill = partial(
            parts.table.write,
            seq.slot,
            params,
            seed=answer.seed,
            prompt_len=seq.num_prompt,
            stop_ids=sorted(group.stop_ids | group.eos_ids),
            vocab_size=parts.info.vocab_size,
        )
        wanted = params.prompt_logprobs if answer.index == 0 else None
        top = None if wanted is None else (parts.info.vocab_size if wanted < 0 else wanted)
        prompt = None if top is None else (seq.num_prompt, top)
        self._plain.load(answer)
        if group.cached_tokens < 0:
            group.cached_tokens = seq.cached_tokens
            self._stats.prompt_tokens += seq.num_prompt
            self._stats.cached_tokens += seq.cached_tokens
        return NewSequence(seq.slot, seq.tokens, prompt, fill)

    def _land(self) -> list[_Ended]:
        """Take the oldest step's results: tokens to answers, ends to the scheduler; then open the next step's masks.

        Returns the answers that ended, for `_end_all`.

        An interrupt while it waits changes nothing: the step is taken by the next call.
        """
        try:
            result = self._parts.runner.collect(self._airborne[0].flight)
            with self._failure.watch():
                self._airborne.popleft()
                ended = self._apply(result)
        except Exception:
            self._open_masks()
            raise
        if self._airborne:
            self._airborne[0].masks.open()
        if self._parts.store is not None:
            self._parts.store.save()
        return ended

    def _land_all(self) -> None:
        while self._airborne:
            self._end_all(self._land())

    def _apply(self, result: StepResult) -> list[_Ended]:
        plan = result.plan
        self._take_prompts(result)
        facts = FactsReader(result.logprobs, result.draw_rows)
        going_on = self._plain.going_on(result)
        numbers, stops = result.num_tokens.copy(), np.zeros(plan.num_rows, np.bool_)
        used = going_on.astype(numbers.dtype)
        ended: list[_Ended] = []
        for row in np.flatnonzero((numbers > 0) & ~going_on).tolist():
            seq_id = int(plan.seq_ids[row])
            answer = self._answers.get(seq_id)
            if answer is None:
                continue  # it ended while this step was in flight
            tokens = result.token_ids[row, : numbers[row]].tolist()
            taken, end = self._take(answer, seq_id, tokens, partial(facts.get, row))
            numbers[row] = used[row] = taken
            if end is not None:
                stops[row] = True
                ended.append((answer, end))
        self._stats.generated_tokens += int(used.sum())
        self._parts.scheduler.apply(plan, result.token_ids, numbers, stops)
        for answer, _ in ended:
            self._forget(answer.seq.seq_id)
        said = replace(result, num_tokens=used)  # what rows of ended answers drew is no gain
        count_step(self._stats, said)
        if self._parts.speculation is not None:
            self._parts.speculation.landed(said, self._answers)
        return ended

    def _take(
        self, answer: Answer, seq_id: int, tokens: Sequence[int], facts: Callable[[int], Any]
    ) -> tuple[int, End | Exception | None]:
        """Give an answer its tokens up to its end. What it raises ends its own request only."""
        error = self._masks.errors.pop(seq_id, None)
        if error is not None:
            return 1, error
        reach = self._masks.reach.pop(seq_id, None)
        try:
            for place, token in enumerate(tokens):
                if place == reach:  # accepted drafts led where no mask could be made: the matcher says why
                    answer.matcher.mask()
                end = answer.take(token, facts(place), place)
                if end is not None:
                    return place + 1, end
        except Exception as raised:
            return len(tokens), raised
        return len(tokens), None

    def _take_prompts(self, result: StepResult) -> None:
        for prompt in result.prompts:
            row = int(np.flatnonzero(result.plan.slots == prompt.slot)[0])
            answer = self._answers.get(int(result.plan.seq_ids[row]))
            if answer is not None:
                read_prompt(prompt.first, prompt.values, answer.group.prompt_facts)

    # --- beginnings and ends ---------------------------------------------------------------------------------

    def _start_compiled(self) -> None:
        """Queue the requests whose grammars are ready; answer those whose grammars are refused."""
        for request_id in [name for name, future in self._compiling.items() if future.done()]:
            group, future = self._groups[request_id], self._compiling.pop(request_id)
            try:
                self._start(group, future.result())
            except Exception as error:
                self._fail(group, error)

    def _start(self, group: Group, grammar: Any) -> None:
        """Queue the n sequences of a request; all or none."""
        parts = self._parts
        answers = make_answers(group, grammar, self._next_seq, parts.info.max_model_len, parts.seed, parts.tokenizer)
        for answer in answers:
            try:
                parts.scheduler.add(answer.seq)  # equal sequences: if the first one fits, all do
            except SequenceError as error:
                raise RequestError(f"the request cannot run here: {error}", code="does_not_fit") from error
            self._answers[answer.seq.seq_id] = answer
        self._next_seq += len(answers)
        group.answers.extend(answers)

    def _end_all(self, ended: Sequence[_Ended]) -> None:
        for answer, end in ended:
            self._end(answer, end)

    def _end(self, answer: Answer, end: End | Exception) -> None:
        group = answer.group
        if self._groups.get(group.request.request_id) is not group:
            return  # another of its answers failed in this step
        if isinstance(end, Exception):
            self._fail(group, end)
            return
        try:
            group.completions[answer.index] = completion(answer, end, self.tokenizer)
            output = finished(group, self.tokenizer) if group.done else None
        except Exception as error:
            self._fail(group, error)
            return
        if output is not None:
            del self._groups[group.request.request_id]
            self._stats.finished += 1
            self._finished.append(output)

    def _fail(self, group: Group, error: Exception) -> None:
        """End a request with an error; the other requests go on."""
        if self._groups.get(group.request.request_id) is group:
            self._drop(group)
            self._stats.finished += 1
            self._finished.append(failed(group, error))

    def _drop(self, group: Group) -> None:
        self._groups.pop(group.request.request_id, None)
        self._compiling.pop(group.request.request_id, None)
        for answer in group.answers:
            if self._forget(answer.seq.seq_id):
                self._parts.scheduler.abort(answer.seq.seq_id)

    def _forget(self, seq_id: int) -> bool:
        """Take a sequence out of the live ones; False when it was not one."""
        answer = self._answers.pop(seq_id, None)
        self._plain.forget(seq_id)
        if answer is not None and self._parts.speculation is not None:
            self._parts.speculation.end(answer)
        return answer is not None

    # --- numbers and the end ---------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot; does not change the engine."""
        scheduler, speculation = self._parts.scheduler, self._parts.speculation
        extra = dict(self._stats.extra) | ({"speculation": speculation.report()} if speculation is not None else {})
        if self._parts.store is not None:
            extra["kv_store"] = self._parts.store.report()
        if self._parts.grammars.notes:
            extra["grammar_notes"] = dict(self._parts.grammars.notes)
        return replace(
            self._stats,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + len(self._compiling),
            peak_kv_blocks=self._parts.cache.stats().peak_used_pages,
            extra=extra,
        )

    def close(self) -> None:
        """Stop the threads and give the memory back. May be called again."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):  # a step that fails now has nobody to tell
            self._land_all()
            if self._parts.store is not None:
                self._parts.store.finish()
        self._open_masks()
        self._parts.grammars.close()
        self._parts.runner.close()
        self._masks.close()
        gc.unfreeze()

    def _open_masks(self) -> None:
        """Let steps in flight finish: nothing else will open their masks."""
        for airborne in self._airborne:
            airborne.masks.open()
