"""The loop of a job: feed the engine, store what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deepinfer_offline.engine.base import Engine, RequestError, RequestOutput
from deepinfer_offline.job.answer import NO_RESPONSE, OK, Stamp, failure, refusal, success
from deepinfer_offline.job.choices import Decode, write_choices
from deepinfer_offline.job.errors import JobError, LineError
from deepinfer_offline.job.feed import Feed
from deepinfer_offline.job.journal import Journal
from deepinfer_offline.job.pending import Pending, Refused
from deepinfer_offline.job.toolcalls import at_tool

MAX_IN_FLIGHT = 1024
"""Requests in the engine at a time, waiting ones included: enough to look ahead, little enough to hold."""


@dataclass(slots=True)
class Tally:
    """What this run did, counted as it happens. `lines` counts the copies of answered lines too."""

    lines: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    constrained: int = 0
    constrained_complete: int = 0
    tool_calls: int = 0
    by_length: int = 0


class JobLoop:
    """Runs one job on one engine.

    Args:
        engine: what answers.
        feed: what is asked.
        journal: where answers go.
        stamp: what every answer carries.
        lines: int64 [records], how many lines of OUTPUT each record's answer makes.
        max_in_flight: requests inside the engine at a time.
    """

    def __init__(
        self,
        engine: Engine,
        feed: Feed,
        journal: Journal,
        stamp: Stamp,
        lines: NDArray[np.int64],
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self.tally = Tally()
        self._engine = engine
        self._feed = feed
        self._journal = journal
        self._stamp = stamp
        self._lines = lines
        self._max_in_flight = max_in_flight
        self._in_flight: dict[str, Pending] = {}
        self._decode = _decoder(engine)

    def run(self, each_step: Callable[[Tally], bool]) -> bool:
        """Answer everything.

        Args:
            each_step: called after every step; False stops the loop.

        Returns:
            Whether everything was answered.
        """
        while True:
            self._fill()
            if self._in_flight:
                self._step()
            elif self._feed.finished:
                self._journal.sync()
                return True
            self._journal.tick()
            if not each_step(self.tally):
                self._journal.sync()
                return False

    def _fill(self) -> None:
        while len(self._in_flight) < self._max_in_flight:
            item = self._feed.take(wait=not self._in_flight)
            if item is None:
                return
            if isinstance(item, Refused):
                self._refuse(item)
                continue
            try:
                ids = item.request.prompt_token_ids
                self._engine.add_request(replace(item.request, prompt_token_ids=list(ids)))
            except RequestError as error:
                self._refuse_pending(item, error)
            else:
                self._in_flight[item.key] = item

    def _step(self) -> None:
        for output in self._engine.step():
            self._store(output)
        if self._in_flight and not self._engine.has_unfinished():
            lost = ", ".join(str(pending.number) for pending in list(self._in_flight.values())[:8])
            raise JobError(f"the engine stopped without answering {len(self._in_flight)} requests (lines {lost})")

    def _store(self, output: RequestOutput) -> None:
        pending = self._in_flight.pop(output.request_id)
        if output.error is not None and output.error.code not in ("engine_error", "internal_error"):
            self._refuse_pending(pending, output.error)
            return
        broken = [answer for answer in output.outputs if answer.finish_reason in ("error", "abort")]
        if output.error is not None or broken or not output.outputs:
            reason = str(output.error) if output.error else "the engine gave no complete answer"
            self.tally.failed += 1
            result = failure(pending.key, pending.custom_id, pending.number, reason)
            self._append(pending.record, NO_RESPONSE, result)
            return
        choices = write_choices(pending, output, self._decode)
        result = success(pending.key, pending.kind, pending.custom_id, self._stamp, output, choices)
        self._append(pending.record, OK, result)
        self._count(pending, output, sum(len(c.get("message", {}).get("tool_calls", ())) for c in choices))

    def _count(self, pending: Pending, output: RequestOutput, calls: int) -> None:
        tally = self.tally
        tally.answered += 1
        tally.prompt_tokens += len(output.prompt_token_ids)
        tally.cached_tokens += output.num_cached_tokens
        tally.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        tally.tool_calls += calls
        stopped = sum(answer.finish_reason == "stop" for answer in output.outputs)
        tally.by_length += len(output.outputs) - stopped
        if pending.request.params.structured_outputs is not None:
            tally.constrained += len(output.outputs)
            tally.constrained_complete += stopped

    def _refuse_pending(self, pending: Pending, error: RequestError) -> None:
        message, param, form = str(error), error.param, pending.request.params.structured_outputs
        if error.code == "invalid_schema" and form is not None:
            param = form.origin
            message = at_tool(message, pending.tool_choice, pending.tool_names) if param == "tools" else message
        fault = LineError(message, code=error.code, param=param)
        result = refusal(pending.key, pending.custom_id, pending.number, fault)
        self._refuse(Refused(pending.record, fault.status, result))

    def _refuse(self, item: Refused) -> None:
        self.tally.refused += 1
        self._append(item.record, item.status, item.result)

    def _append(self, record: int, status: int, result: bytes) -> None:
        self._journal.append(record, status, result)
        self.tally.lines += int(self._lines[record])


def _decoder(engine: Engine) -> Decode:
    tokenizer = engine.tokenizer

    def decode(token_ids: object) -> tuple[str, bytes]:
        if tokenizer is None:
            return "", b""
        raw = tokenizer.token_bytes(token_ids, skip_special_tokens=False)
        return raw.decode("utf-8", errors="replace"), raw

    return decode
