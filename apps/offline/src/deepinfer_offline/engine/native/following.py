"""Which sequences a drafter has been told about, and how far: it is fed when it is asked, not when tokens come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from deepinfer_specdec import Draft, Drafter

    from deepinfer_offline.engine.native.answer import Answer
    from deepinfer_offline.engine.native.results import StepResult


@runtime_checkable
class HearsSteps(Protocol):
    """A drafter that takes what sequences say from the steps' results, and needs no text."""

    def hear(self, result: StepResult) -> None:
        """A step's results were applied."""


class Following:
    """Feeds a drafter from the sequences themselves, or with the results of all steps if it `HearsSteps`.

    Args:
        drafter: guesses from token ids.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._listener = drafter if isinstance(drafter, HearsSteps) else None
        self._fed: dict[int, int] = {}  # sequence -> tokens that the drafter has

    def behind(self, answer: Answer) -> int:
        """Tokens of the sequence that the drafter does not have."""
        return 0 if self._listener else len(answer.seq.tokens) - self._fed.get(answer.seq.seq_id, 0)

    def follows(self, answer: Answer) -> bool:
        """Whether the drafter was told about the sequence."""
        return answer.seq.seq_id in self._fed

    def draft(self, answers: Sequence[Answer], limits: np.ndarray, floor: float) -> Draft:
        """Tell the drafter all that the sequences have said, then let it guess; see `Drafter.propose`."""
        self.tell(answers)
        return self.drafter.propose([answer.seq.seq_id for answer in answers], limits, floor)

    def hear(self, result: StepResult) -> None:
        """A step's results were applied."""
        if self._listener is not None:
            self._listener.hear(result)

    def end(self, answer: Answer) -> None:
        """A sequence has ended: what it said last is kept for the others, its name is forgotten."""
        if self.follows(answer):
            self.tell([answer])
            del self._fed[answer.seq.seq_id]
            self.drafter.end(answer.seq.seq_id)

    def tell(self, answers: Iterable[Answer]) -> None:
        """Give the drafter what it does not have of the sequences."""
        if self._listener is not None:
            return
        drafter, known = self.drafter, self._fed
        for answer in answers:
            seq = answer.seq
            name, tokens = seq.seq_id, seq.tokens
            fed = known.get(name)
            if fed is None:
                fed = seq.num_prompt  # what the sequence said itself is scored, not only read
                drafter.begin(name, tokens[:fed])
            if fed < len(tokens):
                drafter.extend(name, tokens[fed:])
            known[name] = len(tokens)
