"""Windows of a job: the lines that are tokenised, ordered and handed to the engine together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from deepinfer_sched import plan_job
from numpy.typing import NDArray

from deepinfer_offline.job.answer import NO_RESPONSE, Stamp, failure, refusal
from deepinfer_offline.job.errors import LineError, show
from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.pending import Pending, Refused
from deepinfer_offline.job.prepare import Preparer
from deepinfer_offline.job.request import name_of, parse_request, read_object
from deepinfer_offline.job.scan import JobIndex
from deepinfer_offline.job.task import Task

WINDOW_REQUESTS = 16384
WINDOW_TOKENS = 4 << 20
"""Prompt tokens of a window, 4 bytes each: with the objects around them, the window that runs and the one being made
stay under 200 MB whatever the lines are."""


@dataclass(slots=True)
class PrefixBound:
    """What an endless prefix cache would save, summed over the windows planned so far.

    Attributes:
        tokens: prompt tokens.
        shared_tokens: those in full blocks that an earlier request of the window has too.
        windows: how many windows there were.
    """

    tokens: int = 0
    shared_tokens: int = 0
    windows: int = 0

    @property
    def rate(self) -> float:
        """The best hit rate, 0..1."""
        return self.shared_tokens / self.tokens if self.tokens else 0.0


class WindowMaker:
    """Makes windows of the lines that are still to be answered.

    Args:
        index: of the first pass.
        todo: bool [records], which records to answer; records that copy another one are never among them.
        stamp: names answers.
        preparer: makes requests.
        block_size: tokens of a cache block.
        by_prefix: run requests that share a prefix together, instead of in input order.
    """

    def __init__(
        self,
        index: JobIndex,
        todo: NDArray[np.bool_],
        stamp: Stamp,
        preparer: Preparer,
        *,
        block_size: int,
        by_prefix: bool,
    ) -> None:
        self.bound = PrefixBound()
        self._index = index
        self._todo = todo
        self._stamp = stamp
        self._preparer = preparer
        self._block_size = block_size
        self._by_prefix = by_prefix

    def windows(self, lines: Iterator[Line]) -> Iterator[list[Pending | Refused]]:
        """Read lines and yield windows. Refused lines come first in each: they cost nothing."""
        pending: list[Pending] = []
        refused: list[Refused] = []
        tokens = 0
        for record, line in enumerate(lines):
            if record >= len(self._todo) or not self._todo[record]:
                continue
            item = self._judge(record, line)
            if isinstance(item, Refused):
                refused.append(item)
            else:
                pending.append(item)
                tokens += len(item.request.prompt_token_ids)
            if len(pending) + len(refused) >= WINDOW_REQUESTS or tokens >= WINDOW_TOKENS:
                yield [*refused, *self._ordered(pending)]
                pending, refused, tokens = [], [], 0
        if pending or refused:
            yield [*refused, *self._ordered(pending)]

    def _ordered(self, pending: list[Pending]) -> list[Pending]:
        if not pending:
            return pending
        prompts = (np.asarray(item.request.prompt_token_ids) for item in pending)
        outputs = [(item.request.params.max_tokens or 0) * item.request.params.n for item in pending]
        plan = plan_job(prompts, block_size=self._block_size, outputs=outputs)
        self.bound.tokens += int(plan.tokens.sum())
        self.bound.shared_tokens += plan.saved_tokens
        self.bound.windows += 1
        return [pending[i] for i in plan.order.tolist()] if self._by_prefix else pending

    def _judge(self, record: int, line: Line) -> Pending | Refused:
        key = self._stamp.line_id(line)
        custom_id = None
        try:
            value = read_object(line)
            custom_id = name_of(value)
            first = int(self._index.same_id[record])
            if first >= 0:
                raise LineError(
                    f"custom_id {show(custom_id)} is used on line {self._index.numbers[first]} already",
                    code="duplicate_custom_id",
                    param="custom_id",
                )
            return self._pending(record, line, key, parse_request(value))
        except LineError as error:
            return Refused(record, error.status, refusal(key, custom_id or error.custom_id, line.number, error))
        except Exception as error:  # a fault of ours must not cost the other lines their answers
            reason = f"internal error, {type(error).__name__}: {error}"
            return Refused(record, NO_RESPONSE, failure(key, custom_id, line.number, reason, "internal_error"))

    def _pending(self, record: int, line: Line, key: str, task: Task) -> Pending:
        request, text = self._preparer.prepare(task, key)
        names = tuple(tool["function"]["name"] for tool in task.tools or ())
        return Pending(record, line.number, key, task.custom_id, task.kind, request, text, task.tool_choice, names)
