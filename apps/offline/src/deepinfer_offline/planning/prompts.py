"""Prompts of a batch file as token ids, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_offline.engine.base import RequestError
from deepinfer_offline.job.errors import LineError
from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.request import parse_request, read_object
from deepinfer_offline.job.source import Source
from deepinfer_offline.job.task import Task

_BATCH = 512  # lines that are tokenised together


@dataclass(slots=True)
class PromptReader:
    """Reads the prompts of a batch file once, in file order.

    Lines that a run would refuse are skipped and counted.

    Attributes:
        source: the opened file.
        tokenizer: `deepinfer_offline.text.tokenizer.Tokenizer`, or None for a file of token ids.
        skipped: lines skipped so far.
        first_fault: what is wrong with the first of them.
        outputs: `max_tokens` of each prompt that was read, 0 where the line does not say.
    """

    source: Source
    tokenizer: Any
    skipped: int = 0
    first_fault: str = ""
    outputs: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the token ids of each prompt, uint32."""
        batch: list[tuple[Line, Task]] = []
        for line in self.source.lines():
            try:
                batch.append((line, parse_request(read_object(line))))
            except LineError as error:
                self._skip(line, error)
            if len(batch) == _BATCH:
                yield from self._encode(batch)
                batch = []
        yield from self._encode(batch)

    def _encode(self, batch: list[tuple[Line, Task]]) -> Iterator[np.ndarray]:
        ready: list[tuple[Task, str | list[int], bool]] = []
        for line, task in batch:
            try:
                ready.append((task, *self._text(task)))
            except (LineError, RequestError) as error:
                self._skip(line, error)
        ids: dict[int, list[int]] = {}
        for special in (False, True):
            places = [place for place, (_, text, add) in enumerate(ready) if isinstance(text, str) and add is special]
            if places:
                texts = [str(ready[place][1]) for place in places]
                encoded = self.tokenizer.encode_batch(texts, add_special_tokens=special)
                ids.update(zip(places, encoded, strict=True))
        for place, (task, text, _) in enumerate(ready):
            self.outputs.append(task.params.max_tokens or 0)
            yield np.asarray(ids[place] if isinstance(text, str) else text, np.uint32)

    def _text(self, task: Task) -> tuple[str | list[int], bool]:
        """The prompt's text or ids, and whether encoding adds special tokens."""
        if task.token_ids is not None:
            return task.token_ids, False
        if self.tokenizer is None:
            raise LineError("the model has no tokenizer; only prompts of token ids can be planned")
        if task.messages is None:
            assert task.text is not None, f"{task.custom_id} has no prompt"
            return task.text, task.add_special_tokens is not False
        template = self.tokenizer.chat_template
        if template is None:
            raise LineError(f"{self.tokenizer.name} has no chat template, so chat messages have no token ids")
        options = dict(task.template)
        if options.pop("continue_final_message", False):
            options["add_generation_prompt"] = False
        return template.render(task.messages, tools=task.tools, **options), False

    def _skip(self, line: Line, error: Exception) -> None:
        self.skipped += 1
        self.first_fault = self.first_fault or f"line {line.number}: {error}"
